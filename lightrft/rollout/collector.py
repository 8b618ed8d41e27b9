"""Collects responses as they finish: reports them to the callbacks of each rank, and asks for further turns."""
from dataclasses import replace

import numpy as np
import torch.distributed as dist

from lightrft.rollout.engine import Arrived, Completion, Ended, Finished, NextTurn, Request, SamplingParams
from lightrft.rollout.tp_group import all_of_group, share_requests, share_turns
from lightrft.utils.errors import UserError
from lightrft.utils.watchdog import tick

Key = tuple[int, int]  # request, index among its seeds


class CompletionCollector:
    """Collector of the responses of all ranks that share an engine (``group``; None: this rank alone).

    An engine generates a response in parts. A part ends with a turn, or with the first token where that has its own
    temperature. :meth:`take` appends each part to its response and decides whether the response continues; the engine
    then generates the next part after :meth:`begun`. The callbacks see only this rank's requests, counted from 0.

    Args:
        requests: of this rank; ``self.requests`` are those of the group. A collective of ``group``.
        vocabulary: tokens of the model, to which appended tokens are limited.

    Attributes:
        left: unfinished responses of every request.
    """

    def __init__(self, requests: list[Request], params: SamplingParams, vocabulary: int,
                 group: dist.ProcessGroup | None = None, on_finished: Finished | None = None,
                 on_arrived: Arrived | None = None, next_turn: NextTurn | None = None) -> None:
        self.requests, self.mine = share_requests(requests, group)
        self.max_new_tokens, self.vocabulary, self.group = params.max_new_tokens, vocabulary, group
        self.on_finished, self.on_arrived, self.next_turn = on_finished, on_arrived, next_turn
        self.responses = [[Completion([], [], "abort") for _ in request.seeds] for request in self.requests]
        self.left = np.array([len(request.seeds) for request in self.requests], dtype=np.int64)
        self.open, self.has_enough = len(self.mine), False

    @property
    def empty(self) -> list[int]:
        """Requests without seeds, which ask for nothing."""
        return [i for i, request in enumerate(self.requests) if not request.seeds]

    @property
    def own(self) -> list[list[Completion]]:
        """Responses of this rank, in the order of its requests and their seeds."""
        return [self.responses[i] for i in self.mine]

    def begun(self, i: int, j: int) -> list[int]:
        """Tokens that a response has so far: its prefix, and what was drawn and appended since."""
        prefixes = self.requests[i].prefixes
        return (prefixes[j] if prefixes else []) + self.responses[i][j].token_ids

    def take(self, parts: Ended) -> tuple[list[int], list[Key]]:
        """Store parts that have ended, and report the responses that are finished to ``on_arrived``.

        Returns:
            The requests that are complete now, and the responses that continue.
        """
        finished, resumed = self.store(parts)
        own = [(i - self.mine.start, j, self.responses[i][j]) for i, j in finished if i in self.mine]
        if own and self.on_arrived is not None:
            self.on_arrived(own)
        return [i for i in dict.fromkeys(i for i, _ in finished) if not self.left[i]], resumed

    def store(self, parts: Ended) -> tuple[list[Key], list[Key]]:
        """Append parts to their responses; report nothing. Return the finished responses, and those that continue."""
        for i, j, part in parts:
            self.responses[i][j].extend(part)
        turns, finished, resumed = self._turns(parts), list[Key](), list[Key]()
        for i, j, part in parts:
            if part.finish_reason != "abort":
                (resumed if self._resumes(i, j, turns.get((i, j))) else finished).append((i, j))
        for i, _ in finished:
            self.left[i] -= 1
        return finished, resumed

    def _resumes(self, i: int, j: int, appended: list[int] | None) -> bool:
        """Append the next turn's first tokens to a response; False if there is no next turn, or no room for it."""
        response, prefixes = self.responses[i][j], self.requests[i].prefixes
        room = self.max_new_tokens - len(response.token_ids) - (len(prefixes[j]) if prefixes else 0)
        if response.finish_reason == "length" and room:  # only the first token was asked for
            appended = []
        if appended is None:
            return False
        if len(appended) >= room:
            response.finish_reason = "length"
            return False
        response.extend(Completion(appended, [0.0] * len(appended), "abort", [(0, len(appended))] if appended else []))
        return True

    def _turns(self, parts: Ended) -> dict[Key, list[int]]:
        """Ask each rank for the next turns of its responses, if any has drawn a stop token; share the answers."""
        if self.next_turn is None or all(part.finish_reason != "stop" for *_, part in parts):
            return {}
        own = [(i, j) for i, j, part in parts if i in self.mine and part.finish_reason == "stop"]
        answers = self.next_turn([(i - self.mine.start, j, replace(self.responses[i][j]))
                                  for i, j in own]) if own else []
        own_turns = {key: one.token_ids for key, one in zip(own, answers, strict=True) if one is not None}
        turns = share_turns(own_turns, self.group)
        for (i, _), ids in turns.items():
            if ids and not 0 <= min(ids) <= max(ids) < self.vocabulary:
                raise UserError(f"the next turn of request {i} has tokens outside of the model's vocabulary of "
                                f"{self.vocabulary}: the tokenizer is not the model's")
        return turns

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
