"""A toy environment that answers each stop token with a few tokens, and what every engine does with it."""
from dataclasses import replace

import pytest

from lightrft.environments.base import EnvironmentSpec
from lightrft.environments.play import Player
from lightrft.environments.pool import EnvironmentPool
from lightrft.rollout import SamplingParams
from lightrft.rollout.scheduler import generate as run
from lightrft.tests.support import environments
from lightrft.tests.support.episodes import episodes_of, generate, Group, Response

ENDS = tuple(range(40, 110))  # a turn has about four tokens
TURNS, NEW = 3, 12
PARAMS = SamplingParams(NEW, stop_token_ids=ENDS)


class Toy:
    """Answers depend on all tokens of a response and on its request. Every third response has one turn, others have up
    to ``turns``. ``seen``: all that it was asked for."""

    def __init__(self, asked: list[Group], turns: int = TURNS) -> None:
        self.asked, self.turns, self.seen = asked, turns, []

    def __call__(self, ended):
        self.seen += ended
        return [self.answer(i, j, done) for i, j, done in ended]

    def answer(self, i: int, j: int, done: Response) -> list[int] | None:
        assert done.finish_reason == "stop" and done.token_ids[-1] in (*ENDS, 3), done
        request = self.asked[i]
        begun = (request.prefixes[j] if request.prefixes else []) + done.token_ids
        if request.seeds[j] % 3 == 2 or sum(token in (*ENDS, 3) for token in begun) >= self.turns:
            return None
        number = sum(request.token_ids) + sum(begun)
        return [150 + (number + 7 * k) % 60 for k in range(1 + number % 4)]


def by_hand(engine, request: Group, j: int, params: SamplingParams, toy: Toy) -> Response:
    """Response ``j`` of a request, turn by turn: one call of ``generate`` for each, all before it as its prefix."""
    whole = Response([], [], "abort")
    while whole.finish_reason == "abort":
        alone = replace(request, seeds=request.seeds[j:j + 1], prefixes=[whole.token_ids])
        whole.extend(generate(engine, [alone], params)[0][0])
        following = toy.answer(toy.asked.index(request), j, whole) if whole.finish_reason == "stop" else None
        if following is None:
            break
        if len(whole.token_ids) + len(following) >= params.max_new_tokens:
            whole.finish_reason = "length"
            break
        count = len(following)
        whole.extend(Response(following, [0.0] * count, "abort", [(0, count)]))
    return whole


def equal(left: Response, right: Response) -> bool:
    """Tokens, mask and end are the same; log-probs up to rounding."""
    return (replace(left, logprobs=[]) == replace(right, logprobs=[])
            and left.logprobs == pytest.approx(right.logprobs, abs=1e-5))


def turns_are_those_by_hand(engine, asked: list[Group], params: SamplingParams = PARAMS) -> list[list[Response]]:
    """Tokens, masks in several runs and log-probs, alone and in other company; each response is reported once."""
    toy, calls = Toy(asked), []
    groups = generate(engine, asked, params, lambda i, done: calls.append((i, None, done)), calls.extend, toy)
    for i, (request, group) in enumerate(zip(asked, groups, strict=True)):
        for j, done in enumerate(group):
            assert equal(done, by_hand(engine, request, j, params, toy)), (i, j, done)
            appended = [k for start, stop in done.given for k in range(start, stop)]
            assert done.drawn == [k not in appended for k in range(len(done.token_ids))]
            assert all(done.logprobs[k] == 0.0 and done.token_ids[k] >= 150 for k in appended)
            assert all(done.token_ids[start - 1] in (*ENDS, 3) and done.drawn[stop] for start, stop in done.given)
            assert sum(k >= 0 for k in done.logprobs) == len(appended), "a drawn token without a log-prob"
            assert len(done.token_ids) <= params.max_new_tokens
    flat = [(i, j, done) for i, group in enumerate(groups) for j, done in enumerate(group)]
    kinds = {(len(done.given), done.finish_reason) for *_, done in flat}
    most = max(count for count, _ in kinds)
    assert len(kinds) > 2 and most == TURNS - 1 or not params.temperature and most, f"too uniform: {kinds}"
    arrived = [call for call in calls if call[1] is not None]
    assert sorted(arrived, key=lambda call: call[:2]) == flat, "not each response once, at its end"
    assert sorted(i for i, j, _ in calls if j is None) == list(range(len(asked)))
    swapped = generate(engine, asked[::-1], params, next_turn=Toy(asked[::-1]))[::-1]
    assert all(equal(a, b) for x, y in zip(groups, swapped, strict=True) for a, b in zip(x, y, strict=True))
    return groups


