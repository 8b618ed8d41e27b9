"""Advantages from the rewards that follow a token: against a critic or a greedy response, as they are, or whitened."""
import torch
from torch import Tensor

from lightrft.algorithms.base import action_mask, advantage, from_outcome, live_groups, reward_groups
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.returns import discounted_returns, gae as estimate
from lightrft.ops.segment import HERE, masked_mean, masked_var, masked_whiten
from lightrft.types import Experience


@advantage("gae", needs_critic=True, takes_steps=True, reads=("lambd", ))
def gae(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Generalised advantage estimation with a learned critic.

    Paper: Schulman et al. 2016, https://arxiv.org/abs/1506.02438
    Equation: A_t = sum_l (gamma * lambda)^l * (r_{t+l} + gamma * V_{t+l+1} - V_{t+l}) (eq. 16)
    Degenerate: one action token: A = r - V.
    Deviation: time counts action tokens only; the tokens of an environment between two turns are skipped.

    Returns:
        Advantages [T]. The caller computes the critic's target, ``advantages + values``, before any whitening.
    """
    return estimate(exp.token_rewards, exp.values, action_mask(exp), exp.cu_seqlens, cfg.gamma, cfg.lambd)[0]


@advantage("reinforce", takes_steps=True, reads=())
def reinforce(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """The plain discounted return, no baseline and no normalisation.

    Paper: Williams 1992, https://doi.org/10.1007/BF00992696
    Equation: A_t = sum_l gamma^l * r_{t+l}
    Degenerate: rewards that never differ still push every token; add a baseline or --advantages_norm.
    Deviation: none.

    Returns:
        Advantages [T].
    """
    return discounted_returns(exp.token_rewards, action_mask(exp), exp.cu_seqlens, cfg.gamma)


@advantage("remax", needs_greedy=True, reads=())
def remax(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """ReMax: the reward of the prompt's greedy response is the baseline.

    Paper: Li et al. 2023, https://arxiv.org/abs/2310.10505
    Equation: A_i = r_i - r(greedy response to the same prompt) (algorithm 1)
    Degenerate: a greedy response without a reward: 0 for its whole group, counted in reward/greedy_unscored.
    Deviation: the baseline goes through the same length penalty, running scale and clip as the rewards; the running
        statistics see sampled responses only. The KL of the greedy response is not in the baseline.

    Returns:
        Advantages [T].
    """
    known = exp.scored & ~exp.baseline_rewards.isnan()
    return from_outcome(exp, torch.where(known, exp.rewards - exp.baseline_rewards, 0), cfg)


@advantage("reinforce++", whitens=True, takes_steps=True, reads=())
def reinforce_pp(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """REINFORCE++: the discounted return, whitened over all action tokens of the rollout batch.

    Paper: Hu et al. 2025, https://arxiv.org/abs/2501.03262
    Equation: A_t = (R_t - mean(R)) / sqrt(var(R) + 1e-8), R_t = sum_l gamma^l * r_{t+l}
    Degenerate: all returns equal: 0.
    Deviation: the variance is the population's, over the tokens of every rank (--whiten_unbiased: Bessel's correction).

    Returns:
        Advantages [T].
    """
    mask = action_mask(exp)
    returns = discounted_returns(exp.token_rewards, mask, exp.cu_seqlens, cfg.gamma)
    return masked_whiten(returns, mask, unbiased=cfg.whiten_unbiased, ranks=exp.ranks)


@advantage("reinforce_baseline", needs_group=True, whitens=True, reads=("whiten_flat_groups", ))
def reinforce_baseline(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """REINFORCE++-baseline: reward minus the group's mean, then whitened over the rollout batch.

    Paper: Hu et al. 2025, https://arxiv.org/abs/2501.03262
    Equation: A_t = (R_t - mean(R)) / sqrt(var(R) + 1e-8), R_t the discounted sum with r_i - mean_group(r) as the
        outcome
    Degenerate: a group with one scored sample or no spread has outcome 0 and stays out of the batch statistics.
    Deviation: such groups are not shifted by the batch mean, which would reward or punish them for the others
        (--whiten_flat_groups: they are, as in other trainers); the variance is the population's (--whiten_unbiased:
        Bessel's correction).

    Returns:
        Advantages [T].
    """
    group, live = reward_groups(exp, cfg)
    returns = from_outcome(exp, torch.where(live, exp.rewards - group.mean, 0), cfg)
    part = exp.scored if cfg.whiten_flat_groups else live
    kept = action_mask(exp) & exp.per_token(part)
    shifted = returns - torch.where(kept, masked_mean(returns, kept, exp.ranks), 0)
    variance = masked_var(returns, kept, cfg.whiten_unbiased, exp.ranks)
    return shifted * (variance + 1e-8).rsqrt() if exp.ranks.total(kept.sum()) else returns


@advantage("gdpo", needs_group=True, whitens=True, needs_parts=True,
           reads=("std_eps", "whiten_flat_groups", "gdpo_whiten_tokens"))
def gdpo(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """GDPO: every reward part is standardised within its group, then the weighted sum over the rollout batch.

    Paper: Liu et al. 2026, https://arxiv.org/abs/2601.05242
    Equation: S_i = sum_k w_k * (r_ik - mean(r_k)) / (std(r_k) + eps), A_i = (S_i - mean(S)) / sqrt(var(S) + 1e-8)
    Degenerate: a part without spread in a group adds 0; one part: group_norm, scaled over the batch.
    Deviation: eps is --std_eps, the group's deviation is unbiased and the batch's variance the population's, over
        scored samples (--whiten_unbiased: Bessel's correction). With several data sources each sample has the parts of
        its own, and the batch is one for all. The overlong penalty is one more part, of weight 1. --gdpo_whiten_tokens
        and --whiten_flat_groups whiten as verl does.

    Returns:
        Advantages [T].
    """
    total, taught = torch.zeros_like(exp.rewards), torch.zeros_like(exp.scored)
    for values, weights in zip(exp.reward_parts.unbind(1), exp.part_weights.unbind(1)):
        group, live = live_groups(values, exp.scored & ~values.isnan(), exp, cfg)
        total = total + torch.where(live, weights * (values - group.mean) / (group.std + cfg.std_eps), 0)
        taught = taught | live
    counted, ranks = (total, exp.scored), HERE
    if cfg.gdpo_whiten_tokens:
        counted, ranks = (exp.per_token(total), action_mask(exp)), exp.ranks
    variance = masked_var(*counted, cfg.whiten_unbiased, ranks)
    white = (total - masked_mean(*counted, ranks)) * (variance + 1e-8).rsqrt()
    return from_outcome(exp, torch.where(exp.scored if cfg.whiten_flat_groups else taught, white, 0), cfg)
