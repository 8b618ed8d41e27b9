"""The reward pipeline: its order, its numbers and who stays out of what."""
import pytest
import torch

import lightrft.algorithms  # noqa: F401  (fills the registries)
from lightrft.config.schema import AlgorithmConfig, RewardConfig
from lightrft.ops.segment import last_token
from lightrft.trainer.advantage_calculator import (get_advantage_calculator, overlong_penalty, RunningMoments,
                                                   token_rewards)
from lightrft.types import Experience


def batch(rewards, lengths=None, groups=None, scored=None, truncated=None, kl=None) -> Experience:
    """One prompt token and ``lengths`` action tokens per sample; ``kl`` [tokens] is log p_old - log p_ref."""
    n = len(rewards)
    lengths = lengths or [2] * n
    cu = torch.tensor([0] + [1 + length for length in lengths]).cumsum(0).to(torch.int32)
    mask = torch.ones(int(cu[-1]), dtype=torch.bool)
    mask[cu[:-1].long()] = False
    exp = Experience(token_ids=torch.zeros(len(mask), dtype=torch.long), cu_seqlens=cu, loss_mask=mask,
                     group_ids=torch.tensor(groups or [0] * n), rewards=torch.tensor(rewards, dtype=torch.float32),
                     scored=torch.tensor(scored or [True] * n), truncated=torch.tensor(truncated or [False] * n))
    if kl is not None:
        exp.old_logprobs, exp.ref_logprobs = torch.zeros(len(mask)), torch.zeros(len(mask))
        exp.old_logprobs[mask] = torch.tensor(kl)
    return exp


def calculator(estimator="reinforce", max_len=100, reward=None, **algorithm):
    cfg = AlgorithmConfig(advantage_estimator=estimator, **algorithm)
    return get_advantage_calculator(cfg, RewardConfig(**(reward or {})), max_len)


def per_sample(exp: Experience) -> list[float]:
    """The advantage at the last action token of each sample (0 where there is none)."""
    mask = torch.ones_like(exp.loss_mask)
    return exp.advantages[last_token(mask, exp.cu_seqlens)[0]].tolist()


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_a_teacher_rewards_every_token_after_whitening_and_before_the_clip(gamma):
    """A loop over samples; the third one is not scored, and its tokens are not in the loss."""
    plain, exp = (batch([1.0, 0.0, 9.0], [3, 2, 2], scored=[True, True, False]) for _ in range(2))
    calculator("dr_grpo", advantages_norm=True)(plain)
    exp.old_logprobs, exp.teacher_logprobs = -torch.rand(2, exp.num_tokens, generator=torch.Generator().manual_seed(0))
    gap, expected, kl = exp.teacher_logprobs - exp.old_logprobs, plain.advantages.clone(), []
    for start, end in ((1, 4), (5, 7)):
        for t in range(start, end):
            expected[t] += 0.7 * sum(gamma**(u - t) * gap[u] for u in range(t, end))
            kl.append(-gap[t].item())
    options = {"advantages_norm": True, "kd_coef": 0.7, "kd_gamma": gamma}
    metrics = calculator("dr_grpo", advantage_clip=0.9, **options)(exp)
    torch.testing.assert_close(exp.advantages, expected.clamp(-0.9, 0.9))
    assert metrics["reward/teacher_kl"] == pytest.approx(sum(kl) / 5)
    assert metrics["advantage/max"] == pytest.approx(expected[expected != 0].max().item()) and expected.max() > 0.9


def test_overlong_reference_numbers():
    penalty = overlong_penalty(torch.tensor([70.0, 80.0, 90.0, 130.0]), 100, 20, 1.0)
    assert (1 + penalty).tolist() == [1, 1, 0.5, 0]
    assert overlong_penalty(torch.tensor([90.0]), 100, 20, 3.0).item() == -1.5


def test_by_default_the_penalty_zone_is_a_fifth_as_in_dapo():
    """4096 of 20480 tokens in the paper; here 20 of 100, so 80 is free and 85, 90 and 100 cost 1/4, 1/2 and 1."""
    exp = batch([1.0] * 4, [80, 85, 90, 100])
    calculator("dr_grpo", 100, {"overlong_buffer": True})(exp)
    assert exp.rewards.tolist() == [1, 0.75, 0.5, 0]


def test_token_reward_reference_numbers():
    exp = batch([12.0, -1.0], [3, 2])
    kl = torch.zeros(exp.num_tokens)
    kl[exp.loss_mask] = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    rewards = token_rewards(exp, kl, 0.1)
    assert rewards[exp.loss_mask].tolist() == pytest.approx([-0.01, -0.02, 11.97, -0.04, -1.05], abs=1e-6)
    assert rewards[~exp.loss_mask].tolist() == [0, 0]