def turns_have_the_scores(asked: list[Group], groups: list[list[Response]], score) -> None:
    """``score(request, tokens)``: log-probs of a whole response by a plain forward pass."""
    for request, group in zip(asked, groups, strict=True):
        for done in group:
            expected = [value if drawn else 0.0 for value, drawn in zip(score(request, done.token_ids), done.drawn)]
            assert done.logprobs == pytest.approx(expected, abs=2e-5), (request, done)


def an_environment_in_workers_answers(engine, reference, tokenizer, asked: list[Group], score) -> None:
    """Greedy responses are those of ``reference``, and have the log-probs of a plain forward pass."""
    player = Player(EnvironmentPool(EnvironmentSpec(environments.__file__, "Echo"), 1, 60.0), tokenizer, None, TURNS,
                    64)
    params, found = replace(PARAMS, temperature=0.0, max_new_tokens=20), []
    for one in (engine, reference):
        episodes = episodes_of(asked)
        with player.playing(episodes, params.max_new_tokens) as ask:
            run(one, episodes, params, ask, hears_cuts=True)
        found.append(episodes)
    player.shutdown()
    assert len({episode.play.turns for episode in found[0]}) > 1
    for episode, other in zip(*found, strict=True):
        assert (episode.token_ids, episode.loss_mask) == (other.token_ids, other.loss_mask)
        assert episode.play.messages == other.play.messages and not episode.play.failure
        scores, begin = score(asked[episode.group_id], episode.response_ids), episode.prompt_len
        expected = [value if drawn else 0.0 for value, drawn in zip(scores, episode.loss_mask[begin:])]
        assert episode.logprobs[begin:] == pytest.approx(expected, abs=2e-5)


def a_turn_without_room_is_dropped(engine, asked: list[Group]) -> None:
    """The response ends by its length then, with its stop token last; where there is room it resumes."""
    answers = {}

    def talkative(ended):
        for i, j, done in ended:
            answers[i, j, len(done.token_ids)] = [200] * (1 + i % 5)
        return [answers[i, j, len(done.token_ids)] for i, j, done in ended]

    dropped = 0
    for i, group in enumerate(generate(engine, asked, PARAMS, next_turn=talkative)):
        for j, done in enumerate(group):
            assert done.finish_reason == "length" and len(done.token_ids) <= NEW and done.drawn[-1]
            if len(done.token_ids) < NEW or done.token_ids[-1] in ENDS:
                assert len(done.token_ids) + len(answers[i, j, len(done.token_ids)]) >= NEW
                dropped += 1
    assert dropped


def cut_turns(engine, asked: list[Group]):
    """Responses cut off by ``on_finished``, in any turn, and resumed from their tokens. Yields the index of each, what
    it had, what it has in the end, and the response of one go."""
    whole, calls = generate(engine, asked, PARAMS, next_turn=Toy(asked)), []
    parts = generate(engine, asked, PARAMS, lambda i, done: calls.append(i) or len(calls) > 1, next_turn=Toy(asked))
    cut = [(i, j) for i, group in enumerate(parts) for j, done in enumerate(group) if done.finish_reason == "abort"]
    assert not {i for i, _ in cut} & set(calls)
    rest = [replace(asked[i], seeds=[asked[i].seeds[j]], prefixes=[parts[i][j].token_ids]) for i, j in cut]
    for (i, j), (more, ) in zip(cut, generate(engine, rest, PARAMS, next_turn=Toy(rest)), strict=True):
        begun = replace(parts[i][j])
        parts[i][j].extend(more)
        yield i, j, begun, parts[i][j], whole[i][j]


def turns_of_a_group(engine, reference, asked: list[Group], mine: slice, first: bool) -> None:
    """Ranks that share an engine: each answers for its own requests ``asked[mine]``; whose they are changes nothing.
    Greedy responses are those of ``reference``, an engine of this rank alone."""
    own, everything, greedy = asked[mine], asked if first else [], replace(PARAMS, temperature=0.0)
    toy = Toy(own)
    found = generate(engine, own, PARAMS, next_turn=toy)
    assert {i for i, *_ in toy.seen} <= set(range(len(own))) and any(done.given for group in found for done in group)
    by_first = generate(engine, everything, PARAMS, next_turn=Toy(everything))
    pairs = [*zip(by_first[mine], found), *zip(*(generate(one, own, greedy, next_turn=Toy(own))
                                                 for one in (engine, reference)))]  # yapf: disable
    assert len(pairs) == len(own) * (1 + first)
    assert all(equal(a, b) for left, right in pairs for a, b in zip(left, right, strict=True)), pairs
