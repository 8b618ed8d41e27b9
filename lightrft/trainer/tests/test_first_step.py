"""The facts of the first step: each one violated is an error that names it."""
import shutil

import pytest
from transformers import AutoConfig

from lightrft.config.schema import Config
from lightrft.models import actor_language
from lightrft.models.packing_check import packing_fault
from lightrft.ops.rounding import RunArithmetic
from lightrft.rewards.base import Outcome
from lightrft.tests.support import field, runs, tiny
from lightrft.trainer import ppo_trainer
from lightrft.trainer.checks.first_step import StepFactError, check_step_facts
from lightrft.trainer.logprob_pass import LogprobPass

no_picture = runs.no_picture

GOOD = {
    "policy/first_ratio_gap": 0.0, "rollout/mismatch/abs_logp_mean": 1e-6, "rollout/mismatch/abs_dp_max": 1e-6,
    "policy/first_kl_ref": 0.0
}
ON_GPUS = {
    "policy/first_ratio_gap_mean": 0.0, "policy/first_ratio_gap_p999": 0.0, "rollout/mismatch/abs_logp_mean": 1e-6,
    "rollout/mismatch/abs_dp_p999": 1e-6, "policy/first_kl_ref_mean": 0.0, "policy/first_kl_ref_p999": 0.0
}


def config(**options) -> Config:
    found = Config()
    for name, value in {"init_kl_coef": 0.1, **options}.items():
        group = next(group for group in vars(found).values() if name in vars(group))
        vars(group)[name] = value
    return found


def check_facts(metrics, cfg, fresh=True, device="cpu", experts=False):
    """Check the facts with the arithmetic of a device."""
    check_step_facts(metrics, cfg, fresh, RunArithmetic.of(cfg.rollout, bool(cfg.model.bf16), device, experts))


def test_good_numbers_pass():
    check_facts(GOOD, config())


@pytest.mark.parametrize("key", list(GOOD))
@pytest.mark.parametrize("value", [2e-4, float("nan")])
def test_each_violation_is_named(key, value):
    with pytest.raises(StepFactError, match=f"step 1: {key} is"):
        check_facts({**GOOD, key: value}, config())


@pytest.mark.parametrize("key", list(GOOD))
def test_a_fact_that_was_not_measured_is_no_fact(key):
    with pytest.raises(StepFactError, match=f"{key}.*not measured"):
        check_facts({name: value for name, value in GOOD.items() if name != key}, config())


@pytest.mark.parametrize("key,value,options,fresh", [
    ("policy/first_kl_ref", 0.5, {}, False),
    ("policy/first_kl_ref", 0.5, {"init_kl_coef": 0.0}, True),
    ("policy/first_kl_ref", 0.5, {"pretrain": "a", "ref_pretrain": "b"}, True),
    ("policy/first_ratio_gap", 5e-4, {"micro_rollout_batch_size": 1}, True),
    ("policy/first_kl_ref", 5e-4, {"overlap_passes": True}, True),
    ("rollout/mismatch/abs_dp_max", 0.5, {"top_p": 0.9}, True),
    ("rollout/mismatch/abs_dp_max", 0.5, {"top_k": 5}, True),
    ("rollout/mismatch/abs_logp_mean", 0.5, {"min_p": 0.1}, True),
    ("rollout/mismatch/abs_dp_max", 0.5, {"lora_rank": 4, "lora_dropout": 0.1}, True),
    ("policy/first_ratio_gap", 0.5, {"lora_rank": 4, "lora_dropout": 0.1}, True),
    ("policy/first_ratio_gap", 0.5, {"rollout_correction": "bypass"}, True),
])
def test_what_need_not_hold(key, value, options, fresh):
    check_facts({**GOOD, key: value}, config(**options), fresh)


@pytest.mark.parametrize("key", list(ON_GPUS))
def test_gpus_may_round(key):
    """Also where passes forward the same rows. The largest gap of a token decides nothing."""
    check_facts({**ON_GPUS, **GOOD, key: 9e-5, "policy/first_ratio_gap": 9.0}, config(), device="cuda")
    with pytest.raises(StepFactError, match=f"step 1: {key} is"):
        check_facts({**ON_GPUS, key: 2e-3}, config(), device="cuda")


