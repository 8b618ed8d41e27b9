"""Meanings of ``--semantics``: numbers computed by hand, and naive formulas."""
import math

import pytest
import torch

from lightrft.algorithms.base import ADVANTAGES
from lightrft.config.cli import parse_config
from lightrft.config.schema import AlgorithmConfig, RewardConfig
from lightrft.config.presets import SEMANTICS
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


def loss_of(cfg: AlgorithmConfig, log_ratio: list[float], advantages: list[float], lens: list[int], norm: float = 1,
            masked: int = 0, entropy: list[float] | None = None) -> float:
    """The loss of responses of which the first ``masked`` tokens are left out."""
    exp = rollout([0.0] * len(lens), list(range(len(lens))), lens)
    exp.advantages, exp.old_logprobs = torch.tensor(advantages), torch.full((sum(lens), ), -1.0)
    exp.loss_mask[:masked] = False
    policy = PolicyLoss(cfg, norm)
    denominators = policy.denominators(count(exp.loss_mask, exp.cu_seqlens, cfg.loss_agg_all_seqs))
    bonus = None if entropy is None else torch.tensor(entropy)
    return policy(exp.old_logprobs + torch.tensor(log_ratio), bonus, exp, denominators, 0.0)[0].item()


def advantages_of(exp: Experience, cfg: AlgorithmConfig, kl_coef: float = 0.0) -> list[float]:
    """The advantage at the first token of every response, after normalisation."""
    get_advantage_calculator(cfg, RewardConfig(), 9)(exp, kl_coef)
    return exp.advantages[exp.cu_seqlens[:-1].long()].tolist()


EPS = {"default": 1e-6, "verl": 1e-6, "trl": 1e-4, "openrlhf": 1e-9, "lightrft": 1e-9}


@pytest.mark.parametrize("semantics,eps", EPS.items())
def test_the_epsilon_of_a_group(semantics, eps):
    found = firsts(rollout([1.0, 0.9], [0, 0], [2, 3]), options_of("--recipe", "grpo", "--semantics", semantics))
    assert found == pytest.approx([0.05 / (0.1 / math.sqrt(2) + eps), -0.05 / (0.1 / math.sqrt(2) + eps)], rel=1e-6)


