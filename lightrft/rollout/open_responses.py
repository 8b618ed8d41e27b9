"""Unfinished responses of an engine, on the host: their prompts, and the tokens that they have so far."""
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor

from lightrft.rollout.engine import Generated, SamplingParams
from lightrft.types import Episode, Key, Prompt, prompt_groups, Segment


@dataclass(eq=False)
class OpenPrompt:
    """A prompt with unfinished responses.

    Attributes:
        rendered: form in which an engine's library takes it, made once.
        responses: those that never had a row, where an engine has rows.
        left: unfinished responses.
        slot: prompt slot; -1: none.
        shift: position after the prompt, less its length (M-RoPE).
        logits: [1, V] after the prompt, while some of its responses have not found a row.
    """
    prompt: Prompt
    rendered: Any = None
    responses: list["OpenResponse"] = field(default_factory=list)
    left: int = 0
    slot: int = -1
    shift: int = 0
    logits: Tensor | None = None

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the prompt."""
        return self.prompt.token_ids

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.prompt.token_ids)


@dataclass(eq=False)
class OpenResponse:
    """An unfinished response.

    Attributes:
        waits: after a stop token, for an answer.
        token_ids: those on the host, drawn and given ones: a row may have drawn more.
        unreported: what it has drawn since its last report, of that, by the version of the weights.
        slot: row of the cache, where an engine has rows; -1: none.
        order: place in the order of submission.
    """
    key: Key
    prompt: OpenPrompt
    seed: int
    params: SamplingParams
    waits: bool
    token_ids: list[int]
    unreported: list[Segment] = field(default_factory=list)
    slot: int = -1
    order: int = 0

    @property
    def all_ids(self) -> list[int]:
        """Tokens of the prompt and of the response."""
        return self.prompt.token_ids + self.token_ids

    @property
    def room(self) -> int:
        """Number of tokens that may still be drawn."""
        return self.params.max_new_tokens - len(self.token_ids)

    @property
    def begins_hot(self) -> bool:
        """True if the next token is the first one, and that has a temperature of its own."""
        return self.params.first_temperature is not None and not self.token_ids

    @property
    def next_params(self) -> SamplingParams:
        """Parameters of the next token."""
        params = self.params
        return replace(params, temperature=cast(float, params.first_temperature)) if self.begins_hot else params

    def draw(self, token_ids: list[int], logprobs: list[float], version: int) -> None:
        """Append tokens that weights of this version drew, to be reported."""
        self.token_ids = self.token_ids + token_ids
        Segment(token_ids, logprobs, True, version).extend(self.unreported)

    def append(self, given: Segment, params: SamplingParams | None) -> None:
        """Append an answer; ``params``: of all that is drawn from now on.

        Raises:
            ValueError: after the answer no token could be drawn.
        """
        token_ids, params = self.token_ids + given.token_ids, params or self.params
        if len(token_ids) >= params.max_new_tokens:
            raise ValueError(f"response {self.key} has {len(token_ids)} tokens with its answer, of "
                             f"{params.max_new_tokens} that it may have: none is left to draw")
        self.token_ids, self.params = token_ids, params

    def report(self, reason: str) -> Generated:
        """Return what was drawn since the last report."""
        segments, self.unreported = self.unreported, []
        return Generated(self.key, segments, reason)


def opened(episodes: Iterable[Episode], params: SamplingParams, waits: bool) -> list[list[OpenResponse]]:
    """Open the responses of episodes, group by group; those of a group share their prompt."""
    groups = []
    for group in prompt_groups(episodes):
        prompt = OpenPrompt(group[0].prompt, left=len(group))
        groups.append([OpenResponse(episode.key, prompt, episode.seed, params, waits, episode.response_ids)
                       for episode in group])  # yapf: disable
    return groups
