"""What every engine does round by round, whatever other responses are open."""
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace

import pytest

from lightrft.tests.support.episodes import Group, Response, generate, keyed
from lightrft.tests.support.turns import NEW, PARAMS, Toy, equal
from lightrft.types import Key, Segment

ANSWER, PATIENCE = Segment.given([200, 201]), 3000
KINDS = [PARAMS, replace(PARAMS, temperature=0.7, first_temperature=8.0), replace(PARAMS, temperature=0.0),
         replace(PARAMS, top_k=3, stop_token_ids=()), replace(PARAMS, top_p=0.5, max_new_tokens=6)]  # yapf: disable
GREEDY, LONG = replace(PARAMS, temperature=0.0, stop_token_ids=()), replace(PARAMS, max_new_tokens=2 * NEW)
Parts = dict[Key, Response]


def numbered(groups: list[list[Response]], role: str) -> Parts:
    """Responses by the keys of their episodes."""
    return {Key(role, i, j): done for i, group in enumerate(groups) for j, done in enumerate(group)}


def step(engine) -> Parts:
    """One round."""
    return {key: Response.part(episode) for key, episode in engine.step().items()}


def collect(engine, keys: Iterable[Key]) -> Parts:
    """Step until all of ``keys`` have been reported; return their parts, each of which comes once."""
    parts, missing = Parts(), set(keys)
    for _ in range(PATIENCE):
        if not missing:
            return parts
        for key, part in step(engine).items():
            missing.remove(key)
            parts[key] = part
    raise AssertionError(f"nothing of {missing} after {PATIENCE} rounds")


def same(parts: Parts, expected: Parts) -> None:
    for key, done in expected.items():
        assert equal(parts[key], done), (key, parts[key], done)


def parameters_run_together(engine, asked: list[Group]) -> None:
    """Samples, a hot first token, greedy responses, few likely tokens: each is what it is alone."""
    alone, expected = [generate(engine, asked, params) for params in KINDS], Parts()
    for number, (params, groups) in enumerate(zip(KINDS, alone, strict=True)):
        engine.submit(keyed(asked, f"kind {number}"), params)
        expected |= numbered(groups, f"kind {number}")
    same(collect(engine, expected), expected)
    assert not engine.step()


def waiting_holds_up_nobody(engine, asked: list[Group]) -> None:
    """The others end. Then all wait, which is no deadlock: some resume by other parameters, the rest is aborted."""
    alone = generate(engine, asked, PARAMS), generate(engine, asked[:2], LONG)
    engine.submit(keyed(asked, "waits"), PARAMS, waits=True)
    engine.submit(keyed(asked[:2], "long"), LONG)
    expected = numbered(alone[0], "waits") | numbered(alone[1], "long")
    parts = collect(engine, expected)
    same(parts, expected)
    assert not engine.step() and not engine.step(), "it does not wait"
    waiting = [key for key, done in parts.items() if key.role == "waits" and done.finish_reason == "stop"
               and len(done.token_ids) + len(ANSWER.token_ids) < NEW]  # yapf: disable
    gone, resumed = waiting[::3], [key for number, key in enumerate(waiting) if number % 3]
    assert gone and len(resumed) > 2
    engine.abort(gone)
    for key in resumed:
        engine.resume(key, ANSWER, GREEDY)
    for key in (gone[0], resumed[0]):
        with pytest.raises(KeyError):
            engine.resume(key, ANSWER)
    rest = collect(engine, resumed)
    for key in resumed:
        begun = replace(asked[key.group], seeds=[0], prefixes=[parts[key].token_ids + ANSWER.token_ids])
        same({key: rest[key]}, {key: generate(engine, [begun], GREEDY)[0][0]})
    engine.abort(expected)
    assert not engine.step()


def an_abort_returns_what_was_drawn(engine, asked: list[Group]) -> None:
    """Of some, while the others go on."""
    whole = generate(engine, asked, LONG)
    engine.submit(keyed(asked), LONG)
    expected, reported = numbered(whole, "sample"), Parts()
    while not reported:
        reported |= step(engine)
    gone = [key for key in expected if key not in reported][::2]
    engine.abort(gone)
    ended = step(engine)
    assert gone and ended.keys() == set(gone)
    for key, part in ended.items():
        assert part.token_ids == expected[key].token_ids[:len(part.token_ids)] and len(part.logprobs) == len(
            part.token_ids)
        assert part.finish_reason == "abort" or equal(part, expected[key])
    assert "abort" in {part.finish_reason for part in ended.values()} and any(part.token_ids for part in ended.values())
    same(reported | collect(engine,
                            expected.keys() - reported.keys() - ended.keys()) | ended,
         {key: done for key, done in expected.items() if key not in ended})
    assert not engine.step()


def responses_outlive_an_update(engine, asked: list[Group], update: Callable[[], object]) -> None:
    """They go on from their tokens. Here with the same weights, so that greedy ones are those of one go."""
    whole = generate(engine, asked, GREEDY), generate(engine, asked, PARAMS)
    engine.submit(keyed(asked, "greedy"), GREEDY)
    engine.submit(keyed(asked, "waits"), PARAMS, waits=True)
    expected, parts = numbered(whole[0], "greedy"), step(engine)
    update()
    keys = [*expected, *numbered(whole[1], "waits")]
    parts |= collect(engine, [key for key in keys if key not in parts])
    update()
    assert not engine.step()
    same(parts, expected)
    waiting = next(key for key in keys[len(expected):] if parts[key].finish_reason == "stop" and
                   len(parts[key].token_ids) + len(ANSWER.token_ids) < NEW)  # yapf: disable
    engine.resume(waiting, ANSWER)
    assert collect(engine, [waiting])[waiting].token_ids
    engine.abort(keys)
    assert not engine.step()


def a_slow_answer_is_that_of_a_quick_one(engine, asked: list[Group]) -> None:
    """Some answers come after all other responses have ended."""
    quick, toy, slow, ended = generate(engine, asked, PARAMS, next_turn=Toy(asked)), Toy(asked), dict(), []
    most = sum(len(request.seeds) for request in asked)

    def arrived(responses) -> None:
        ended.extend(responses)
        if len(ended) + len(slow) == most:
            for future, answer in slow.values():
                future.done() or future.set_result(answer)

    def answer(stopped):
        answers = toy(stopped)
        for number, (i, j, _) in enumerate(stopped):
            if len(slow) < 3 and (i, j) not in slow and answers[number] is not None:
                slow[i, j] = Future(), answers[number]
                answers[number] = slow[i, j][0]
        return answers

    found = generate(engine, asked, PARAMS, on_arrived=arrived, next_turn=answer)
    assert len(slow) == 3
    same(numbered(found, "sample"), numbered(quick, "sample"))


def rounds_keep_to_the_protocol(engine, asked: list[Group], update: Callable[[], object]) -> None:
    """All of them, one after another: none leaves anything behind."""
    parameters_run_together(engine, asked)
    waiting_holds_up_nobody(engine, asked)
    an_abort_returns_what_was_drawn(engine, asked)
    responses_outlive_an_update(engine, asked, update)
    a_slow_answer_is_that_of_a_quick_one(engine, asked)
