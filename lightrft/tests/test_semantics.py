"""What each meaning of ``--semantics`` computes, as numbers by hand and against naive formulas."""
import math

import pytest
import torch

from lightrft.algorithms.base import ADVANTAGES
from lightrft.config.cli import parse_config
from lightrft.config.schema import AlgorithmConfig, RewardConfig
from lightrft.config.semantics import SEMANTICS
from lightrft.models.loss import PolicyLoss
from lightrft.ops.aggregate import count
from lightrft.ops.segment import masked_whiten
from lightrft.trainer.advantage_calculator import get_advantage_calculator
from lightrft.types import Experience


def options_of(*argv: str) -> AlgorithmConfig:
    return parse_config(list(argv)).config.algorithm


def rollout(rewards: list[float], groups: list[int], lens: list[int]) -> Experience:
    """Responses without prompts, their reward on the last token."""
    ends = torch.tensor(lens).cumsum(0)
    token_rewards = torch.zeros(sum(lens)).index_put((ends - 1, ), torch.tensor(rewards))
    return Experience(token_ids=torch.zeros(sum(lens)).long(), cu_seqlens=torch.cat([torch.zeros(1), ends]).int(),
                      loss_mask=torch.ones(sum(lens)).bool(), group_ids=torch.tensor(groups),
                      rewards=torch.tensor(rewards), scored=torch.ones(len(lens)).bool(), token_rewards=token_rewards,
                      truncated=torch.zeros(len(lens)).bool())


def firsts(exp: Experience, cfg: AlgorithmConfig) -> list[float]:
    """The advantage at the first token of every response."""
    return ADVANTAGES.get(cfg.advantage_estimator).fn(exp, cfg)[exp.cu_seqlens[:-1].long()].tolist()


def loss_of(cfg: AlgorithmConfig, log_ratio: list[float], advantages: list[float], lens: list[int],
            norm: float = 1) -> float:
    exp = rollout([0.0] * len(lens), list(range(len(lens))), lens)
    exp.advantages, exp.old_logprobs = torch.tensor(advantages), torch.full((sum(lens), ), -1.0)
    policy = PolicyLoss(cfg, norm)
    denominators = policy.denominators(count(exp.loss_mask, exp.cu_seqlens))
    return policy(exp.old_logprobs + torch.tensor(log_ratio), None, exp, denominators, 0.0)[0].item()


@pytest.mark.parametrize("semantics,eps", [("lightrft", 1e-6), ("verl", 1e-6), ("trl", 1e-4), ("openrlhf", 1e-9)])
def test_the_epsilon_of_a_group(semantics, eps):
    found = firsts(rollout([1.0, 0.9], [0, 0], [2, 3]), options_of("--recipe", "grpo", "--semantics", semantics))
    assert found == pytest.approx([0.05 / (0.1 / math.sqrt(2) + eps), -0.05 / (0.1 / math.sqrt(2) + eps)], rel=1e-6)


@pytest.mark.parametrize("semantics,expected", [
    ("lightrft", [0.774597, -1.290994, 0.774597, 0.774597]), ("openrlhf", [0.774597, -1.290994, 0.774597, 0.774597]),
    ("verl", [0.724569, -1.207615, 0.724569, 0.724569]), ("trl", [0.724569, -1.207615, 0.724569, 0.724569])
])  # yapf: disable
def test_the_variance_of_whitening(semantics, expected):
    cfg = options_of("--recipe", "reinforce++", "--semantics", semantics)
    assert firsts(rollout([1., 0., 1., 1.], [0, 0, 1, 1], [2, 3, 1, 2]), cfg) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("unbiased", [True, False])
def test_whitening_elsewhere(unbiased):
    """The baseline estimator and --advantages_norm, against a loop over their tokens."""
    lens, rewards, groups = [2, 3, 1, 2], [1.0, 0.0, 3.0, 1.0], [0, 0, 1, 1]
    returns = [r - b for r, b, n in zip(rewards, [0.5, 0.5, 2, 2], lens) for _ in range(n)]
    plain = [r for r, n in zip(rewards, lens) for _ in range(n)]
    for values, estimator, norm in ((returns, "reinforce_baseline", False), (plain, "reinforce", True)):
        mean = sum(values) / len(values)
        variance = sum((v - mean)**2 for v in values) / (len(values) - unbiased)
        exp, cfg = rollout(rewards, groups, lens), AlgorithmConfig(advantage_estimator=estimator, advantages_norm=norm,
                                                                   whiten_unbiased=unbiased)  # yapf: disable
        get_advantage_calculator(cfg, RewardConfig(), 9)(exp)
        assert exp.advantages.tolist() == pytest.approx([(v - mean) / math.sqrt(variance) for v in values], abs=1e-5)


def test_whitening_over_a_mask():
    x, mask = torch.randn(9, dtype=torch.float64), torch.arange(9) % 3 > 0
    want = (x[mask] - x[mask].mean()) / (x[mask].var() + 1e-8).sqrt()
    torch.testing.assert_close(masked_whiten(x, mask, unbiased=True)[mask], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_the_denominator_of_dr_grpo(semantics):
    cfg = options_of("--recipe", "dr_grpo", "--semantics", semantics)
    loss = loss_of(cfg, [0.0] * 6, [1., 1., 1., -2., -2., 5.], [3, 2, 1], norm=10)
    assert loss == pytest.approx(-(3 - 4 + 5) / 10 / (1 if semantics == "verl" else 3))


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_the_mean_of_grpo(semantics):
    loss = loss_of(options_of("--recipe", "grpo", "--semantics", semantics), [0.0] * 4, [1., 1., 1., 5.], [3, 1])
    assert loss == pytest.approx(-3 if semantics == "lightrft" else -2)


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_the_dual_clip(semantics):
    loss = loss_of(options_of("--semantics", semantics), [1.5], [-1.], [1])
    assert loss == pytest.approx(3 if semantics == "verl" else math.exp(1.5), rel=1e-6)


@pytest.mark.parametrize("argv,weight", [
    ("--recipe cispo", 5), ("--recipe cispo --semantics trl", 5), ("--recipe cispo --semantics verl", 5),
    ("--recipe cispo --eps_clip_high 2", 3), ("--recipe cispo --semantics trl --eps_clip_high 2", 2),
    ("--policy_loss cispo --semantics trl --eps_clip_high 5", 5), ("--policy_loss cispo --eps_clip_high 5", 6),
    ("--policy_loss cispo --semantics verl --eps_clip_high 5", 6)
])  # yapf: disable
def test_the_bound_of_cispo(argv, weight):
    """The loss at a ratio of exp(2) is -weight * A * log pi, log pi = 1 here."""
    assert loss_of(options_of(*argv.split()), [2.0], [1.0], [1]) == pytest.approx(-weight)


def test_the_lower_bound_of_cispo():
    """TRL has none; log pi is -3 at a ratio of exp(-2), as it was -1."""
    for semantics, weight in (("trl", math.exp(-2)), ("verl", 0.8)):
        cfg = options_of(*f"--policy_loss cispo --semantics {semantics} --eps_clip_high 5".split())
        assert loss_of(cfg, [-2.0], [1.0], [1]) == pytest.approx(weight * 3)
