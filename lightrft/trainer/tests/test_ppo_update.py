"""The optimizer steps of one rollout: how many, on what, and what they report."""
import math

import pytest
import torch

from lightrft.config.options import ConfigError
from lightrft.ops.aggregate import MODES
from lightrft.tests.support import runs
from lightrft.trainer.optimizer_step import NonFiniteTraining

no_picture = runs.no_picture


def made(home, folder, **options):
    """A trainer and its first rollout."""
    trainer = runs.ready(home, folder, **options)
    return trainer, trainer.maker.make(next(trainer.loader), 0, trainer.kl.value)


def update(trainer, rollout, step=0):
    return trainer.update.run(rollout, step, trainer.kl.value)


@pytest.mark.parametrize("options,steps", [({}, 1), ({"train_batch_size": 2}, 4), ({"max_epochs": 3}, 3),
                                           ({"train_batch_size": 4, "max_epochs": 2}, 4)])
def test_steps_are_epochs_times_mini_batches(home, tmp_path, options, steps):
    trainer, rollout = made(home, tmp_path, advantage_estimator="gae", **options)
    metrics = update(trainer, rollout)
    assert metrics["policy/optimizer_steps"] == steps == metrics["critic/optimizer_steps"]
    assert trainer.prepared["actor"].scheduler.last_epoch == steps


def test_the_plan_knows_the_cost_of_attention(home, tmp_path):
    trainer, rollout = made(home, tmp_path)
    assert rollout.plan.attention == trainer.prepared["actor"].model.attention > 0


