"""An unfinished response of a stepped engine, on the host: its request, and the tokens that it has so far."""
from dataclasses import dataclass, field, replace
from typing import Any, cast

from lightrft.rollout.engine import Completion, Generated, Key, Request, SamplingParams


@dataclass(eq=False)
class OpenPrompt:
    """A prompt with unfinished responses. ``rendered``: the form in which an engine's library takes it, made once."""
    request: Request
    rendered: Any = field(default=None, kw_only=True)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.request.token_ids)


@dataclass(eq=False)
class OpenResponse:
    """An unfinished response. ``token_ids``: prefix, drawn and appended ones; ``unreported``: what it has drawn since
    its last report."""
    key: Key
    prompt: OpenPrompt
    seed: int
    params: SamplingParams
    waits: bool  # after a stop token, for an answer
    token_ids: list[int]
    unreported: Completion = field(default_factory=lambda: Completion([], [], "abort"), kw_only=True)

    @property
    def all_ids(self) -> list[int]:
        """Tokens of the prompt and of the response."""
        return self.prompt.request.token_ids + self.token_ids

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

    def draw(self, token_ids: list[int], logprobs: list[float]) -> None:
        """Append drawn tokens, to be reported."""
        self.token_ids = self.token_ids + token_ids
        self.unreported.extend(Completion(token_ids, logprobs, "abort"))

    def append(self, token_ids: list[int], params: SamplingParams | None) -> None:
        """Append an answer; ``params``: of all that is drawn from now on.

        Raises:
            ValueError: after the answer no token could be drawn.
        """
        token_ids, params = self.token_ids + token_ids, params or self.params
        if len(token_ids) >= params.max_new_tokens:
            raise ValueError(f"response {self.key} has {len(token_ids)} tokens with its answer, of "
                             f"{params.max_new_tokens} that it may have: none is left to draw")
        self.token_ids, self.params = token_ids, params

    def report(self, reason: str) -> Generated:
        """Return what was drawn since the last report."""
        part, self.unreported = replace(self.unreported, finish_reason=reason), Completion([], [], "abort")
        return Generated(*self.key, part)


def prefixes_of(request: Request) -> list[list[int]]:
    """Return the tokens that each response of ``request`` has already."""
    return [list(prefix) for prefix in request.prefixes] or [[] for _ in request.seeds]
