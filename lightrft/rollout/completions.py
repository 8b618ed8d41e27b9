"""Completions of requests: the records of engines, for episodes that have no prompt of a data set."""
from collections.abc import Sequence
from dataclasses import dataclass

from lightrft.rollout.engine import (Answer, Arrived, Completion, Continuation, Finished, NextTurn, PendingAnswer,
                                     Request, SamplingParams, SteppedEngine)
from lightrft.rollout.open_responses import prefixes_of
from lightrft.rollout.scheduler import generate, PendingTurn, Round, Turn
from lightrft.types import Episode, Prompt


def complete(engine: SteppedEngine, requests: list[Request], params: SamplingParams,
             on_finished: Finished | None = None, on_arrived: Arrived | None = None,
             next_turn: NextTurn | None = None) -> list[list[Completion]]:
    """Implement :meth:`~lightrft.rollout.engine.RolloutEngine.generate` by episodes."""
    groups, reported = [_episodes(i, request) for i, request in enumerate(requests)], dict[int, list[Completion]]()

    def finished(i: int) -> bool:
        reported[i] = [_completion(requests[i], episode) for episode in groups[i]]
        return on_finished is not None and bool(on_finished(i, reported[i]))

    def heard(finished_now: Round) -> bool:
        if on_arrived is not None:
            on_arrived([_ended(requests, episode) for episode in finished_now.episodes])
        return any([finished(group[0].group_id) for group in finished_now.groups])

    def turns(stopped: list[Episode]) -> list[Turn | PendingTurn]:
        assert next_turn is not None
        return [_turn(answer) for answer in next_turn([_ended(requests, episode) for episode in stopped])]

    enough = any([finished(i) for i, group in enumerate(groups) if not group])  # those ask for nothing
    episodes = [] if enough else [episode for group in groups for episode in group]
    generate(engine, episodes, params, next_turn and turns, heard)
    return [reported[i] if i in reported else [_completion(requests[i], episode) for episode in group]
            for i, group in enumerate(groups)]  # yapf: disable


def _episodes(i: int, request: Request) -> list[Episode]:
    prompt = Prompt("", request.token_ids, "", media=request.media, unexpanded_ids=request.unexpanded)
    episodes = [Episode(prompt, i, j, role="request", seed=seed) for j, seed in enumerate(request.seeds)]
    for episode, prefix in zip(episodes, prefixes_of(request), strict=True):
        episode.give(prefix)
    return episodes


def _completion(request: Request, episode: Episode) -> Completion:
    """Return what an episode has behind the prefix of its request."""
    done = Completion([], [], episode.finish_reason)
    begun = bool(request.prefixes and request.prefixes[episode.index])
    for segment in episode.segments[begun:]:
        start = len(done.token_ids)
        done.token_ids, done.logprobs = done.token_ids + segment.token_ids, done.logprobs + segment.logprobs
        done.appended += [] if segment.drawn else [(start, len(done.token_ids))]
    return done


def _ended(requests: Sequence[Request], episode: Episode) -> tuple[int, int, Completion]:
    return episode.group_id, episode.index, _completion(requests[episode.group_id], episode)


def _turn(answer: Answer) -> Turn | PendingTurn:
    if isinstance(answer, Continuation):
        return answer.token_ids
    return None if answer is None else _LaterTurn(answer)


@dataclass(frozen=True)
class _LaterTurn:
    """Turn of an answer that may not be there yet."""
    answer: PendingAnswer

    def done(self) -> bool:
        return self.answer.done()

    def result(self) -> Turn:
        found = self.answer.result()
        return None if found is None else found.token_ids
