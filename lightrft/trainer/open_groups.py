"""Groups under way: responses that need not be finished, and what they are once they are."""
from dataclasses import dataclass, field
from typing import Any

from lightrft.rollout.engine import Completion
from lightrft.trainer.samples import Ended, Rows
from lightrft.types import Prompt, Sample


@dataclass
class Response(Completion):
    """A response so far, without its prompt; ``weight_versions`` are those of the weights that drew its tokens."""
    weight_versions: list[int]

    def add(self, more: Completion, version: int) -> None:
        """Append what the weights of ``version`` have generated."""
        self.token_ids, self.logprobs = self.token_ids + more.token_ids, self.logprobs + more.logprobs
        self.weight_versions = self.weight_versions + [version] * len(more.token_ids)
        self.finish_reason = more.finish_reason


@dataclass
class OpenGroup:
    """The responses to one prompt, on every rank."""
    number: int  # of the draw of its prompt
    prompt: Prompt
    responses: list[Response]
    rows: Rows = field(default_factory=list)  # of the responses that are finished and scored

    @classmethod
    def new(cls, number: int, prompt: Prompt, size: int) -> "OpenGroup":
        """Nothing is generated yet."""
        return cls(number, prompt, [Response([], [], "abort", []) for _ in range(size)])

    @classmethod
    def load(cls, state: dict[str, Any]) -> "OpenGroup":
        """The inverse of :func:`dataclasses.asdict`."""
        responses = [Response(**response) for response in state["responses"]]
        return cls(state["number"], Prompt(**state["prompt"]), responses, state["rows"])

    @property
    def open(self) -> list[int]:
        """Which responses are unfinished."""
        return [j for j, response in enumerate(self.responses) if response.finish_reason == "abort"]

    @property
    def tokens(self) -> int:
        """Generated so far."""
        return sum(len(response.token_ids) for response in self.responses)

    def oldest(self, version: int) -> int:
        """Version of the oldest weights that drew a token; ``version`` where none is drawn yet."""
        return min((v for response in self.responses for v in response.weight_versions[:1]), default=version)

    def add(self, completions: list[Completion], version: int, places: list[int]) -> None:
        """Go on with the responses at ``places``; those that are finished have had theirs."""
        for j, more in zip(places, completions, strict=True):
            if self.responses[j].finish_reason == "abort":
                self.responses[j].add(more, version)

    def ended(self, place: int) -> Ended:
        """A finished response, to be decoded."""
        return self.number, self.prompt, place, self.responses[place]

    def samples(self, group_id: int) -> list[Sample]:
        """The finished group as samples, not decoded."""
        prompt, n = self.prompt, len(self.prompt.token_ids)
        return [
            Sample(prompt, group_id, index, prompt.token_ids + done.token_ids,
                   [False] * n + [True] * len(done.token_ids), [0.0] * n + done.logprobs,
                   [-1] * n + done.weight_versions, done.finish_reason) for index, done in enumerate(self.responses)
        ]
