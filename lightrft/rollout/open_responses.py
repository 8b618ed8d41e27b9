"""Prompts and responses of unfinished episodes, as an engine has them: all but their tokens."""
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor

from lightrft.rollout.engine import SamplingParams
from lightrft.types import Episode, Key, MediaSpan, Prompt, prompt_groups, Segment


@dataclass(eq=False)
class OpenPrompt:
    """A prompt with unfinished responses.

    Attributes:
        length: number of tokens.
        left: unfinished responses.
        rendered: form in which an engine's library takes it, made once.
        responses: those that never had a row, where an engine has rows.
        slot: prompt slot; -1: none.
        shift: position after the prompt, less its length (M-RoPE).
        logits: [1, V] after the prompt, while some of its responses have not found a row.
    """
    prompt: Prompt
    length: int
    left: int
    rendered: Any = None
    responses: list["OpenResponse"] = field(default_factory=list)
    slot: int = -1
    shift: int = 0
    logits: Tensor | None = None

    @property
    def span(self) -> MediaSpan:
        """The prompt as what has its media."""
        return MediaSpan(0, self.length, self.prompt.media)


@dataclass(eq=False)
class OpenResponse:
    """An unfinished response.

    Attributes:
        episode: prompt, seed, and the tokens on the host, drawn and given ones: a row may have drawn more.
        waits: after a stop token, for an answer.
        slot: row of the cache, where an engine has rows; -1: none.
        order: place in the order of submission.
        shift: what media behind the prompt add to the positions after them, as of a prompt.
    """
    key: Key
    episode: Episode
    prompt: OpenPrompt
    params: SamplingParams
    waits: bool
    slot: int = -1
    order: int = 0
    shift: int = 0

    def spans_from(self, begin: int) -> list[MediaSpan]:
        """Return the spans at or behind the token ``begin`` of the response, in the tokens from there on."""
        first = self.prompt.length + begin
        return [span._replace(start=span.start - first, stop=span.stop - first) for span in self.episode.media_spans
                if span.start >= first]  # yapf: disable

    @property
    def after(self) -> int:
        """Position of the first token of the response, if all its media were before it."""
        return self.prompt.length + self.prompt.shift + self.shift

    @property
    def newest(self) -> int:
        """Last token of prompt and response."""
        return (self.episode.segments[-1] if self.episode.segments else self.prompt.prompt).token_ids[-1]

    @property
    def room(self) -> int:
        """Number of tokens that may still be drawn."""
        return self.params.max_new_tokens - self.episode.response_len

    @property
    def begins_hot(self) -> bool:
        """True if the next token is the first one, of all branches, which has a temperature of its own."""
        begun = self.episode.segments or self.episode.closed
        return self.params.first_temperature is not None and not begun

    @property
    def next_params(self) -> SamplingParams:
        """Parameters of the next token."""
        params = self.params
        return replace(params, temperature=cast(float, params.first_temperature)) if self.begins_hot else params

    def resume(self, answer: Segment, params: SamplingParams | None) -> None:
        """Append an answer; ``params``: of all that is drawn from now on.

        Raises:
            ValueError: after the answer no token could be drawn.
        """
        length, params = self.episode.response_len + len(answer.token_ids), params or self.params
        if length >= params.max_new_tokens:
            raise ValueError(f"response {self.key} has {length} tokens with its answer, of {params.max_new_tokens} "
                             "that it may have: none is left to draw")
        self.params = params
        self.episode.add([answer])


def opened(episodes: Mapping[Key, Episode], params: SamplingParams, waits: bool) -> list[list[OpenResponse]]:
    """Open the responses of episodes, group by group; those of a group share their prompt."""
    groups, keys = [], iter(episodes)
    for members in prompt_groups(episodes.values()):
        prompt = OpenPrompt(first := members[0].prompt, len(first.token_ids), left=len(members))
        groups.append([OpenResponse(key, episode, prompt, params, waits) for episode, key in zip(members, keys)])
    return groups