def dropped(value):
    """The metrics of a step that left samples out."""
    return {**GOOD, "rollout/dropped_samples": 3, "policy/first_ratio_gap": value}


def test_dropped_samples_are_other_packs():
    check_facts(dropped(5e-4), config())
    with pytest.raises(StepFactError, match="first_ratio_gap"):
        check_facts(dropped(2e-3), config())


def odd_ones_lost(item):
    """About half of the answers get no score."""
    value = runs.letters(item).value
    return Outcome(None, "lost") if round(value * 11) % 2 else Outcome(value)


ISSUE = {"n_samples_per_prompt": 4, "train_batch_size": 16, "max_epochs": 2}
LEAVING = {
    "unscored": {"recipe": "grpo", "micro_train_batch_size": 2, "generate_max_len": 4},
    "unscored, wide": {"recipe": "grpo", "micro_train_batch_size": 2},
    "unscored, bfloat16": {"recipe": "grpo", "micro_train_batch_size": 2, "bf16": True},
    "truncated": {"entropy_coef": 0.001, "mask_truncated": True, "top_p": 0.9, "temperature": 0.7,
                  "max_tokens_per_micro_batch": 40, "generate_max_len": 4},
    "critic": {"advantage_estimator": "gae", "drop_zero_advantage": False, "init_kl_coef": 0.1,
               "micro_train_batch_size": 2, "generate_max_len": 4},
    "cpgd": {"policy_loss": "cpgd", "micro_train_batch_size": 2, "generate_max_len": 4},
}  # yapf: disable


@pytest.mark.parametrize("name", LEAVING)
def test_samples_that_leave_the_loss_change_no_row(name, home, tmp_path, monkeypatch):
    """Passes run before they leave; fewer rows through the head round otherwise, and the first ratio was not 1."""
    if name.endswith("wide"):
        home = runs.write_home(tmp_path / "home")
        tiny.save_model(home / "model", num_hidden_layers=1, hidden_size=896, initializer_range=0.05)
    packing_fault(AutoConfig.from_pretrained(home / "model"))  # the check at load has passes too; its answer is kept
    rows, fused = [], actor_language.chunked_logprobs
    monkeypatch.setattr(actor_language, "chunked_logprobs",
                        lambda hidden, *args, **more: rows.append(len(hidden)) or fused(hidden, *args, **more))
    options = ISSUE | LEAVING[name]
    judge = runs.Judge(runs.config_of(home, tmp_path).reward, runs.letters if name == "truncated" else odd_ones_lost)
    done = runs.run(home, tmp_path / "run", judge, **options).metrics
    left, truncated = done["reward/unscored"], done["rollout/truncated_frac"]
    assert 0 < (16 * truncated if name == "truncated" else left) < 16 and not done["rollout/dropped_samples"]
    assert done["policy/first_ratio_gap"] == 0 == done.get("policy/first_kl_ref", 0)
    passes = 3 if "policy/first_kl_ref" in done else 2  # old, reference, first epoch
    micro = len(rows) // (passes + 1)
    assert len({tuple(rows[i * micro:(i + 1) * micro]) for i in range(passes)}) == 1


def offset(model, by=1e-3):
    """Weights off by ``by`` in one tensor."""
    weight = next(p for name, p in model.named_parameters() if name.endswith("o_proj.weight"))
    weight.data += by


def with_foreign_engine(home, folder, by=1e-3, **options):
    """A trainer whose engine samples from slightly other weights, which stay as they are."""
    cfg = runs.config_of(home, folder, **options)
    trainer, other = (runs.trainer_of(cfg, runs.strategy_of(cfg)) for _ in range(2))
    offset(other.prepared["actor"].model, by)
    trainer.engine = trainer.maker.engine = other.engine
    return trainer


