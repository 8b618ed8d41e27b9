"""Unfinished responses of the HF engine, on the host: what they have so far, and who waits for what."""
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from lightrft.rollout import open_responses
from lightrft.rollout.engine import Generated, Key, Request, SamplingParams
from lightrft.rollout.open_responses import prefixes_of


@dataclass(eq=False)
class OpenPrompt(open_responses.OpenPrompt):
    """A prompt with unfinished responses."""
    responses: list["OpenResponse"] = field(default_factory=list)  # those that never had a slot
    left: int = 0  # unfinished responses
    slot: int = -1  # prompt slot, -1: none
    shift: int = 0  # position after the prompt, less its length (M-RoPE)
    logits: Tensor | None = None  # [1, V] after the prompt, while some of its samples have not found a slot


@dataclass(eq=False)
class OpenResponse(open_responses.OpenResponse):
    """An unfinished response. ``token_ids`` are those on the host: a slot may have drawn more. ``unreported``: of what
    it has drawn since its last report, that in slots that it has lost."""
    prompt: OpenPrompt
    slot: int = -1  # row of the cache, -1: none


class ResponseQueue:
    """Responses that have no slot yet or wait for something, in the order in which they are served.

    Attributes:
        prompts: prompts of which no response has begun, those with prefixes and long ones first.
        shared: the prompt of which some responses have a slot and the others, in ``responses``, wait for one.
        resuming: begun responses that wait for a slot.
        answered: responses that still have their slots, to which an answer has been appended.
        parked: responses that wait for an answer, with or without a slot.
    """

    def __init__(self) -> None:
        self.open: dict[Key, OpenResponse] = {}
        self.prompts, self.resuming = deque[OpenPrompt](), deque[OpenResponse]()
        self.shared: OpenPrompt | None = None
        self.answered: list[OpenResponse] = []
        self.parked: dict[Key, OpenResponse] = {}

    def submit(self, requests: list[Request], params: SamplingParams, waits: bool, first: int) -> None:
        """Append requests, whose numbers count from ``first``."""
        prompts = []
        for number, request in enumerate(requests, first):
            prompt = OpenPrompt(request, left=len(request.seeds))
            prompt.responses = [
                OpenResponse((number, j), prompt, seed, params, waits, prefix)
                for j, (seed, prefix) in enumerate(zip(request.seeds, prefixes_of(request), strict=True))
            ]
            self.open |= {response.key: response for response in prompt.responses}
            prompts += [prompt] if prompt.responses else []
        self.prompts.extend(sorted(prompts, key=lambda prompt: (not any(prompt.request.prefixes), -prompt.length)))

    @property
    def waiting(self) -> int:
        """Responses that wait for a slot."""
        shared = len(self.shared.responses) if self.shared else 0
        return shared + len(self.resuming) + sum(len(prompt.responses) for prompt in self.prompts)

    def finish(self, response: OpenResponse) -> None:
        """Forget a response, wherever it is."""
        if self.open.pop(response.key, None) is not None:
            response.prompt.left -= 1
            self.parked.pop(response.key, None)

    def abort(self, keys: Iterable[Key]) -> list[Generated]:
        """End responses, of which all that was drawn is on the host; return that of those that do not wait."""
        ending = [self.open[key] for key in keys if key in self.open]
        ended = [response.report("abort") for response in ending if response.key not in self.parked]
        for response in ending:
            self.finish(response)
        self._drop_finished()
        return ended

    def _drop_finished(self) -> None:
        """Remove finished responses from all that wait for a slot."""
        for prompt in (*self.prompts, *([self.shared] if self.shared else [])):
            prompt.responses = self._unfinished(prompt.responses)
        self.prompts = deque(prompt for prompt in self.prompts if prompt.responses)
        if self.shared and not self.shared.responses:
            self.shared = None
        self.resuming, self.answered = deque(self._unfinished(self.resuming)), self._unfinished(self.answered)

    def _unfinished(self, responses: Iterable[OpenResponse]) -> list[OpenResponse]:
        return [response for response in responses if response.key in self.open]

    def resume(self, key: Key, token_ids: list[int], params: SamplingParams | None) -> None:
        """Append an answer to a parked response, which then waits for its next token.

        Raises:
            KeyError: the response does not wait for an answer.
            ValueError: after the answer no token could be drawn.
        """
        response = self.parked[key]
        response.append(token_ids, params)
        del self.parked[key]
        (self.answered if response.slot >= 0 else self.resuming).append(response)

    def requeue_all(self) -> None:
        """Let all responses wait for a slot, because all rows and prompts are lost."""
        self.resuming.extend(self.answered)
        self.answered = []
        if self.shared:
            self.shared.logits = None
            self.prompts.appendleft(self.shared)
            self.shared = None