def test_the_reported_loss_is_the_mean_over_steps(home, tmp_path):
    """With ratio 1 the loss of a mini-batch is minus the mean advantage of its tokens."""
    trainer, rollout = made(home, tmp_path, advantage_estimator="reinforce", train_batch_size=4,
                            actor_learning_rate=1e-9)
    expected = []
    for mini in rollout.plan.epoch(0):
        part = rollout.exp.select(mini.samples)
        expected.append(-part.advantages[part.loss_mask].mean().item())
    metrics = update(trainer, rollout)
    assert expected[0] != pytest.approx(expected[1], rel=1e-2)
    assert metrics["policy/loss"] == pytest.approx(sum(expected) / 2, abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_denominators_count_the_whole_mini_batch(home, tmp_path, mode):
    """Samples without a kept token count nowhere."""
    trainer, rollout = made(home, tmp_path, advantage_estimator="reinforce", loss_agg_mode=mode, loss_agg_norm=7 *
                            (mode == MODES[3]), micro_train_batch_size=2)  # yapf: disable
    exp = rollout.exp
    exp.loss_mask[exp.cu_seqlens[3]:exp.cu_seqlens[5]] = False
    rollout.shards.count()
    kept = [exp.select([i]) for i in range(8) if i not in (3, 4)]
    sums = [-e.advantages[e.loss_mask].sum() for e in kept]
    means = [-e.advantages[e.loss_mask].mean() for e in kept]
    tokens = exp.loss_mask.sum()
    expected = dict(zip(MODES, (sum(sums) / tokens, sum(means) / 6, sum(sums) / 6, sum(sums) / 7 / 6, sum(sums))))[mode]
    assert update(trainer, rollout)["policy/loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_an_update_with_nothing_to_learn_makes_no_step_and_goes_on(home, tmp_path):
    trainer, rollout = made(home, tmp_path, advantage_estimator="gae")
    rollout.exp.loss_mask[:] = False
    rollout.shards.count()
    before = {name: runs.weights(trainer, name) for name in trainer.prepared}
    metrics = update(trainer, rollout)
    assert metrics["policy/optimizer_steps"] == 0 == metrics["critic/optimizer_steps"]
    assert (metrics["policy/empty_steps"], metrics["policy/skipped_steps"]) == (1, 0)
    assert all(math.isfinite(value) for value in metrics.values())
    for name, weights in before.items():
        assert all(torch.equal(value, weights[key]) for key, value in runs.weights(trainer, name).items())


def test_a_run_of_unscored_batches_advances(home, tmp_path):
    from lightrft.rewards.base import Outcome
    judge = runs.Judge(runs.config_of(home, tmp_path).reward, lambda item: Outcome(None, "down"))
    done = runs.run(home, tmp_path, judge, max_steps=2)
    assert [line["step"] for line in done.lines] == [1, 2]
    assert all(line["reward/unscored/down"] == 8 and line["policy/optimizer_steps"] == 0 for line in done.lines)


def poison(trainer, when):
    """The advantages of the updates number ``when`` are NaN, and so is their loss."""
    update, calls = trainer.update.run, []

    def run(rollout, step, *coefs):
        calls.append(step)
        if step in when:
            rollout.exp.advantages = rollout.exp.advantages * math.nan
        return update(rollout, step, *coefs)

    trainer.update.run = run


def test_a_nan_is_skipped_counted_and_forgotten(home, tmp_path):
    trainer = runs.build(home, tmp_path / "a", max_steps=4, init_kl_coef=0.1, use_kl_loss=True, kl_target=0.1)
    poison(trainer, {1})
    trainer.fit()
    lines = runs.read_lines(tmp_path / "a" / "metrics.jsonl")
    assert [line["policy/skipped_steps"] for line in lines] == [0, 1, 0, 0]
    assert all(math.isfinite(line["policy/kl_coef"]) for line in lines)
    assert [line["policy/loss"] is None for line in lines] == [False, True, False, False]
    assert all(value.isfinite().all() for value in runs.weights(trainer, "actor").values())
    assert trainer.extra_state()["update"] == {"policy": 0}


def test_three_in_a_row_stop_the_run(home, tmp_path):
    trainer = runs.build(home, tmp_path, max_steps=6)
    poison(trainer, {1, 3, 4, 5})
    with pytest.raises(NonFiniteTraining, match="3 optimizer steps in a row"):
        trainer.fit()
    assert trainer.step == 5 and [line["step"]
                                  for line in runs.read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_a_frozen_policy_stays_while_the_critic_learns(home, tmp_path):
    trainer, rollout = made(home, tmp_path, advantage_estimator="gae", freezing_actor_steps=1, max_steps=2)
    actor, critic = (runs.weights(trainer, name) for name in ("actor", "critic"))
    metrics = update(trainer, rollout, step=0)
    assert "policy/optimizer_steps" not in metrics and metrics["critic/optimizer_steps"] == 1
    assert all(torch.equal(value, actor[key]) for key, value in runs.weights(trainer, "actor").items())
    assert any(not torch.equal(value, critic[key]) for key, value in runs.weights(trainer, "critic").items())
    assert update(trainer, rollout, step=1)["policy/optimizer_steps"] == 1


def test_critic_metrics_describe_the_values_before_the_update(home, tmp_path):
    trainer, rollout = made(home, tmp_path, advantage_estimator="gae", max_epochs=3, critic_learning_rate=0.05)
    exp = rollout.exp
    exp.values = torch.where(exp.loss_mask, torch.randn(exp.num_tokens, generator=torch.Generator().manual_seed(0)), 0)
    returns, error = exp.returns[exp.loss_mask], (exp.returns - exp.values)[exp.loss_mask]
    expected = 1 - error.var(correction=0) / returns.var(correction=0)
    metrics = update(trainer, rollout)
    assert metrics["critic/explained_variance"] == pytest.approx(expected.item(), rel=1e-4)


def test_entropy_and_kl_are_token_means_at_the_sampling_temperature(home, tmp_path):
    trainer, rollout = made(home, tmp_path, temperature=0.7, init_kl_coef=0.1, use_kl_loss=True)
    model, exp = trainer.prepared["actor"].model, rollout.exp
    exp.ref_logprobs = torch.where(exp.loss_mask, exp.ref_logprobs - 0.5, 0)
    with torch.no_grad():
        entropy = model(exp, temperature=0.7, entropy=True)[1][exp.loss_mask].mean().item()
    metrics = update(trainer, rollout)
    assert metrics["policy/entropy"] == pytest.approx(entropy, rel=1e-5)
    assert metrics["policy/kl_ref"] == pytest.approx(math.exp(-0.5) - 1 + 0.5, rel=1e-4)
    assert metrics["policy/first_kl_ref"] == pytest.approx(0.5, rel=1e-4)


def test_the_schedule_of_a_policy_frozen_at_first_ends_with_the_run(home, tmp_path):
    options = {"advantage_estimator": "gae", "max_steps": 4, "max_epochs": 2, "lr_scheduler": "linear"}
    kl = {"init_kl_coef": 0.1, "use_kl_loss": True, "kl_target": 1.0, "kl_horizon": 10}
    done = runs.run(home, tmp_path, freezing_actor_steps=2, **options, **kl)
    used = [line["policy/kl_coef"] for line in done.lines]
    assert used[:3] == [0.1] * 3 and used[3] < 0.1, "adapted to a KL that nothing measured"
    assert done.metrics["policy/lr"] == pytest.approx(1e-3 / 4)  # the rate of the last of 4 steps; the next would be 0
    assert done.metrics["critic/lr"] == pytest.approx(1e-3 / 8)
    assert done.lines[2]["policy/lr"] == pytest.approx(0.75e-3)
    assert done.lines[1]["critic/lr"] == pytest.approx(1e-3 * 5 / 8)


def test_a_policy_that_is_frozen_until_the_data_end_is_refused(home, tmp_path):
    with pytest.raises(ConfigError, match="--freezing_actor_steps 1: the policy is never trained in 1 step; nearest"):
        runs.run(home, tmp_path, advantage_estimator="gae", freezing_actor_steps=1, max_steps=0)


def test_a_critic_that_is_nan_at_every_step_stops_the_run(home, tmp_path):
    trainer = runs.build(home, tmp_path, max_steps=6, advantage_estimator="gae")
    original = trainer.update.value_loss.forward
    trainer.update.value_loss.forward = lambda *args: (original(*args)[0] * math.nan, original(*args)[1])
    with pytest.raises(NonFiniteTraining, match="3 optimizer steps in a row"):
        trainer.fit()
    assert [line["policy/skipped_steps"] for line in runs.read_lines(tmp_path / "metrics.jsonl")] == [0, 0]


def test_the_kl_coefficient_stays_when_nothing_was_scored(home, tmp_path):
    from lightrft.rewards.base import Outcome
    options = {"init_kl_coef": 0.1, "kl_target": 0.5, "max_steps": 2}
    moved = runs.run(home, tmp_path / "a", **options)
    judge = runs.Judge(runs.config_of(home, tmp_path).reward, lambda item: Outcome(None, "down"))
    still = runs.run(home, tmp_path / "b", judge, **options)
    assert moved.lines[1]["policy/kl_coef"] < 0.1 == still.lines[1]["policy/kl_coef"]