@pytest.fixture(params=["cpu", "cuda"])
def device(request, monkeypatch):
    """The limits of a device, for numbers that were measured on a CPU."""
    monkeypatch.setattr(
        ppo_trainer, "check_step_facts",
        lambda metrics, cfg, fresh, found: check_facts(metrics, cfg, fresh, request.param, found.engine.experts))
    return request.param


def test_an_engine_with_other_weights_is_caught(home, tmp_path, device):
    with pytest.raises(StepFactError, match="rollout/mismatch.*does not sample from the weights"):
        with_foreign_engine(home, tmp_path / "run").fit()


def test_an_engine_with_stale_weights_is_caught(home, tmp_path, device):
    """Those of one step before."""
    trainer = with_foreign_engine(home, tmp_path, by=0.0, actor_learning_rate=1e-3 if device == "cuda" else 1e-5)
    trainer.train_step()
    assert not trainer.facts_due, "the first step was right"
    trainer.facts_due, trainer.step = True, 1
    with pytest.raises(StepFactError, match="rollout/mismatch.*does not sample from the weights"):
        trainer.train_step()


@pytest.mark.parametrize("model,key", [("actor", "first_ratio_gap"), ("reference", "first_kl_ref")])
def test_a_pass_with_other_weights_is_caught(model, key, home, tmp_path, device, monkeypatch):
    right = LogprobPass.fill

    def wrong(self, *args):
        offset(vars(self)[model].model)
        right(self, *args)
        offset(vars(self)[model].model, -1e-3)

    monkeypatch.setattr(LogprobPass, "fill", wrong)
    with pytest.raises(StepFactError, match=f"policy/{key}"):
        runs.run(home, tmp_path, max_epochs=2, init_kl_coef=0.1, top_p=0.9)  # no comparison with the engine


def test_the_facts_are_in_the_metrics_file(home, tmp_path):
    done = runs.run(home, tmp_path / "run", max_epochs=2, init_kl_coef=0.1)
    assert done.metrics["policy/first_ratio_gap"] == 0.0 == done.metrics["policy/first_kl_ref"]
    assert 0 < done.metrics["rollout/mismatch/abs_logp_mean"] < 1e-5
    assert done.metrics["policy/ratio_max"] > 1.0, "later ratios must differ, or the first says nothing"


def test_responses_that_cross_a_limit_of_rotary_frequencies(tmp_path):
    """Some sequences end below the 64 tokens of the model's first frequencies, some cross them."""
    home = runs.write_home(tmp_path / "home")
    shutil.rmtree(home / "model")
    field.write_longrope(home / "model")
    line = runs.run(home, tmp_path / "run", stop=list("aeiou"), generate_max_len=60, engine_kv_mib=4).metrics
    assert 0 < line["rollout/mismatch/abs_logp_mean"] < 1e-5 > line["policy/first_ratio_gap"]


def test_a_frozen_policy_is_checked_when_it_is_first_trained(home, tmp_path):
    options = {"advantage_estimator": "gae", "freezing_actor_steps": 1, "max_steps": 2}
    done = runs.run(home, tmp_path / "run", **options)
    assert "policy/first_ratio_gap" not in done.lines[0] and done.lines[1]["policy/first_ratio_gap"] == 0.0
    trainer = with_foreign_engine(home, tmp_path / "other", **options)
    with pytest.raises(StepFactError, match="rollout/mismatch"):
        trainer.fit()
    assert trainer.step == 1


def test_dropout_does_not_stop_a_resumed_run(home, tmp_path):
    """Adapters start at 0, where dropout changes nothing; when a run goes on they are not."""
    options = {"lora_rank": 2, "lora_dropout": 0.5, "max_epochs": 2, "disable_ckpt": False, "actor_learning_rate": 0.1}
    runs.run(home, tmp_path / "run", **options)
    done = runs.run(home, tmp_path / "run", **options | {"max_steps": 2}, load_checkpoint=True)
    assert done.metrics["policy/first_ratio_gap"] > 1e-3
