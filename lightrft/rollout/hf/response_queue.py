"""Responses of the HF engine that wait for a slot, for an answer, or for their next token after one."""
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import count

from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.open_responses import opened, OpenPrompt, OpenResponse
from lightrft.types import Episode, Key, Segment


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
        self._submitted = count()

    def submit(self, episodes: Mapping[Key, Episode], params: SamplingParams, waits: bool) -> None:
        """Append unfinished episodes."""
        begun, fresh = list[OpenPrompt](), list[OpenPrompt]()
        for group in opened(episodes, params, waits):
            for response in group:
                response.order = next(self._submitted)
            self.open |= {response.key: response for response in group}
            prompt = group[0].prompt
            prompt.responses = group
            (begun if any(response.episode.segments for response in group) else fresh).append(prompt)
        for prompts in (begun, fresh):
            self.prompts.extend(sorted(prompts, key=lambda prompt: -prompt.length))

    @property
    def waiting(self) -> int:
        """Responses that wait for a slot."""
        shared = len(self.shared.responses) if self.shared else 0
        return shared + len(self.resuming) + sum(len(prompt.responses) for prompt in self.prompts)

    def park(self, responses: Iterable[OpenResponse]) -> None:
        """Let responses wait for an answer."""
        self.parked |= {response.key: response for response in responses}

    def finish(self, responses: Iterable[OpenResponse]) -> None:
        """Forget responses, wherever they are."""
        for response in responses:
            if self.open.pop(response.key, None) is not None:
                response.prompt.left -= 1
                self.parked.pop(response.key, None)

    def abort(self, keys: Iterable[Key]) -> list[OpenResponse]:
        """End responses, of which all that was drawn is on the host; return those that do not wait."""
        ending = [self.open[key] for key in keys if key in self.open]
        ended = [response for response in ending if response.key not in self.parked]
        self.finish(ending)
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

    def resume(self, key: Key, answer: Segment, params: SamplingParams | None) -> None:
        """Append an answer to a parked response, which then waits for its next token.

        Raises:
            KeyError: the response does not wait for an answer.
            ValueError: after the answer no token could be drawn.
        """
        response = self.parked[key]
        response.resume(answer, params)
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
