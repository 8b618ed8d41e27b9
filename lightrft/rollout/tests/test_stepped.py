"""The HF engine round by round: responses that wait hold up nobody, keep their rows, and lose them where others need
them; requests, parameters and weights that come in between."""
from dataclasses import replace

import pytest

from lightrft.rollout.hf.continuous_batching import _PATIENCE
from lightrft.rollout.hf.kv_cache import Joined
from lightrft.rollout.hf.passes import Passes
from lightrft.rollout.tests.test_hf_engine import engine, requests
from lightrft.rollout.tests.test_partial import TINY
from lightrft.tests.support.episodes import Group, Response, generate, keyed
from lightrft.tests.support.stepping import ANSWER, rounds_keep_to_the_protocol, step
from lightrft.tests.support.turns import PARAMS, Toy, by_hand
from lightrft.types import Key, Segment

CLOSE = 2e-6  # nats: rows that were kept, against prefilling anew


def same(done, expected):
    assert replace(done, logprobs=[]) == replace(expected, logprobs=[])
    assert done.logprobs == pytest.approx(expected.logprobs, abs=CLOSE)


def collect(stepped, rounds=None):
    """Step until every response waits or has ended, or for some rounds; return what came, by key."""
    found = {}
    while rounds != 0 and stepped._queue.open:
        rounds = rounds and rounds - 1
        parts = step(stepped)
        for key, part in parts.items():
            found.setdefault(key, Response([], [], "abort")).extend(part)
        if not parts and len(stepped._queue.parked) == len(stepped._queue.open):
            break
    return found


def passes(monkeypatch):
    """Numbers of tokens of passes besides the newest of each row, as they run."""
    seen, run = [], Passes.run

    def noted(self, inputs, view):
        seen.append(inputs["input_ids"].numel() - (len(view.last) if isinstance(view, Joined) else 0))
        return run(self, inputs, view)

    monkeypatch.setattr(Passes, "run", noted)
    return seen


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "mistral"])
def test_a_kept_row_prefills_only_what_is_appended(family, monkeypatch):
    """Gemma 2 caps its scores, and Mistral sees 8 tokens."""
    asked, seen = requests(), passes(monkeypatch)
    groups = generate(engine(family), asked, PARAMS, next_turn=Toy(asked))
    answers = [stop - start for group in groups for done in group for start, stop in done.given]
    assert len(answers) > 9 and sum(seen) == sum(len(request.token_ids) for request in asked) + sum(
        answers), "the stop token before an answer, and the answer but for its last token, which a step runs"
    for request, group in zip(asked, groups):
        for j, done in enumerate(group):
            same(done, by_hand(engine(family), request, j, PARAMS, Toy(asked)))


def test_answered_responses_share_a_pass(monkeypatch):
    """One alone waits some steps for others, while these draw; those that are answered together go on together."""
    stepped, seen = engine(), passes(monkeypatch)
    seldom = replace(PARAMS, max_new_tokens=100, stop_token_ids=tuple(range(40, 46)))
    stepped.submit(keyed([Group(requests()[0].token_ids, range(40))]), seldom, waits=True)

    def until(ready):
        steps = 0
        while not ready():
            steps += 1
            stepped.step()
        return steps

    parked = stepped._queue.parked
    until(lambda: parked)
    first, prefilled = next(iter(parked)), len(seen)
    stepped.resume(first, ANSWER)
    assert until(lambda: len(seen) > prefilled) == _PATIENCE + 1 and seen[prefilled:] == [len(ANSWER.token_ids)]
    until(lambda: len(parked) > 1)
    for key in (answered := [*parked]):
        stepped.resume(key, ANSWER)
    assert until(lambda: len(seen) > prefilled + 1) <= _PATIENCE + 1
    assert seen[prefilled + 1:] == [len(answered) * len(ANSWER.token_ids)] and not stepped._queue.answered


