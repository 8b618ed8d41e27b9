"""Episodes of several callers on one engine: each is what it is alone, and is heard of once."""
import threading
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import Qwen2Config

from lightrft.config.engines import EngineCaps, ENGINES
from lightrft.config.schema import RolloutConfig
from lightrft.rollout import scheduler
from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.engines import get_engine
from lightrft.rollout.hf import engine as hf
from lightrft.rollout.hf.engine import HFEngine
from lightrft.rollout.scheduler import generate, Quota, Scheduler
from lightrft.rollout.tests.test_hf_engine import engine, requests
from lightrft.tests.support.episodes import episodes_of
from lightrft.tests.support.turns import PARAMS
from lightrft.types import Key, Segment
from lightrft.utils import watchdog
from lightrft.utils.errors import UserError

GREEDY = replace(PARAMS, temperature=0.0)


def episodes(role="sample", groups=6):
    """Unfinished episodes of the prompts that the tests of engines share."""
    return episodes_of(requests()[:groups], role)


def alone(role="sample", params=PARAMS, groups=6, next_turn=None):
    """The episodes of one caller, by key."""
    asked = episodes(role, groups)
    generate(engine(), asked, params, next_turn)
    return {episode.key: episode for episode in asked}


def same(found, expected):
    for episode in found:
        other = expected[episode.key]
        assert (episode.response_ids, episode.loss_mask, episode.finish_reason) == (other.response_ids, other.loss_mask,
                                                                                    other.finish_reason), episode.key
        assert episode.logprobs == pytest.approx(other.logprobs, abs=2e-6)


def test_two_callers_share_an_engine_and_lose_nothing():
    """One generates to the end while samples of the other are open, of the same prompts and numbers; the other hears
    of all of its own afterwards, once."""
    shared, samples, greedy, heard = engine(), episodes(), episodes("greedy"), []
    with Scheduler.of(shared).submit(samples, PARAMS) as run:
        heard += run.step().episodes + run.step().episodes
        generate(shared, greedy, GREEDY)
        while run.wanted:
            heard += run.step().episodes
    assert sorted(each.key for each in heard) == sorted(each.key for each in samples) and len(heard) > 9
    assert Key("sample", 1, 0) in {each.key for each in heard}
    same(samples, alone())
    same(greedy, alone("greedy", GREEDY))


def test_responses_of_one_group_read_their_own_prompts():
    """Such as one whose environment was lost, and has begun otherwise."""
    (asked, expected), other = (episodes(groups=1) for _ in range(2)), episodes(groups=2)[-1].prompt
    for each in (asked[1], expected[1]):
        each.prompt = other
    generate(engine(), asked, PARAMS)
    for each in expected:
        generate(engine(), [each], PARAMS)
    same(asked, {each.key: each for each in expected})


def test_a_run_that_another_caller_has_finished_still_reports():
    shared, few = engine(), episodes(groups=1)
    with Scheduler.of(shared).submit(few, replace(PARAMS, max_new_tokens=1)) as run:
        generate(shared, episodes("evaluation"), PARAMS)
        assert run.wanted and not any(each.open for each in few)
        finished = run.step()
        assert finished.episodes == few and finished.groups == [few] and not run.wanted


def test_a_quota_cuts_and_the_rest_goes_on():
    """Two groups are enough, but the fourth to end is due. An evaluation under way on the same engine goes on."""
    order: list[int] = []
    generate(engine(), episodes(), PARAMS,
             heard=lambda finished: order.extend(each[0].group_id for each in finished.groups))
    shared, samples, held_out, quota = engine(), episodes(), episodes("evaluation"), Quota(2, {order[3]})

    def heard(finished):
        quota.finished |= {group[0].group_id for group in finished.groups}
        assert all(not each.open for group in finished.groups for each in group)
        return quota.met

    with Scheduler.of(shared).submit(held_out, PARAMS) as run:
        generate(shared, samples, PARAMS, heard=heard)
        cut = [each for each in samples if each.open]
        assert cut and any(each.segments for each in cut) and quota.finished == {*order[:4]}
        begun = {each.key: each.response_ids for each in cut}
        generate(shared, cut, PARAMS)
        while run.wanted:
            run.step()
    assert all(each.response_ids[:len(begun[each.key])] == begun[each.key] for each in cut)
    same(samples, alone())
    same(held_out, alone("evaluation"))