@pytest.mark.parametrize("semantics,expected", [
    ("default", [0.774597, -1.290994, 0.774597, 0.774597]), ("openrlhf", [0.774597, -1.290994, 0.774597, 0.774597]),
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
    """The constant times the sequences; LightRFT has one mean for everything. verl up to 0.7.0: the constant alone."""
    flags = ["--recipe", "dr_grpo", "--semantics", semantics]
    case = [0.0] * 6, [1., 1., 1., -2., -2., 5.], [3, 2, 1]
    total, means = 3 - 4 + 5, 1 - 2 + 5
    expected = -means / 3 if semantics == "lightrft" else -total / 10 / 3
    assert loss_of(options_of(*flags), *case, norm=10) == pytest.approx(expected)
    old = [] if semantics == "lightrft" else ["--no_loss_agg_norm_seqs"]
    assert loss_of(options_of(*flags, *old), *case, norm=10) == pytest.approx(expected * (3 if old else 1))


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_the_mean_of_grpo(semantics):
    loss = loss_of(options_of("--recipe", "grpo", "--semantics", semantics), [0.0] * 4, [1., 1., 1., 5.], [3, 1])
    assert loss == pytest.approx(-3 if semantics in ("default", "lightrft") else -2)


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


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_means_count_sequences_without_a_token(semantics):
    """Three sequences, the first one masked: TRL and verl divide by three, the others by two."""
    cfg = options_of("--loss_agg_mode", "seq-mean-token-mean", "--semantics", semantics)
    loss = loss_of(cfg, [0.0] * 4, [7., 7., 1., 3.], [2, 1, 1], masked=2)
    assert loss == pytest.approx(-(1 + 3) / (3 if semantics in ("trl", "verl") else 2))


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_the_mean_of_the_entropy(semantics):
    """Responses of three tokens and one, entropies 1, 1, 1 and 5: a mean of 2 over tokens, of 3 over sequences."""
    cfg = options_of("--loss_agg_mode", "seq-mean-token-mean", "--entropy_coef", "0.5", "--semantics", semantics)
    loss = loss_of(cfg, [0.0] * 4, [0.0] * 4, [3, 1], entropy=[1., 1., 1., 5.])
    assert loss == pytest.approx(-0.5 * (2 if semantics in ("trl", "openrlhf") else 3))


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_flat_groups_in_the_whitening(semantics):
    """Outcomes .5, -.5, 0, 0 on 1, 2, 1 and 1 tokens: the flat group is whitened with the others, or stays 0."""
    cfg = options_of("--advantage_estimator", "reinforce_baseline", "--semantics", semantics)
    found = advantages_of(rollout([1., 0., 3., 3.], [0, 0, 1, 1], [1, 2, 1, 1]), cfg)
    inside = [0.5, -0.5, -0.5] + [0.0, 0.0] * cfg.whiten_flat_groups
    mean, unbiased = sum(inside) / len(inside), semantics in ("verl", "trl")
    std = math.sqrt(sum((x - mean)**2 for x in inside) / (len(inside) - unbiased))
    flat = -mean / std if cfg.whiten_flat_groups else 0.0
    assert found == pytest.approx([(0.5 - mean) / std, (-0.5 - mean) / std, flat, flat], abs=1e-5)
    assert cfg.whiten_flat_groups is (semantics in ("verl", "trl", "openrlhf"))


@pytest.mark.parametrize("tokens", [True, False])
def test_gdpo_whitens_tokens_or_samples(tokens):
    lens, parts = [1, 3, 2, 2], torch.tensor([[1., 0.], [0., 0.], [0., 1.], [0., 3.]])
    exp = rollout([0.0] * 4, [0, 0, 1, 1], lens)
    exp.reward_parts, exp.part_weights = parts, torch.ones(4, 2)
    found = advantages_of(exp, AlgorithmConfig(advantage_estimator="gdpo", gdpo_whiten_tokens=tokens, std_eps=0.0))
    sums = [x / math.sqrt(2) for x in (1, -1, -1, 1)]
    counted = [s for s, n in zip(sums, lens) for _ in range(n if tokens else 1)]
    mean = sum(counted) / len(counted)
    std = math.sqrt(sum((s - mean)**2 for s in counted) / len(counted))
    assert found == pytest.approx([(s - mean) / std for s in sums], abs=1e-5)


@pytest.mark.parametrize("estimator,first", [("rloo", False), ("rloo", True), ("dr_grpo", True), ("dr_grpo", False)])
def test_where_the_kl_of_the_reward_comes_in(estimator, first):
    """KL .1 per token of the first response: in its reward before the baseline, or on its tokens after it."""
    exp = rollout([1., 0.], [0, 0], [3, 1])
    exp.old_logprobs, exp.ref_logprobs = torch.zeros(4), torch.tensor([-.1, -.1, -.1, 0.])
    cfg = AlgorithmConfig(advantage_estimator=estimator, kl_in_outcome=first, init_kl_coef=2.0)
    scale, gap = 2 if estimator == "rloo" else 1, 1.0 - 0.6 * first
    assert advantages_of(exp, cfg, 2.0) == pytest.approx([scale * gap / 2 - 0.6 * (not first), -scale * gap / 2])
    last = exp.advantages[2].item()
    assert last == pytest.approx(scale * gap / 2 - 0.2 * (not first)), "each token has the penalties that follow it"


def test_the_kl_before_the_comparison_hides_no_flat_group():
    """Rewards that do not differ are counted as such, although the KL makes a difference; truncated ones have one."""
    exp = rollout([1., 1., 1.], [0, 0, 0], [2, 1, 1])
    exp.truncated[0], exp.weight_versions = True, torch.zeros(4).int()
    exp.old_logprobs, exp.ref_logprobs = torch.zeros(4), torch.tensor([-.1, -.2, -.3, -.6])
    cfg = AlgorithmConfig(advantage_estimator="dr_grpo", kl_in_outcome=True, init_kl_coef=1.0)
    metrics = get_advantage_calculator(cfg, RewardConfig(mask_truncated=True), 9)(exp, 1.0)
    assert metrics["group/zero_spread_frac"] == 1 and exp.advantages.tolist() == pytest.approx([0, 0, .1, -.2])


def test_division_by_the_deviation():
    exp = rollout([3., 1., 0.], [0, 0, 0], [1, 2, 1])
    for estimator, plain in (("cpgd", [5 / 3, -1 / 3, -4 / 3]), ("grpo_passk", [2., 0., 0.])):
        for divided in (False, True):
            cfg = AlgorithmConfig(advantage_estimator=estimator, norm_group_std=divided, std_eps=0.5)
            scale = math.sqrt(7 / 3) + 0.5 if divided else 1.0
            assert firsts(exp, cfg) == pytest.approx([x / scale for x in plain], rel=1e-6)
