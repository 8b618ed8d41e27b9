"""``--offload_during_rollout``: models leave before every generation and are back before they are needed."""
from unittest.mock import patch

import pytest

from lightrft.strategy.fsdp import units
from lightrft.strategy.strategy import FakeStrategy
from lightrft.tests.support import runs
from lightrft.trainer import spmd_ppo_trainer


def traced(home, folder, offload=True, **options):
    """A run, and what happened in order: moves, generations, passes and syncs."""
    cfg = runs.config_of(home, folder, **options)
    cfg.rollout.offload_during_rollout = offload  # refused without CUDA, where the moves move nothing
    trainer = runs.trainer_of(cfg, runs.strategy_of(cfg))
    events = []

    def note(owner, method, word):
        call = getattr(owner, method)

        def noted(*args, **kwargs):
            events.append(word)
            return call(*args, **kwargs)

        setattr(owner, method, noted)

    for owner, method, word in ((trainer.strategy, "offload", "away"), (trainer.strategy, "reload", "back"),
                                (trainer.engine, "submit", "generate"), (trainer.engine, "update_weights", "sync"),
                                (trainer.engine, "sleep", "sleep"), (trainer.engine, "wake", "wake")):
        note(owner, method, word)
    for prepared in trainer.prepared.values():
        prepared.model.register_forward_pre_hook(lambda *_: events.append("pass"))
    trainer.fit()
    return runs.Run(trainer, folder), events


def test_a_rank_holds_no_more_than_its_part_of_the_reference_in_the_update(home, tmp_path):
    trainer = runs.build(home, tmp_path, strategy="fsdp", init_kl_coef=0.1, max_steps=1)
    actor, reference, seen = trainer.prepared["actor"].model, trainer.maker.logprobs.reference.model, []

    def whole(*_):
        groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units(reference)]
        seen.append((actor.training, any(group.is_unsharded for group in groups if group)))

    for model in (actor, reference):
        model.register_forward_hook(whole)
    trainer.fit()
    trainer.strategy.teardown()
    assert (False, True) in seen, "its pass gathers it"
    assert {held for training, held in seen if training} == {False}


OPTIONS = {"advantage_estimator": "gae", "init_kl_coef": 0.1, "max_steps": 2, "sync_proof": "both"}


def test_models_are_away_while_the_engine_generates(home, tmp_path):
    data = {"eval_data": [str(home / "test.jsonl")], "eval_steps": 1}
    done, events = traced(home, tmp_path / "a", **OPTIONS, **data)
    away, awake = 0, True
    for number, event in enumerate(events):
        awake = awake and event != "sleep" or event == "wake"
        scores = event == "pass" and "sync" in events[number - 2:number]  # of a canary
        assert not awake or scores or event != "pass" and (event != "back" or not away), events[:number + 1]
        away += {"away": 1, "back": -1}.get(event, 0)
        proof = event == "generate" and "pass" in events[number:number + 3]  # a canary, scored by the models
        assert event not in ("pass", "sync") or away == 0, events[:number + 1]
        assert event != "generate" or away == 3 or proof, "policy, critic and reference"
    assert events.count("away") == 3 * (2 + 2), "two steps and two evaluations"
    assert "time/offload_s" in done.metrics
    plain, events = traced(home, tmp_path / "b", False, **OPTIONS, **data)
    assert "away" not in events and "time/offload_s" not in plain.metrics
    assert all((value == plain.weights[name]).all() for name, value in done.weights.items())


def test_they_are_back_when_there_is_nothing_to_train(home, tmp_path):
    never = {"dynamic_sampling": True, "zero_spread": 10.0, "max_gen_rounds": 2, "max_steps": 1}
    events = traced(home, tmp_path, **never)[1]
    assert events[events.index("away"):][:7] == ["away", "generate", "generate", "sleep", "back", "wake", "sync"]


@pytest.mark.parametrize("offload", [True, False])
def test_they_are_away_while_the_engine_starts(offload, home, tmp_path):
    """vLLM and SGLang take their memory at the start. Then it sleeps: its cache must not meet the models."""
    cfg, events = runs.config_of(home, tmp_path / "run", **OPTIONS), []
    cfg.rollout.offload_during_rollout = offload
    start = spmd_ppo_trainer.get_engine

    def started(*args):
        events.append("start")
        engine = start(*args)
        sleep = engine.sleep
        engine.sleep = lambda: events.append("sleep") or sleep()
        return engine

    with patch.object(spmd_ppo_trainer, "get_engine", started), \
            patch.object(FakeStrategy, "offload", lambda *_: events.append("away")), \
            patch.object(FakeStrategy, "reload", lambda *_: events.append("back")):
        runs.trainer_of(cfg, runs.strategy_of(cfg))
    assert events == (["away"] * 3 + ["start", "sleep"] + ["back"] * 3 if offload else ["start"])