def test_turns_of_a_run_that_ends_are_waited_for():
    """They are part of the response, which resumes behind them."""
    shared, asked, slow, answer = engine(), episodes(), ("sample", 0, 0), Future()

    def turns(stopped):
        return [answer if each.key == slow else None for each in stopped]

    def heard(finished):
        if finished.groups and Scheduler.of(shared).waiting:
            answer.set_result([200, 201])
            return True

    generate(shared, asked, replace(PARAMS, max_new_tokens=30), turns, heard)
    assert asked[0].key == slow and asked[0].open and asked[0].response_ids[-2:] == [200, 201]
    assert asked[0].loss_mask[-3:] == [True, False, False]
    assert not Scheduler.of(shared).flights and not Scheduler.of(shared).waiting


def interrupted(shared):
    """Episodes of a caller whose listener has raised an error."""
    other = episodes("judge")

    def broken(finished):
        raise KeyError("reward")

    with pytest.raises(KeyError, match="reward"):
        generate(shared, other, PARAMS, heard=broken)
    return other


def test_an_error_of_one_caller_leaves_the_others_alone():
    shared, samples = engine(), episodes()
    with Scheduler.of(shared).submit(samples, PARAMS) as run:
        other = interrupted(shared)
        while run.wanted:
            run.step()
    same(samples, alone())
    assert any(each.open for each in other) and not Scheduler.of(shared).flights


def test_an_aborted_episode_may_be_submitted_again_at_once():
    """What it had drawn before an error is not taken for a part of the new one; two at once are refused."""
    shared, samples = engine(), episodes()
    with Scheduler.of(shared).submit(samples, PARAMS) as run:
        interrupted(shared)
        with pytest.raises(ValueError, match=r"one key, Key\(role='sample', group=\d, index=\d\)"):
            Scheduler.of(shared).submit([each for each in episodes() if each.key in run.scheduler.flights], PARAMS)
        generate(shared, again := episodes("judge"), PARAMS)
        while run.wanted:
            run.step()
    same(samples, alone())
    same(again, alone("judge"))


def test_an_error_of_a_listener_frees_the_cache_at_once():
    shared = engine()
    with pytest.raises(ZeroDivisionError):
        generate(shared, episodes(), PARAMS, heard=lambda finished: 1 / 0)
    assert shared._space is None and not shared._queue.open
    generate(shared, samples := episodes(), PARAMS)
    same(samples, alone())
    assert shared._space is not None, "else every call would allocate it anew"


class Silent(HFEngine):
    """An engine that never ends a response."""

    def step(self):
        """Draw nothing."""
        return []


def test_an_engine_that_draws_nothing_is_no_endless_wait(monkeypatch):
    """On a single process nobody else would notice; on several the watchdog hears of progress alone."""
    monkeypatch.setattr(scheduler, "_IDLE_ROUNDS", 10)
    silent, before = Silent(engine().model, []), watchdog.Progress.ticks
    with pytest.raises(RuntimeError, match=r"Silent has ended none of 18 responses in \d+ rounds"):
        generate(silent, episodes(), PARAMS)
    assert watchdog.Progress.ticks == before and not silent._queue.open


def test_a_turn_that_takes_long_is_no_silence(monkeypatch):
    """Neither is a response of many tokens: a round of the HF engine says that it draws."""
    monkeypatch.setattr(scheduler, "_IDLE_ROUNDS", 1)
    monkeypatch.setattr(scheduler, "_LOOK_S", 1e-4)
    shared, slow, polls, before = engine(), Future(), [], watchdog.Progress.ticks
    monkeypatch.setattr(slow, "done", lambda: polls.append(1) or len(polls) > 300)
    slow.set_result(None)
    generate(shared, asked := episodes(groups=1)[:1], PARAMS, lambda stopped: [slow])
    assert len(polls) > 300 and not asked[0].open and watchdog.Progress.ticks - before > 300


def test_a_turn_ends_the_wait_for_it(monkeypatch):
    monkeypatch.setattr(scheduler, "_LOOK_S", 1e6)

    def asked(stopped):
        turns = [Future() for _ in stopped]
        for turn in turns:
            threading.Timer(0.02, turn.set_result, [None]).start()
        return turns

    generate(engine(), samples := episodes(groups=1), PARAMS, asked)
    assert "stop" in {each.finish_reason for each in samples} and not any(each.open for each in samples)


def test_an_engine_that_does_not_wait_is_named(monkeypatch):
    shared = engine()
    submit = shared.submit
    monkeypatch.setattr(shared, "submit", lambda asked, params, waits: submit(asked, params))
    with pytest.raises(RuntimeError, match="HFEngine has no waiting response .*waits=True"):
        generate(shared, episodes(), PARAMS, lambda stopped: [[200]] * len(stopped))


