"""Rounds of an engine whose library draws each part of a response as a separate request."""
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import torch.distributed as dist

from lightrft.rollout.engine import SamplingParams, check_episodes, stop_ids
from lightrft.rollout.open_responses import opened, OpenResponse
from lightrft.types import Episode, Key, Segment
from lightrft.utils.errors import UserError
from lightrft.utils.watchdog import tick


class Part(NamedTuple):
    """Tokens that a library has drawn for a response in one request. ``reason``: why it has ended, one of
    :data:`~lightrft.rollout.engine.FINISH_REASONS`."""
    key: Key
    token_ids: list[int]
    logprobs: list[float]
    reason: str


class PartDrawer(Protocol):
    """Draws parts of responses with a library. A part ends with a stop token, with the first token where that has a
    temperature of its own, or with the last one that the response may have."""

    def round(self, begun: list[OpenResponse], waiting: bool) -> list[Part]:
        """Begin a part of each of ``begun``, and run one round of all that draw; return the parts that have ended.
        ``waiting``: other responses wait for answers, so a round lasts milliseconds. :func:`tick` if tokens were drawn
        by parts that have not ended."""

    def cancel(self, keys: Iterable[Key] | None = None) -> list[Part]:
        """Stop the parts of these responses, or of all; return them as they are: as "abort", unless they have ended
        before."""


