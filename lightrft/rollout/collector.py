"""Collects responses as they finish: reports them to the callbacks of each rank, and asks for further turns."""
import time
from dataclasses import replace

import numpy as np
import torch.distributed as dist

from lightrft.models.vocabulary import check_ids
from lightrft.rollout.engine import (Answer, Arrived, Completion, Continuation, Ended, Finished, Key, NextTurn,
                                     PendingAnswer, Request, SamplingParams, SteppedEngine)
from lightrft.rollout.tp_group import all_of_group, share_requests, share_turns
from lightrft.utils.watchdog import tick

_POLL_S = 1e-3  # between two looks at answers while all responses wait


def generate(engine: SteppedEngine, collector: "CompletionCollector", params: SamplingParams) -> list[list[Completion]]:
    """Run the requests of ``collector`` round by round; return this rank's responses, in the order of its requests."""
    if not collector.requests:
        return []
    first = engine.submit(collector.requests, params, waits=collector.next_turn is not None)
    complete = collector.empty
    while not collector.enough(complete):
        complete, resumed = collector.take([(i - first, j, part) for i, j, part in engine.step()])
        for i, j in resumed:
            engine.resume((first + i, j), collector.appended[i, j])
        engine.abort([(first + i, j) for i, j in collector.finished])
    engine.abort([(first + i, j) for i, responses in enumerate(collector.responses) for j in range(len(responses))])
    return collector.finish([(i - first, j, part) for i, j, part in engine.step()])


