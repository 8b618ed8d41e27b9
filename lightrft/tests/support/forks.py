"""Responses that fork: an environment of tests that rewrites the conversation, and what every engine does with it."""
import pytest

from lightrft.rollout.scheduler import generate
from lightrft.tests.support.episodes import episodes_of, Group
from lightrft.tests.support.turns import PARAMS
from lightrft.types import Branch, Episode, Key, Prompt


class Late:
    """A turn that is there once it was looked for ``rounds`` times."""

    def __init__(self, turn, rounds: int) -> None:
        self.turn, self.rounds, self.called = turn, rounds, None

    def done(self) -> bool:
        self.rounds -= 1
        if self.called is not None:
            self.called(self)  # or nobody would look again
        return self.rounds < 0

    def result(self):
        return self.turn

    def add_done_callback(self, callback) -> None:
        self.called = callback


class Rewriter:
    """Answers the first turn of a branch with tokens, and the second one with another prompt, made of what was drawn;
    at most ``turns`` of a response. Those of an even index get the same prompt as their group.

    Args:
        late: rounds that an answer to an episode takes.
    """

    def __init__(self, turns: int = 5, late=lambda episode: 0) -> None:
        self.turns, self.late, self.taken = turns, late, dict[Key, int]()

    def __call__(self, ended: list[Episode]):
        answers = [(self.answer(episode), self.late(episode)) for episode in ended]
        return [Late(answer, rounds) if rounds else answer for answer, rounds in answers]

    def answer(self, episode: Episode):
        self.taken[episode.key] = turns = self.taken.get(episode.key, 0) + 1
        if turns >= self.turns:
            return None
        if turns % 2:
            return [150 + len(episode.response_ids)] * 2
        told = [turns] if episode.index % 2 == 0 else episode.response_ids[:3]
        return Prompt("", [5, *told, *episode.branches[0].prompt.token_ids[:8]], "")


def alone(engine, branch: Branch, params) -> Episode:
    """Return a response to the prompt of a branch alone, with the same noise and the same answers."""
    given = [segment for segment in branch.segments if not segment.drawn]
    episode, answers = Episode(branch.prompt, 0, 0, role="alone", seed=branch.seed), iter(given)
    generate(engine, [episode], params, lambda ended: [next(answers, None)])
    return episode


def branches_are_those_of_their_prompts(engine, asked: list[Group], params=PARAMS, close: float = 2e-6) -> None:
    """Each branch is the response that its prompt alone gives with its seed; also when answers come late."""
    found = []
    for late in (lambda episode: 0, lambda episode: (7 * episode.group_id + episode.index) % 4):
        episodes = episodes_of(asked)
        generate(engine, episodes, params, Rewriter(late=late))
        found.append(episodes)
    for now, later in zip(*found, strict=True):
        assert [branch.prompt for branch in now.branches] == [branch.prompt for branch in later.branches]
        for branch, other in zip(now.branches, later.branches, strict=True):
            assert (branch.token_ids, branch.loss_mask) == (other.token_ids, other.loss_mask)
            assert branch.logprobs == pytest.approx(other.logprobs, abs=close)
    branches = [branch for episode in found[0] for branch in episode.branches]
    assert len({branch.seed for branch in branches}) == len(branches) > len(found[0])
    assert len({len(episode.branches) for episode in found[0]}) > 1
    for branch in branches:
        one = alone(engine, branch, params)
        assert (one.token_ids, one.loss_mask) == (branch.token_ids, branch.loss_mask)
        assert one.logprobs == pytest.approx(branch.logprobs, abs=close)


def branches_of_a_group(engine, asked: list[Group], mine: slice, first: bool) -> None:
    """Ranks that share an engine: each rewrites the conversations of its own requests ``asked[mine]``; whose they are
    changes nothing, so all ranks draw a branch with the same noise."""
    own, everything = episodes_of(asked[mine]), episodes_of(asked if first else [])
    for episodes in (own, everything):
        generate(engine, episodes, PARAMS, Rewriter())
    assert any(len(episode.closed) > 1 for episode in own)
    by_first = [episode for episode in everything if episode.group_id in range(len(asked))[mine]]
    for one, other in zip(own, by_first, strict=first):
        assert [branch.token_ids for branch in one.branches] == [branch.token_ids for branch in other.branches]
        assert one.joined.logprobs == pytest.approx(other.joined.logprobs, abs=1e-5)
