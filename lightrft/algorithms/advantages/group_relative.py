"""Advantages of an outcome against the other responses to the prompt."""
from math import comb

import torch
from torch import Tensor

from lightrft.algorithms.base import action_mask, advantage, from_outcome, group_scale, reward_groups
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.returns import discounted_returns
from lightrft.ops.segment import group_stats, segment_sum
from lightrft.types import Experience


@advantage("group_norm", "grpo", needs_group=True, takes_steps=True, reads=("std_eps", ))
def group_norm(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """GRPO: the reward, standardised within its group.

    Paper: Shao et al. 2024 (DeepSeekMath), https://arxiv.org/abs/2402.03300
    Equation: A_i = (r_i - mean(r)) / (std(r) + eps) (section 4.1.2)
    Degenerate: a group with one scored sample or no spread: 0.
    Deviation: the standard deviation is unbiased, eps is --std_eps; KL penalties are added per token, after the
        division.

    Returns:
        Advantages [T].
    """
    if exp.step_rewards is not None:
        return from_steps(exp, cfg)
    group, live = reward_groups(exp, cfg)
    return from_outcome(exp, torch.where(live, (exp.rewards - group.mean) / (group.std + cfg.std_eps), 0), cfg)


def from_steps(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Return advantages [T] of GRPO with process supervision (DeepSeekMath, section 4.1.3).

    ``A_t = sum of (r_j - mean(R)) / (std(R) + eps)`` over the steps j that end at token t or later; R are the rewards
    of all steps of the group. The sum is discounted with ``cfg.gamma``, the deviation unbiased; penalties of tokens are
    added as they are. A group with one step, or whose deviation is at most ``cfg.zero_spread``, gives 0.
    """
    mask = action_mask(exp)
    ends, raw = mask & ~exp.step_rewards.isnan(), exp.step_rewards.nan_to_num().double()
    moments = [segment_sum(each, exp.cu_seqlens, ends) for each in (torch.ones_like(raw), raw, raw**2)]
    table, (_, owner) = exp.ranks.gather(torch.stack(moments, 1)), exp.group_ids.unique(return_inverse=True)
    count, total, squares = torch.zeros(len(table), 3).double().index_add(0, owner, table)[owner].unbind(1)
    mean = total / count.clamp_min(1)
    std = ((squares - count * mean**2).clamp_min(0) / (count - 1).clamp_min(1)).sqrt()
    live = exp.per_token((count > 1) & (std > cfg.zero_spread))
    normal = (raw - exp.per_token(mean)) / (exp.per_token(std) + cfg.std_eps)
    penalties = torch.where(mask, exp.token_rewards, 0) - torch.where(ends, raw, 0)
    return discounted_returns((penalties + torch.where(ends & live, normal, 0)).float(), mask, exp.cu_seqlens,
                              cfg.gamma)


@advantage("dr_grpo", needs_group=True, reads=())
def dr_grpo(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Dr.GRPO: the reward minus its group's mean, without the division that favours easy and hard prompts.

    Paper: Liu et al. 2025, https://arxiv.org/abs/2503.20783
    Equation: A_i = r_i - mean(r)
    Degenerate: a group with one scored sample or no spread: 0.
    Deviation: the paper's constant denominator is a separate option, --loss_agg_mode seq-mean-token-sum-norm.

    Returns:
        Advantages [T].
    """
    group, live = reward_groups(exp, cfg)
    return from_outcome(exp, torch.where(live, exp.rewards - group.mean, 0), cfg)


@advantage("cpgd", needs_group=True, reads=("norm_group_std", "std_eps"))
def cpgd(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """CPGD: the outcome minus the mean outcome of the prompt under the policy of the rollout.

    Paper: Liu et al. 2025, https://arxiv.org/abs/2505.12504
    Equation: A_i = r_i - mean(r), the group's mean for the expectation over the old policy
    Degenerate: a group with one scored sample or no spread: 0.
    Deviation: the prompts weigh the same; --norm_group_std divides by the standard deviation of the group plus
        --std_eps. The clipped log-ratio and the policy drift are in --policy_loss cpgd.

    Returns:
        Advantages [T].
    """
    group, live = reward_groups(exp, cfg)
    return from_outcome(exp, torch.where(live, (exp.rewards - group.mean) / group_scale(group, cfg), 0), cfg)


@advantage("rloo", needs_group=True, reads=())
def rloo(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """RLOO: the other samples of the group are the baseline.

    Paper: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740
    Equation: A_i = r_i - sum_{j != i} r_j / (n - 1) = n / (n - 1) * (r_i - mean(r))
    Degenerate: a group with one scored sample or no spread: 0.
    Deviation: n counts the scored samples; KL penalties are added per token, after the baseline.

    Returns:
        Advantages [T].
    """
    group, live = reward_groups(exp, cfg)
    scale = group.size / (group.size - 1).clamp_min(1)
    return from_outcome(exp, torch.where(live, scale * (exp.rewards - group.mean), 0), cfg)


@advantage("opo", needs_group=True, reads=())
def opo(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """OPO: the reward minus the baseline of minimal gradient variance, a mean weighted by response length.

    Paper: Hao et al. 2025, https://arxiv.org/abs/2505.23585
    Equation: A_i = r_i - sum_j l_j * r_j / sum_j l_j, l_j the length of response j in tokens
    Degenerate: a group with one scored sample or no spread: 0; equal lengths: dr_grpo.
    Deviation: l counts the tokens that are in the loss; a sample without any has no gradient and no weight.

    Returns:
        Advantages [T].
    """
    _, live = reward_groups(exp, cfg)
    lengths = exp.ranks.gather(segment_sum(exp.loss_mask, exp.cu_seqlens)).to(exp.rewards.dtype)
    weighted = group_stats(lengths * exp.rewards, exp.group_ids, exp.scored).mean
    length = group_stats(lengths, exp.group_ids, exp.scored).mean
    baseline = weighted / torch.where(length > 0, length, 1)
    return from_outcome(exp, torch.where(live, exp.rewards - baseline, 0), cfg)


@advantage("gpg", needs_group=True, reads=())
def gpg(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """GPG: the centred reward, scaled up to compensate for groups of the batch without spread.

    Paper: Chu et al. 2025, https://arxiv.org/abs/2504.02546
    Equation: A_i = alpha * (r_i - mean(r)) / F_norm, F_norm = 1, alpha = B / (B - M), M of B samples in flat groups
    Degenerate: a group with one scored sample or no spread: 0; every group has spread: dr_grpo.
    Deviation: B and M count scored samples of the rollout batch of all ranks, because a group may have lost some;
        groups with one scored sample are in M. The threshold below which the paper samples again is a separate matter.

    Returns:
        Advantages [T].
    """
    group, live = reward_groups(exp, cfg)
    alpha = exp.scored.sum() / live.sum().clamp_min(1).to(exp.rewards.dtype)
    return from_outcome(exp, torch.where(live, alpha * (exp.rewards - group.mean), 0), cfg)


@advantage("maxrl", needs_group=True, needs_positive=True, reads=())
def maxrl(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """MaxRL: the centred reward over the group's mean, which maximises the log of the success rate.

    Paper: Tajwar et al. 2026, https://arxiv.org/abs/2602.02710
    Equation: A_i = (r_i - mean(r)) / mean(r)
    Degenerate: a group with one scored sample, no spread or a mean reward that is not above 0: 0.
    Deviation: none for rewards 0 and 1; rewards between them count as partial success. Negative rewards have no success
        rate: options that lead to them are refused, and groups that lose their mean to them are counted.

    Returns:
        Advantages [T].
    """
    group, live = reward_groups(exp, cfg)
    return from_outcome(exp, torch.where(live & (group.mean > 0), exp.rewards / group.mean - 1, 0), cfg)


@advantage("grpo_passk", needs_group=True, reads=("pass_k", "norm_group_std", "std_eps"))
def grpo_passk(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Pass@k: the advantage of a response is its contribution to the best of k responses to its prompt.

    Paper: Tang et al. 2025, https://arxiv.org/abs/2503.19595 (the mean over subsets: https://arxiv.org/abs/2505.15201)
    Equation: A_i = mean over S of max(0, r_i - max(S)), S every k - 1 other responses; k = n: best minus second best
    Degenerate: a group with one scored sample or no spread: 0.
    Deviation: k is --pass_k, at most the number of scored samples; divided by the group's standard deviation plus
        --std_eps only with --norm_group_std; continuous rewards are taken as they are.

    Returns:
        Advantages [T].
    """
    group, live = reward_groups(exp, cfg)
    outcome = torch.zeros_like(exp.rewards)
    for number in exp.group_ids[live].unique():
        members = (exp.group_ids == number) & live
        outcome[members] = added_to_best(exp.rewards[members], cfg.pass_k)
    return from_outcome(exp, outcome / group_scale(group, cfg), cfg)


def added_to_best(rewards: Tensor, k: int) -> Tensor:
    """[n]: ``mean(max(0, r_i - max(S)))`` over the subsets S of k - 1 other rewards; k = 0 or above n means n."""
    n = len(rewards)
    k = min(k or n, n)
    values, order = rewards.double().sort()
    # chance that the best of S is the j-th smallest reward, one that lies below r_i
    chance = torch.tensor([comb(j, k - 2) / comb(n - 1, k - 1) for j in range(n)], dtype=values.dtype)
    above = torch.tril(values[:, None] - values, diagonal=-1)  # r_i - r_j
    return torch.empty_like(rewards).index_copy_(0, order, (above @ chance).to(rewards.dtype))