def test_answered_responses_go_on_before_others_take_free_slots(monkeypatch):
    """Their prompts could leave for those of the others."""
    stepped, seen = engine(kv_bytes=4 * TINY), passes(monkeypatch)
    asked = [Group([*requests()[0].token_ids, k], [k]) for k in range(24)]
    stepped.submit(keyed(asked), replace(PARAMS, max_new_tokens=24), waits=True)
    while len(stepped._queue.parked) < 2:
        stepped.step()
    assert stepped._queue.waiting, "nobody waits for a slot"
    stepped.resume(next(iter(stepped._queue.parked)), ANSWER)
    stepped.step()
    assert seen[-1] == len(ANSWER.token_ids) and not stepped._queue.answered


def test_slots_that_all_wait_are_no_deadlock(monkeypatch):
    """Two or three slots: the rows, and the prompts, of waiting responses leave, until all have had their turn."""
    asked, stepped, seen = requests(), engine(kv_bytes=TINY), passes(monkeypatch)
    stepped.submit(keyed(asked), PARAMS, waits=True)
    first = collect(stepped)
    waiting = [key for key in stepped._queue.parked if len(first[key].token_ids) + 2 < PARAMS.max_new_tokens]
    slots = len(stepped._generation.slots.owners)
    assert len(first) == sum(len(request.seeds) for request in asked) and len(waiting) > 2 * slots
    expected = generate(engine(), asked, PARAMS, next_turn=lambda ended: [
        [200, 201] if not done.given else None for _, _, done in ended])  # yapf: disable
    prefilled = sum(seen)
    for key in waiting:
        stepped.resume(key, ANSWER)
        first[key].extend(Response([200, 201], [0.0, 0.0], "abort", [(0, 2)]))
    for key, part in collect(stepped).items():
        first[key].extend(part)
    least = sum(len(asked[key.group].token_ids) for key in waiting)
    assert sum(seen) - prefilled > least, "no prompt was prefilled anew"
    for i, group in enumerate(expected):
        for j, done in enumerate(group):
            if done.given or done.finish_reason == "stop":
                same(first[Key("sample", i, j)], done)
    stepped.abort(list(stepped._queue.open))
    assert not stepped.step() and not stepped._queue.open


def test_requests_parameters_and_pauses_in_between():
    """None of them changes a token of another response: more and longer requests, that need a larger cache; a greedy
    rest of a response among others; weights that come anew, and sleep."""
    asked, stepped = requests(), engine()
    plain = replace(PARAMS, stop_token_ids=(), max_new_tokens=20)
    alone = generate(engine(), asked[:2], PARAMS), generate(engine(), asked, plain)
    stepped.submit(keyed(asked[:2], "waits"), PARAMS, waits=True)
    found = collect(stepped, 3)
    stepped.submit(keyed(asked), plain)
    for _ in range(4):
        for key, part in collect(stepped, 2).items():
            found.setdefault(key, Response([], [], "abort")).extend(part)
        stepped.update_weights([], 1)
        stepped.sleep(), stepped.wake()
    keys = list(stepped._queue.parked)
    resumed = {key: Group(asked[key.group].token_ids, [asked[key.group].seeds[key.index]], (),
                          [found[key].token_ids + [200]]) for key in keys}  # yapf: disable
    greedy = replace(plain, temperature=0.0)
    for key in keys:
        stepped.resume(key, Segment.given([200]), greedy)
    for key, part in collect(stepped).items():
        found.setdefault(key, Response([], [], "abort")).extend(part)
    assert keys and stepped._queue.open.keys() <= set(keys)
    for role, groups in (("waits", alone[0]), ("sample", alone[1])):
        for i, group in enumerate(groups):
            for j, done in enumerate(group):
                if (key := Key(role, i, j)) in keys:
                    rest, = generate(engine(), [resumed[key]], greedy)[0]
                    done.extend(rest)
                same(found[key], done)


def test_rounds_keep_to_the_protocol():
    stepped = engine()
    rounds_keep_to_the_protocol(stepped, requests(), lambda: stepped.update_weights([], 1))
