"""The facts of the first step: each one violated is an error that names it."""
import re
from pathlib import Path

import pytest

from lightrft.config.schema import Config
from lightrft.tests import runs
from lightrft.trainer import step_facts
from lightrft.trainer.step_facts import LIMITS, REPACKED, StepFactError, check_step_facts

GOOD = {
    "policy/first_ratio_gap": 0.0, "rollout/mismatch/abs_logp_mean": 1e-6, "rollout/mismatch/abs_dp_max": 1e-6,
    "policy/first_kl_ref": 0.0
}


def config(**options) -> Config:
    found = Config()
    for name, value in {"init_kl_coef": 0.1, **options}.items():
        group = next(group for group in vars(found).values() if name in vars(group))
        vars(group)[name] = value
    return found


def test_good_numbers_pass():
    check_step_facts(GOOD, config(), fresh=True)


@pytest.mark.parametrize("key", list(GOOD))
@pytest.mark.parametrize("value", [2e-4, float("nan")])
def test_each_violation_is_named(key, value):
    with pytest.raises(StepFactError, match=f"step 1: {key} is"):
        check_step_facts({**GOOD, key: value}, config(), fresh=True)


@pytest.mark.parametrize("key", list(GOOD))
def test_a_fact_that_was_not_measured_is_no_fact(key):
    with pytest.raises(StepFactError, match=f"{key}.*not measured"):
        check_step_facts({name: value for name, value in GOOD.items() if name != key}, config(), fresh=True)


@pytest.mark.parametrize("key,value,options,fresh", [
    ("policy/first_kl_ref", 0.5, {}, False),
    ("policy/first_kl_ref", 0.5, {"init_kl_coef": 0.0}, True),
    ("policy/first_kl_ref", 0.5, {"pretrain": "a", "ref_pretrain": "b"}, True),
    ("policy/first_ratio_gap", 5e-4, {"micro_rollout_batch_size": 1}, True),
    ("policy/first_kl_ref", 5e-4, {"overlap_passes": True}, True),
    ("rollout/mismatch/abs_dp_max", 0.5, {"top_p": 0.9}, True),
    ("rollout/mismatch/abs_dp_max", 0.5, {"top_k": 5}, True),
    ("rollout/mismatch/abs_logp_mean", 0.5, {"min_p": 0.1}, True),
    ("rollout/mismatch/abs_logp_mean", 0.02, {"bf16": True}, True),
    ("rollout/mismatch/abs_dp_max", 0.5, {"lora_rank": 4, "lora_dropout": 0.1}, True),
    ("policy/first_ratio_gap", 0.5, {"lora_rank": 4, "lora_dropout": 0.1}, True),
    ("policy/first_ratio_gap", 0.5, {"rollout_correction": "bypass"}, True),
])
def test_what_need_not_hold(key, value, options, fresh):
    check_step_facts({**GOOD, key: value}, config(**options), fresh)


def with_foreign_engine(home, folder, **options):
    """A trainer whose engine samples from slightly other weights."""
    cfg = runs.config_of(home, folder, **options)
    trainer, other = (runs.trainer_of(cfg, runs.strategy_of(cfg)) for _ in range(2))
    parameters = other.prepared["actor"].model.named_parameters()
    next(p for name, p in parameters if name.endswith("o_proj.weight")).data.mul_(1.01)
    trainer.engine = trainer.maker.engine = other.engine
    return trainer


def test_an_engine_with_other_weights_is_caught(tmp_path):
    home = runs.write_home(tmp_path / "home")
    with pytest.raises(StepFactError, match="rollout/mismatch.*does not sample from the weights"):
        with_foreign_engine(home, tmp_path / "run").fit()


def test_the_facts_are_in_the_metrics_file(tmp_path):
    home = runs.write_home(tmp_path / "home")
    done = runs.run(home, tmp_path / "run", max_epochs=2, init_kl_coef=0.1)
    assert done.metrics["policy/first_ratio_gap"] == 0.0 == done.metrics["policy/first_kl_ref"]
    assert 0 < done.metrics["rollout/mismatch/abs_logp_mean"] < 1e-5
    assert done.metrics["policy/ratio_max"] > 1.0, "later ratios must differ, or the first says nothing"


def test_a_frozen_policy_is_checked_when_it_is_first_trained(tmp_path):
    home = runs.write_home(tmp_path / "home")
    options = {"advantage_estimator": "gae", "freezing_actor_steps": 1, "max_steps": 2}
    done = runs.run(home, tmp_path / "run", **options)
    assert "policy/first_ratio_gap" not in done.lines[0] and done.lines[1]["policy/first_ratio_gap"] == 0.0
    trainer = with_foreign_engine(home, tmp_path / "other", **options)
    with pytest.raises(StepFactError, match="rollout/mismatch"):
        trainer.fit()
    assert trainer.step == 1


def test_dropout_does_not_stop_a_resumed_run(tmp_path):
    """Adapters start at 0, where dropout changes nothing; when a run goes on they are not."""
    home = runs.write_home(tmp_path / "home")
    options = {"lora_rank": 2, "lora_dropout": 0.5, "max_epochs": 2, "disable_ckpt": False, "actor_learning_rate": 0.1}
    runs.run(home, tmp_path / "run", **options)
    done = runs.run(home, tmp_path / "run", **options | {"max_steps": 2}, load_checkpoint=True)
    assert done.metrics["policy/first_ratio_gap"] > 1e-3


def test_the_limits_in_the_docs():
    page = Path(step_facts.__file__).parents[2] / "docs" / "safety.md"
    if not page.exists():
        pytest.skip("installed without its repository")
    text = page.read_text(encoding="utf-8")
    for key, (float32, bfloat16) in LIMITS.items():
        shown = re.search(rf"^\| `rollout/mismatch/{key}` \| (\S+) \(([\d.]+) with `--bf16`\)", text, re.MULTILINE)
        assert (float(shown[1]), float(shown[2])) == (float32, bfloat16)
    shown = re.search(r"^\| `policy/first_ratio_gap` \| 0; (\S+) \(([\d.]+) with `--bf16`\)", text, re.MULTILINE)
    assert (float(shown[1]), float(shown[2])) == REPACKED
