"""Rounds of an engine whose library draws every part of a response as one request of its own."""
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, ExitStack
from typing import Protocol

import torch.distributed as dist

from lightrft.rollout.completions import complete
from lightrft.rollout.engine import (Arrived, Completion, Ended, Finished, Generated, Key, NextTurn, Request,
                                     SamplingParams, check_requests, stop_ids)
from lightrft.rollout.open_responses import OpenPrompt, OpenResponse, prefixes_of


class PartDrawer(Protocol):
    """Draws parts of responses with a library. A part ends with a stop token, with the first token where that has a
    temperature of its own, or with the last one that the response may have."""

    def round(self, begun: list[OpenResponse], waiting: bool) -> Ended:
        """Begin a part of each of ``begun``, and run one round of all that draw; return the parts that have ended.
        ``waiting``: other responses wait for answers, so a round lasts milliseconds."""

    def cancel(self, keys: Iterable[Key] | None = None) -> Ended:
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
        takes_media: requests may have media.
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
        self._submitted = 0
        self._forget()

    def _forget(self) -> None:
        """Drop all responses. They are open until they end: they begin a part, draw one, or wait for an answer."""
        self._open: dict[Key, OpenResponse] = {}
        self._beginning: list[OpenResponse] = []
        self._drawing: dict[Key, OpenResponse] = {}
        self._parked: dict[Key, OpenResponse] = {}
        self._aborting: list[Key] = []
        self._ended: list[Generated] = []  # while the engine paused

    @abstractmethod
    def _wake_cache(self) -> None:
        """Allocate the cache, if it sleeps."""

    def _shared(self, parts: Ended) -> Ended:
        """Return the parts that this rank's drawer has returned, on all ranks of ``group``."""
        return parts

    def generate(self, requests: list[Request], params: SamplingParams, on_finished: Finished | None = None,
                 on_arrived: Arrived | None = None, next_turn: NextTurn | None = None) -> list[list[Completion]]:
        """Implement :meth:`~lightrft.rollout.engine.RolloutEngine.generate`. A collective of ``group``.

        Raises:
            RuntimeError: while asleep, or when no weights came since the start or the last sleep.
            ValueError: for an empty prompt, media, a token out of the vocabulary, or a request that is longer than the
                engine was started for.
        """
        self._check(requests, params)
        with self._empty_after_an_error():
            return complete(self, requests, params, on_finished, on_arrived, next_turn)

    def submit(self, requests: list[Request], params: SamplingParams, waits: bool = False) -> int:
        """Implement :meth:`~lightrft.rollout.engine.SteppedEngine.submit`; errors as of :meth:`generate`."""
        self._check(requests, params)
        first, self._submitted = self._submitted, self._submitted + len(requests)
        for number, request in enumerate(requests, first):
            prompt = OpenPrompt(request)
            responses = [
                OpenResponse((number, j), prompt, seed, params, waits, prefix)
                for j, (seed, prefix) in enumerate(zip(request.seeds, prefixes_of(request), strict=True))
            ]
            self._open |= {response.key: response for response in responses}
            self._beginning += responses
        return first

    def step(self) -> list[Generated]:
        """Implement :meth:`~lightrft.rollout.engine.SteppedEngine.step`. A collective of ``group``."""
        if self._aborting or self._ended:
            with self._empty_after_an_error():
                ended, self._ended = self._aborted() + self._ended, []
                return ended
        if not (self._beginning or self._drawing):
            return []
        self._check_ready()
        with self._empty_after_an_error():
            return self._round()

    def resume(self, key: Key, token_ids: list[int], params: SamplingParams | None = None) -> None:
        """Implement :meth:`~lightrft.rollout.engine.SteppedEngine.resume`."""
        response = self._parked[key]
        if params is not None:
            self._check([response.prompt.request], params)
        response.append(token_ids, params)
        self._beginning.append(self._parked.pop(key))

    def abort(self, keys: Iterable[Key]) -> None:
        """Implement :meth:`~lightrft.rollout.engine.SteppedEngine.abort`."""
        opened = [key for key in dict.fromkeys(keys) if key in self._open and key not in self._aborting]
        for key in opened:
            if self._parked.pop(key, None) is not None:
                del self._open[key]
        self._aborting += [key for key in opened if key in self._open]

    def stop_ids(self, params: SamplingParams) -> list[int]:
        """Return the tokens that end a response."""
        return stop_ids(self.eos_token_ids, params, self.vocabulary)

    def _check_ready(self) -> None:
        if self._asleep:
            raise RuntimeError(f"the {self.title} engine is asleep: call wake() and update_weights() before generate()")
        if not self._ready:
            raise RuntimeError(f"the {self.title} engine has no weights yet: call update_weights() before generate()")

    def _check(self, requests: list[Request], params: SamplingParams) -> None:
        self._check_ready()
        check_requests(requests, params, self.title, self.vocabulary, self.longest, self.takes_media)

    def _round(self) -> list[Generated]:
        """Begin parts, and take those that have ended."""
        self._wake_cache()
        begun, self._beginning = self._beginning, []
        self._drawing |= {response.key: response for response in begun}
        parts = self._shared(self.drawer.round(begun, bool(self._parked)) if self.drawer else [])
        for i, j, part in parts:
            if not part.token_ids:  # or it would begin again for ever
                raise RuntimeError(f"{self.title} has ended response {(i, j)} without a token ({part.finish_reason})")
        return self._take(parts)

    def _take(self, parts: Ended) -> list[Generated]:
        """Append parts to their responses; report, and finish or park, those that draw no further token now."""
        reports = []
        for i, j, part in parts:
            response = self._drawing.pop((i, j))
            response.draw(part.token_ids, part.logprobs)
            if part.finish_reason != "stop" and response.room:  # a hot first token, or a part that was cancelled
                self._beginning.append(response)
                continue
            reports.append(response.report("stop" if part.finish_reason == "stop" else "length"))
            if response.waits and response.room and part.finish_reason == "stop":
                self._parked[i, j] = response
            else:
                del self._open[i, j]
        return reports

    def _cancelled(self, keys: list[Key]) -> list[Generated]:
        """Stop the parts of responses that draw; return what has ended before."""
        if not keys:
            return []
        return self._take(self._shared(self.drawer.cancel(keys) if self.drawer else []))

    def _aborted(self) -> list[Generated]:
        """End the responses that are to be aborted; return what they have drawn."""
        keys, self._aborting = self._aborting, []
        reports = self._cancelled([key for key in keys if key in self._drawing])
        for key in keys:
            if (response := self._open.pop(key, None)) is not None and self._parked.pop(key, None) is None:
                reports.append(response.report("abort"))
        self._beginning = [response for response in self._beginning if response.key in self._open]
        return reports

    def _pause(self) -> None:
        """Let no response draw; they begin again with the next round."""
        begun, self._beginning = self._beginning, []
        self._ended += self._cancelled(list(self._drawing))
        self._beginning += begun

    @contextmanager
    def _empty_after_an_error(self) -> Iterator[None]:
        """Context in which an error ends all responses, or what follows would resume them."""
        with ExitStack() as after_an_error:
            after_an_error.callback(self._empty)
            yield
            after_an_error.pop_all()

    def _empty(self) -> None:
        drawing = self._drawing
        self._forget()
        if self.drawer and drawing:
            self.drawer.cancel()