class PartwiseEngine(ABC):
    """Base of engines that have a :class:`PartDrawer`. The ranks of ``group`` call every method alike.

    Open responses outlive an update of the weights, and sleep: they resume from their tokens.

    Attributes:
        drawer: None on ranks for which another one draws.
        title: name in messages.
        eos_token_ids: tokens that end every response.
        vocabulary: tokens of the model.
        longest: most tokens of a prompt and its response.
        takes_media: prompts may have media.
    """
    title: str
    drawer: PartDrawer | None
    eos_token_ids: frozenset[int]
    vocabulary: int
    longest: int
    takes_media: bool
    group: dist.ProcessGroup | None

    def __init__(self) -> None:
        self.weight_version = 0
        self._ready = self._holds = self._asleep = self._cache_asleep = False
        self._forget()

    def _forget(self) -> None:
        """Drop all responses. They are open until they end: they begin a part, draw one, or wait for an answer."""
        self._open: dict[Key, OpenResponse] = {}
        self._beginning: list[OpenResponse] = []
        self._drawing: dict[Key, OpenResponse] = {}
        self._parked: dict[Key, OpenResponse] = {}
        self._aborting: list[Key] = []
        self._ended: dict[Key, Episode] = {}  # while the engine paused

    @abstractmethod
    def _wake_cache(self) -> None:
        """Allocate the cache, if it sleeps."""

    def _shared(self, parts: list[Part]) -> list[Part]:
        """Return the parts that this rank's drawer has returned, on all ranks of ``group``."""
        return parts

    def submit(self, episodes: Mapping[Key, Episode], params: SamplingParams, waits: bool = False) -> None:
        """Implement :meth:`~lightrft.rollout.engine.SteppedEngine.submit`.

        Raises:
            RuntimeError: while asleep, or when no weights came since the start or the last sleep.
            ValueError: for an empty prompt, media, a token out of the vocabulary, or an episode that is longer than
                the engine was started for.
        """
        self._check_ready()
        check_episodes(episodes.values(), params, self.title, self.vocabulary, self.longest, self.takes_media)
        self._refuse_shown(key for episode in episodes.values() for span in episode.media_spans for key in span.keys)
        responses = [response for group in opened(episodes, params, waits) for response in group]
        self._open |= {response.key: response for response in responses}
        self._beginning += responses

    def step(self) -> dict[Key, Episode]:
        """Implement :meth:`~lightrft.rollout.engine.SteppedEngine.step`. A collective of ``group``."""
        if self._aborting or self._ended:
            ended, self._ended = self._aborted() | self._ended, {}
            return ended
        if not (self._beginning or self._drawing):
            return {}
        self._check_ready()
        return self._round()

    def resume(self, key: Key, segment: Segment, params: SamplingParams | None = None) -> None:
        """Append an answer to a parked response, whose next part begins in the next round."""
        response = self._parked[key]
        self._refuse_shown(segment.media)
        if params is not None:
            check_episodes([Episode(response.prompt.prompt, key.group, key.index, role=key.role)], params, self.title,
                           self.vocabulary, self.longest, self.takes_media)
        response.resume(segment, params)
        self._beginning.append(self._parked.pop(key))

    def _refuse_shown(self, media: Iterable[str]) -> None:
        if shown := [*media]:
            raise UserError(f"the {self.title} engine takes media of prompts alone, and an environment has shown "
                            f"{', '.join(shown)}: use --engine_type hf")

    def abort(self, keys: Iterable[Key]) -> None:
        """Let the next round cancel what is being drawn of these responses; those that wait end now."""
        opened = [key for key in dict.fromkeys(keys) if key in self._open and key not in self._aborting]
        for key in opened:
            if self._parked.pop(key, None) is not None:
                del self._open[key]
        self._aborting += [key for key in opened if key in self._open]

    def reset(self) -> None:
        """Cancel and forget all responses."""
        drawing = self._drawing
        self._forget()
        if self.drawer and drawing:
            self.drawer.cancel()

    def stop_ids(self, params: SamplingParams) -> list[int]:
        """Return the tokens that end a response."""
        return stop_ids(self.eos_token_ids, params, self.vocabulary)

    def _check_ready(self) -> None:
        if self._asleep:
            raise RuntimeError(f"the {self.title} engine is asleep: call wake() and update_weights() before generate()")
        if not self._ready:
            raise RuntimeError(f"the {self.title} engine has no weights yet: call update_weights() before generate()")

    def _round(self) -> dict[Key, Episode]:
        """Begin parts, and take those that have ended."""
        self._wake_cache()
        begun, self._beginning = self._beginning, []
        self._drawing |= {response.key: response for response in begun}
        if self.drawer is None:
            tick()  # the drawer of another rank does, which this one waits for
        parts = self._shared(self.drawer.round(begun, bool(self._parked)) if self.drawer else [])
        for part in parts:
            if not part.token_ids:  # or it would begin again for ever
                raise RuntimeError(f"{self.title} has ended response {tuple(part.key)} without a token ({part.reason})")
        return self._take(parts)

    def _take(self, parts: list[Part]) -> dict[Key, Episode]:
        """Append parts, which the current weights drew, to their episodes; return, and finish or park, those that draw
        no further token now."""
        ended = {}
        for key, token_ids, logprobs, reason in parts:
            episode = (response := self._drawing.pop(key)).episode
            episode.add([Segment(token_ids, logprobs, True, self.weight_version)])
            if reason != "stop" and response.room:  # a hot first token, or a part that was cancelled
                self._beginning.append(response)
                continue
            episode.finish_reason, ended[key] = "stop" if reason == "stop" else "length", episode
            if response.waits and response.room and reason == "stop":
                self._parked[key] = response
            else:
                del self._open[key]
        return ended

    def _cancelled(self, keys: list[Key]) -> dict[Key, Episode]:
        """Stop the parts of responses that draw; return those that have ended before."""
        if not keys:
            return {}
        return self._take(self._shared(self.drawer.cancel(keys) if self.drawer else []))

    def _aborted(self) -> dict[Key, Episode]:
        """End the responses that are to be aborted; return those that did not wait."""
        keys, self._aborting = self._aborting, []
        ended = self._cancelled([key for key in keys if key in self._drawing])
        for key in keys:
            if (response := self._open.pop(key, None)) is not None and self._parked.pop(key, None) is None:
                ended[key] = response.episode
        self._beginning = [response for response in self._beginning if response.key in self._open]
        return ended

    def _pause(self) -> None:
        """Let no response draw; they begin again with the next round."""
        begun, self._beginning = self._beginning, []
        self._ended |= self._cancelled(list(self._drawing))
        self._beginning += begun