def test_an_error_in_a_round_ends_all(monkeypatch):
    shared, samples = engine(), episodes()
    with Scheduler.of(shared).submit(samples, PARAMS) as run:
        monkeypatch.setattr(shared, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(shared, episodes("canary"), PARAMS)
        assert not run.wanted and not Scheduler.of(shared).flights
    monkeypatch.undo()
    generate(shared, samples := episodes(), PARAMS)
    same(samples, alone())


def test_the_first_temperature_is_that_of_each_caller():
    """FIRE beside an evaluation without it."""
    hot, shared = replace(PARAMS, temperature=0.7, first_temperature=8.0), engine()
    samples, held_out = episodes(), episodes("evaluation")
    with Scheduler.of(shared).submit(samples, hot) as run:
        generate(shared, held_out, GREEDY)
        while run.wanted:
            run.step()
    same(samples, alone(params=hot))
    same(held_out, alone("evaluation", GREEDY))


def test_tokens_keep_the_version_of_the_weights_that_drew_them():
    """An update between two rounds: one report holds tokens of both versions."""
    shared, samples = engine(), episodes()
    with Scheduler.of(shared).submit(samples, PARAMS) as run:
        for _ in range(4):
            run.step()
        shared.update_weights((), 1)
        while run.wanted:
            run.step()
    versions = [[segment.version for segment in sample.segments] for sample in samples]
    assert [0, 1] in versions and all(each in ([0], [1], [0, 1]) for each in versions), versions
    same(samples, alone())


def test_nothing_is_submitted_for_nobody():
    generate(engine(), [], SamplingParams(4), heard=lambda finished: 1 / 0)


@pytest.mark.parametrize("changed, words", [
    (dict(finish_reason="eos"), "the reason 'eos'"), (dict(segments=[Segment([5], [])]), "with 0 log-probs"),
    (dict(segments=[Segment([5], [0.0], version=-1)]), "of the version -1 of .* 0 to 0"),
    (dict(segments=[Segment([5] * 99, [0.0] * 99)]), "of 99 tokens, which may have")
])  # yapf: disable
def test_a_response_that_no_engine_may_return_is_named(changed, words):
    broken = engine()
    step = broken.step

    def harmed():
        ended = step()
        for episode in ended.values():
            vars(episode).update(changed)
        return ended

    broken.step = harmed
    with pytest.raises(RuntimeError, match=words):
        generate(broken, episodes(), PARAMS)


def test_an_engine_without_methods_is_refused_when_it_is_built(monkeypatch):
    config = SimpleNamespace(hf_model=SimpleNamespace(config=Qwen2Config(), parameters=list))
    strategy = SimpleNamespace(plans=False)
    for built, missing in ((SimpleNamespace(weight_version=0), [
            "abort", "fingerprints", "group", "reset", "resume", "shared_storage", "shutdown", "sleep", "step",
            "submit", "update_weights", "vocabulary", "wake", "weight_dtypes"
    ]), (engine(), [])):
        monkeypatch.setattr(hf, "build_hf_engine", lambda *args: built)  # noqa: B023
        with pytest.raises(UserError, match=f"the engine has no {', '.join(missing)};") if missing else nullcontext():
            assert get_engine(RolloutConfig(), config, strategy, None) is built
    monkeypatch.setitem(ENGINES, "hf", EngineCaps("Other", own_weights=True))
    with pytest.raises(UserError, match=r"names \d+ weights of the trainer, and its EngineCaps have own_weights=True"):
        get_engine(RolloutConfig(), config, strategy, None)


def test_an_engine_without_a_folder_or_a_builder_is_named(monkeypatch):
    config = SimpleNamespace(hf_model=SimpleNamespace(config=Qwen2Config()))
    strategy = SimpleNamespace(plans=False)
    for builder, words in ((None, "build_hf_engine of lightrft.rollout.hf.engine is not there"),
                           (lambda cfg, actor: None, r"called as \(cfg, .* takes \(cfg, actor\): too many")):
        monkeypatch.setattr(hf, "build_hf_engine", builder)
        for strategy.plans in (False, True):
            with pytest.raises(UserError, match=words):
                get_engine(RolloutConfig(), config, strategy, None)
    monkeypatch.setitem(ENGINES, "plain", ENGINES["hf"])
    for strategy.plans in (False, True):
        with pytest.raises(UserError, match="plain: there is no module lightrft.rollout.plain.engine, .* build_plain"):
            get_engine(RolloutConfig(engine_type="plain"), config, strategy, None)