class CompletionCollector:
    """Collector of the responses of all ranks that share an engine (``group``; None: this rank alone).

    An engine generates a response in parts. A part ends with a turn, or with the first token where that has its own
    temperature. :meth:`take` appends each part to its response and decides whether the response continues; the engine
    then generates the next part after :meth:`begun`. A response whose answer is pending does neither until the answer
    is there. The callbacks see only this rank's requests, counted from 0.

    Args:
        requests: of this rank; ``self.requests`` are those of the group. A collective of ``group``.
        vocabulary: tokens of the model, to which appended tokens are limited.

    Attributes:
        left: unfinished responses of every request.
        asked: responses that wait for an answer; of those of this rank, with the answer.
        appended: tokens that the last call of :meth:`take` has appended to the responses that continue.
        finished: responses that it has finished.
    """

    def __init__(self, requests: list[Request], params: SamplingParams, vocabulary: int,
                 group: dist.ProcessGroup | None = None, on_finished: Finished | None = None,
                 on_arrived: Arrived | None = None, next_turn: NextTurn | None = None) -> None:
        self.requests, self.mine = share_requests(requests, group)
        self.max_new_tokens, self.vocabulary, self.group = params.max_new_tokens, vocabulary, group
        self.on_finished, self.on_arrived, self.next_turn = on_finished, on_arrived, next_turn
        self.responses = [[Completion([], [], "abort") for _ in request.seeds] for request in self.requests]
        self.left = np.array([len(request.seeds) for request in self.requests], dtype=np.int64)
        self.asked: dict[Key, Answer] = {}
        self.appended: dict[Key, list[int]] = {}
        self.finished: list[Key] = []
        self.open, self.has_enough = len(self.mine), False

    @property
    def empty(self) -> list[int]:
        """Requests without seeds, which ask for nothing."""
        return [i for i, request in enumerate(self.requests) if not request.seeds]

    def begun(self, i: int, j: int) -> list[int]:
        """Tokens that a response has so far: its prefix, and what was drawn and appended since."""
        prefixes = self.requests[i].prefixes
        return (prefixes[j] if prefixes else []) + self.responses[i][j].token_ids

    def take(self, parts: Ended) -> tuple[list[int], list[Key]]:
        """Store parts that have ended, and report the responses that are finished to ``on_arrived``. Waits a moment if
        every response waits for an answer.

        Returns:
            The requests that are complete now, and the responses that continue.
        """
        if not parts and len(self.asked) == self.left.sum():
            time.sleep(_POLL_S)
        resumed = self._store(parts)
        own = [(i - self.mine.start, j, self.responses[i][j]) for i, j in self.finished if i in self.mine]
        if own and self.on_arrived is not None:
            self.on_arrived(own)
        return [i for i in dict.fromkeys(i for i, _ in self.finished) if not self.left[i]], resumed

    def finish(self, rest: Ended) -> list[list[Completion]]:
        """Store the parts of responses that were stopped, and the answers that are pending, without which these could
        not resume; report nothing. Return the responses of this rank, in the order of its requests and their seeds."""
        self._store(rest)
        while self.asked:
            tick()
            time.sleep(_POLL_S)
            self._store([])
        return [self.responses[i] for i in self.mine]

    def _store(self, parts: Ended) -> list[Key]:
        """Append parts and answers to their responses; return those that continue."""
        for i, j, part in parts:
            self.responses[i][j].extend(part)
        answers = self._answers([(i, j) for i, j, part in parts if part.finish_reason == "stop"])
        answers |= {(i, j): self._rest(i, j) for i, j, part in parts if part.finish_reason == "length"}
        keys = [key for key in dict.fromkeys([*((i, j) for i, j, _ in parts), *answers]) if key in answers]
        self.appended = {}
        resumed = [key for key in keys if self._resumes(*key, answers[key])]
        self.finished = [key for key in keys if key not in self.appended]
        for i, _ in self.finished:
            self.left[i] -= 1
        return resumed

    def _room(self, i: int, j: int) -> int:
        return self.max_new_tokens - len(self.begun(i, j))

    def _rest(self, i: int, j: int) -> list[int] | None:
        """Return what is appended to a response that has drawn all it was asked for: nothing, if that was the first
        token; None if it has no room left."""
        return [] if self._room(i, j) else None

    def _resumes(self, i: int, j: int, appended: list[int] | None) -> bool:
        """Append the next turn's first tokens to a response; False if there is no next turn, or no room for it."""
        response = self.responses[i][j]
        if appended is None:
            return False
        if len(appended) >= self._room(i, j):
            response.finish_reason = "length"
            return False
        self.appended[i, j] = appended
        response.extend(Completion(appended, [0.0] * len(appended), "abort", [(0, len(appended))] if appended else []))
        return True

    def _answers(self, stopped: list[Key]) -> dict[Key, list[int] | None]:
        """Ask for the next turns of responses that have drawn a stop token, each rank for its own; return the answers
        that are there, of all ranks."""
        if self.next_turn is None:
            return dict.fromkeys(stopped)
        self.asked |= dict.fromkeys(stopped)
        if own := [(i, j) for i, j in stopped if i in self.mine]:
            ended = [(i - self.mine.start, j, replace(self.responses[i][j])) for i, j in own]
            self.asked |= zip(own, self.next_turn(ended), strict=True)
        if not self.asked:
            return {}
        own_answers = {key: _result(answer) for key, answer in self.asked.items() if key[0] in self.mine
                       and _is_there(answer)}  # yapf: disable
        appended = {key: None if answer is None else answer.token_ids for key, answer in own_answers.items()}
        answers = share_turns(appended, self.group)
        for (i, _), ids in answers.items():
            check_ids(f"the next turn of request {i}", ids or (), self.vocabulary)
        self.asked = {key: answer for key, answer in self.asked.items() if key not in answers}
        return answers

    def enough(self, complete: list[int]) -> bool:
        """Report complete requests; return whether generation may stop, because no rank needs a further token.

        Engines call it in every round, so it ticks for the watchdog. A collective of ``group`` unless ``complete`` is
        empty.
        """
        tick()
        own = [i for i in complete if i in self.mine]
        self.open -= len(own)
        if self.on_finished is not None:
            self.has_enough |= any([self.on_finished(i - self.mine.start, self.responses[i]) for i in own])
        return bool(complete) and all_of_group(self.has_enough or not self.open, self.group)


def _is_there(answer: Answer) -> bool:
    return not isinstance(answer, PendingAnswer) or answer.done()


def _result(answer: Answer) -> Continuation | None:
    return answer.result() if isinstance(answer, PendingAnswer) else answer
