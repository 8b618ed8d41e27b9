"""Branches: a prompt and the tokens behind it, in segments that have one source; one sequence of a forward pass."""
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from lightrft.utils.prompt import Prompt

REWRITTEN = ("messages", "text", "token_ids", "media", "unexpanded_ids")
"""Fields of a prompt that an environment may write anew; the others are the row's."""


@dataclass
class Segment:
    """Run of tokens from one source: the policy drew them with weights of one ``version``, or they were given, by a
    tool or an environment.

    ``logprobs`` are the engine's log-probs, in nats, under the distribution that was sampled; 0 on given tokens.
    ``media`` and ``unexpanded_ids`` of given tokens are what they are of a :class:`~lightrft.utils.prompt.Prompt`.
    """
    token_ids: list[int]
    logprobs: list[float]
    drawn: bool = True
    version: int = -1  # of given tokens
    media: tuple[str, ...] = ()
    unexpanded_ids: list[int] = field(default_factory=list)  # empty without media

    @classmethod
    def given(cls, turn: "list[int] | Segment") -> "Segment":
        """Make a segment of tokens that the policy did not draw; one of them is returned as it is."""
        return turn if isinstance(turn, Segment) else cls(turn, [0.0] * len(turn), False)

    def extend(self, segments: list["Segment"]) -> None:
        """Append these tokens to ``segments``; the last one becomes longer if it is of the same source, and neither has
        media."""
        last = segments[-1] if segments else None
        one_source = last is not None and (last.drawn, last.version) == (self.drawn, self.version)
        if last is not None and one_source and not (last.media or self.media):
            segments[-1] = replace(self, token_ids=last.token_ids + self.token_ids,
                                   logprobs=last.logprobs + self.logprobs)  # yapf: disable
        elif self.token_ids:
            segments.append(self)


class MediaSpan(NamedTuple):
    """Tokens [start, stop) of a sequence in which tokens of media stand for the features of the media ``keys``."""
    start: int
    stop: int
    keys: tuple[str, ...]


class TokenSequence:
    """A prompt and the segments behind it, read as one sequence of tokens."""
    prompt: Prompt
    segments: list[Segment]

    @property
    def prompt_len(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt.token_ids)

    @property
    def response_len(self) -> int:
        """Number of tokens after the prompt."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def drawn_len(self) -> int:
        """Number of tokens that the policy drew; an environment may have written others between them."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.drawn)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and response."""
        return self.prompt_len + self.response_len

    @property
    def runs(self) -> list[tuple[bool, int, int]]:
        """Runs of tokens of the response from one source, each with whether the policy drew them, start and stop in the
        sequence."""
        runs, start = list[tuple[bool, int, int]](), self.prompt_len
        for drawn, segments in groupby(self.segments, key=attrgetter("drawn")):
            stop = start + sum(len(segment.token_ids) for segment in segments)
            runs.append((drawn, start, stop))
            start = stop
        return runs

    @property
    def media_spans(self) -> tuple[MediaSpan, ...]:
        """Tokens of the sequence, behind the prompt, that have media."""
        spans: list[MediaSpan] = []
        start = self.prompt_len
        for segment in self.segments:
            stop = start + len(segment.token_ids)
            if segment.media:
                spans.append(MediaSpan(start, stop, segment.media))
            start = stop
        return tuple(spans)

    @property
    def media(self) -> tuple[str, ...]:
        """Keys of all media, in the order of their tokens."""
        media = self.prompt.media
        for segment in self.segments:
            media += segment.media
        return media

    @property
    def response_ids(self) -> list[int]:
        """Tokens after the prompt."""
        return [*chain.from_iterable(segment.token_ids for segment in self.segments)]

    @property
    def token_ids(self) -> list[int]:
        """Tokens of prompt and response."""
        return self.prompt.token_ids + self.response_ids

    @property
    def loss_mask(self) -> list[bool]:
        """True on the tokens that the policy drew."""
        return self._per_token(False, (segment.drawn for segment in self.segments))

    @property
    def weight_versions(self) -> list[int]:
        """Versions of the weights that drew each token; -1 on the others."""
        return self._per_token(-1, (segment.version for segment in self.segments))

    @property
    def logprobs(self) -> list[float]:
        """Log-probs of the engine; 0 on the tokens that the policy did not draw."""
        return [0.0] * self.prompt_len + [*chain.from_iterable(segment.logprobs for segment in self.segments)]

    def tokens_state(self) -> dict[str, Any]:
        """Return the tokens behind the prompt, as lists per token, for a checkpoint."""
        n, numbered = self.prompt_len, enumerate(self.segments)
        media = [(number, segment.media, segment.unexpanded_ids) for number, segment in numbered if segment.media]
        return {"token_ids": self.response_ids, "logprobs": self.logprobs[n:],
                "weight_versions": self.weight_versions[n:], "media": media}  # yapf: disable

    @property
    def pieces(self) -> list[Segment]:
        """The prompt, as given tokens with its media, and the segments behind it."""
        ids = self.prompt.token_ids
        return [Segment(ids, [0.0] * len(ids), False, -1, self.prompt.media, self.prompt.unexpanded_ids),
                *self.segments]  # yapf: disable

    def _per_token(self, before: Any, values: Iterator[Any]) -> list[Any]:
        """Repeat a value per segment over its tokens, behind ``before`` on those of the prompt."""
        runs = ([value] * len(segment.token_ids) for value, segment in zip(values, self.segments))
        return [*[before] * self.prompt_len, *chain.from_iterable(runs)]


@dataclass
class Branch(TokenSequence):
    """Part of an episode that stands behind one prompt, drawn with the noise of ``seed``; one that never forks has one.
    """
    prompt: Prompt
    segments: list[Segment] = field(default_factory=list)
    seed: int = 0

    @classmethod
    def load(cls, prompt: Prompt, state: dict[str, Any]) -> "Branch":
        """Restore a branch from :meth:`state`; ``prompt`` has the row's facts."""
        asked = state["prompt"] | {"media": tuple(state["prompt"]["media"])}
        return cls(replace(prompt, **asked), load_segments(state), state["seed"])

    def state(self) -> dict[str, Any]:
        """Return the tokens, and what an environment may have written anew of the prompt, for a checkpoint."""
        asked = {name: getattr(self.prompt, name) for name in REWRITTEN}
        return self.tokens_state() | {"prompt": asked, "seed": self.seed}


def load_segments(state: dict[str, Any]) -> list[Segment]:
    """Undo :meth:`TokenSequence.tokens_state`."""
    segments, tokens = list[Segment](), zip(state["token_ids"], state["logprobs"], state["weight_versions"])
    for version, run in groupby(tokens, key=itemgetter(2)):
        ids, logprobs, _ = zip(*run)
        segments.append(Segment([*ids], [*logprobs], version >= 0, version))
    for number, keys, unexpanded_ids in state.get("media", ()):
        segments[number] = replace(segments[number], media=tuple(keys), unexpanded_ids=unexpanded_ids)
    return segments