def test_the_length_penalty_uses_response_lengths_and_comes_before_the_groups():
    exp = batch([1.0, 1.0, 1.0, 1.0], [70, 80, 90, 100])
    metrics = calculator("dr_grpo", 100, {"overlong_buffer": True, "overlong_buffer_len": 20})(exp)
    assert exp.rewards.tolist() == [1, 1, 0.5, 0]
    assert per_sample(exp) == pytest.approx([0.375, 0.375, -0.125, -0.625])
    assert metrics["reward/mean"] == 1.0 and metrics["reward/overlong_penalty"] == pytest.approx(-0.375)


def test_shaping_then_running_norm_then_clip():
    """Rewards 0, 10 minus penalties 0, 5 -> 0, 5 -> (x - 2.5) / 3.5355 -> clipped to +-0.5."""
    options = {"overlong_buffer": True, "overlong_buffer_len": 20, "overlong_buffer_penalty_factor": 5.0,
               "reward_running_norm": True, "reward_running_norm_minus_mean": True}  # yapf: disable
    exp = batch([0.0, 10.0], [70, 100])
    calculator("reinforce", 100, options)(exp)
    assert exp.rewards.tolist() == pytest.approx([-0.70711, 0.70711], abs=1e-4)
    exp = batch([0.0, 10.0], [70, 100])
    metrics = calculator("reinforce", 100, options | {"reward_clip": 0.7})(exp)
    assert exp.rewards.tolist() == pytest.approx([-0.7, 0.7]) and metrics["reward/clip_frac"] == 1.0
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 10.0), "reported rewards are the raw ones"


def test_running_norm_equals_the_naive_one_over_several_rollouts():
    calc, seen = calculator(reward={"reward_running_norm": True}), []
    for rewards in ([1.0, 2.0, 7.0], [3.0, 3.0], [-5.0, 0.0]):
        seen += rewards
        exp = batch(rewards)
        calc(exp)
        assert exp.rewards.tolist() == pytest.approx([r / torch.tensor(seen).std().item() for r in rewards])
    other = calculator(reward={"reward_running_norm": True})
    other.load_state_dict(calc.state_dict())
    exps = [batch([4.0, 8.0]), batch([4.0, 8.0])]
    assert calc(exps[0]) == other(exps[1]) and exps[0].rewards.tolist() == exps[1].rewards.tolist()


def test_clip_fractions_are_measured_before_clamping():
    exp = batch([5.0, 0.5, -5.0, 0.0])
    metrics = calculator("reinforce", reward={"reward_clip": 1.0})(exp)
    assert metrics["reward/clip_frac"] == 0.5 and exp.rewards.tolist() == [1, 0.5, -1, 0]
    exp = batch([5.0, 0.5, -5.0, 0.0])
    metrics = calculator("reinforce", advantage_clip=1.0)(exp)
    assert metrics["advantage/clip_frac"] == 0.5 and metrics["advantage/max"] == 5.0
    assert per_sample(exp) == [1, 0.5, -1, 0]


def test_nothing_is_clamped_silently():
    exp = batch([1000.0, -1000.0])
    metrics = calculator("reinforce")(exp)
    assert per_sample(exp) == [1000, -1000] and "advantage/clip_frac" not in metrics


def test_whitening_is_over_tokens_and_happens_once():
    exp = batch([1.0, 0.0, 1.0, 1.0], [2, 3, 1, 2])
    calculator("reinforce", advantages_norm=True)(exp)
    assert per_sample(exp) == pytest.approx([0.774597, -1.290994, 0.774597, 0.774597], abs=1e-5)
    twice = batch([1.0, 0.0, 1.0, 1.0], [2, 3, 1, 2])
    calculator("reinforce++")(twice)
    assert torch.allclose(exp.advantages, twice.advantages)


@pytest.mark.parametrize("estimator",
                         ["group_norm", "rloo", "dr_grpo", "reinforce", "reinforce++", "reinforce_baseline"])
def test_unscored_samples_leave_loss_baseline_and_statistics(estimator):
    """A batch with unscored samples gives what the batch without them gives."""
    options = {"overlong_buffer": True, "overlong_buffer_len": 98, "reward_running_norm": True,
               "reward_running_norm_minus_mean": True, "reward_clip": 0.9}  # yapf: disable
    full = batch([1.0, 9.0, 0.0, 2.0, 5.0], [2, 90, 3, 1, 5], [0, 0, 0, 1, 1], [True, False, True, True, True],
                 [False, True, False, False, False])
    alone = batch([1.0, 0.0, 2.0, 5.0], [2, 3, 1, 5], [0, 0, 1, 1])
    left, right = calculator(estimator, reward=options), calculator(estimator, reward=options)
    metrics, expected = left(full), right(alone)
    keep = [0, 2, 3, 4]
    assert [per_sample(full)[i] for i in keep] == pytest.approx(per_sample(alone), abs=1e-6)
    assert not full.select([1]).loss_mask.any() and not full.select([1]).advantages.any()
    assert left.state_dict() == right.state_dict()
    same = {name for name in expected if not name.startswith("group/")}
    assert {name: metrics[name] for name in same} == pytest.approx({name: expected[name] for name in same}, abs=1e-6)


def test_groups_are_counted():
    exp = batch([1.0, 1.0, 0.0, 3.0, 0.0, 0.0], groups=[0, 0, 1, 1, 2, 2], scored=[True] * 5 + [False])
    metrics = calculator("group_norm")(exp)
    assert metrics["group/zero_spread_frac"] == pytest.approx(1 / 3)
    assert metrics["group/singletons"] == 1, "one group has one scored sample"
    near = batch([1.0, 1.0005], groups=[0, 0])
    assert calculator("group_norm")(near)["group/zero_spread_frac"] == 1.0
    assert calculator("group_norm", zero_spread=1e-4)(near)["group/zero_spread_frac"] == 0.0


def test_truncated_samples_leave_the_loss_but_not_the_baseline():
    make = dict(rewards=[1.0, 0.0], truncated=[False, True])
    exp = batch(**make)
    calculator("dr_grpo", reward={"mask_truncated": True})(exp)
    assert per_sample(exp) == [0.5, 0.0] and not exp.select([1]).loss_mask.any()
    exp = batch(**make)
    calculator("dr_grpo")(exp)
    assert per_sample(exp) == [0.5, -0.5] and exp.select([1]).loss_mask.any()


def test_kl_in_the_reward_or_in_the_loss():
    kl = [0.1, -0.2, 0.3, 0.4]
    exp = batch([1.0, 2.0], kl=kl)
    metrics = calculator("reinforce", kl_estimator="k1")(exp, 0.5)
    assert exp.token_rewards[exp.loss_mask].tolist() == pytest.approx([-0.05, 1.1, -0.15, 1.8])
    assert exp.advantages[exp.loss_mask].tolist() == pytest.approx([1.05, 1.1, 1.65, 1.8])
    assert metrics["reward/kl"] == pytest.approx(0.15)
    exp = batch([1.0, 2.0], kl=kl)
    metrics = calculator("reinforce", use_kl_loss=True)(exp, 0.5)
    assert exp.advantages[exp.loss_mask].tolist() == [1, 1, 2, 2] and "reward/kl" not in metrics


@pytest.mark.parametrize("kind,expected", [("k1", 0.0), ("k2", 0.125), ("k3", (0.106531 + 0.148721) / 2)])
def test_the_estimator_of_the_kl_in_the_reward(kind, expected):
    exp = batch([0.0], kl=[0.5, -0.5])
    assert calculator("reinforce", kl_estimator=kind)(exp, 1.0)["reward/kl"] == pytest.approx(expected, abs=1e-5)


def test_returns_are_taken_before_whitening_and_clipping():
    values = torch.tensor([0.0, 0.1, 0.2, 0.0, 0.3, 0.2, 0.1, 0.0, 0.5, 0.0, 0.4, 0.6])
    expected = [0.96, 1, 0.01475, 0.005, 0, 1, 0.98, 1]
    for options in ({}, {"advantages_norm": True}, {"advantage_clip": 0.1}):
        exp = batch([1.0, 0.0, 1.0, 1.0], [2, 3, 1, 2])
        exp.values = values
        calculator("gae", **options)(exp)
        assert exp.returns[exp.loss_mask].tolist() == pytest.approx(expected, abs=1e-5)
    assert exp.advantages.abs().max() == pytest.approx(0.1)


@pytest.mark.parametrize("estimator", ["group_norm", "reinforce++", "reinforce_baseline", "gae"])
def test_a_batch_without_scores_is_finite_and_teaches_nothing(estimator):
    exp = batch([0.0, 0.0], scored=[False, False], kl=[0.1, 0.2, 0.3, 0.4])
    exp.values = torch.zeros(exp.num_tokens)
    options = {"reward_running_norm": True, "reward_clip": 1.0, "overlong_buffer": True, "mask_truncated": True}
    calc = calculator(estimator, 2000, options, advantage_clip=1.0)
    metrics = calc(exp, 0.1)
    assert not exp.loss_mask.any() and not exp.advantages.any()
    assert all(value == value and abs(value) < 1e9 for value in metrics.values()), metrics
    assert calc.state_dict() == RunningMoments().state_dict()


def test_a_response_without_tokens_is_no_error():
    exp = batch([1.0, 0.0], [0, 2])
    metrics = calculator("group_norm")(exp)
    assert torch.isfinite(exp.advantages).all() and metrics["reward/mean"] == 0.5
    assert per_sample(exp)[1] == pytest.approx(-0.707106, abs=1e-5)
