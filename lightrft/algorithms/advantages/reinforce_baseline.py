"""REINFORCE++-baseline: reward minus the group's mean, then whitened over the rollout batch.

Paper: Hu et al. 2025, https://arxiv.org/abs/2501.03262
Equation: A_t = (R_t - mean(R)) / sqrt(var(R) + 1e-8), R_t the discounted sum with r_i - mean_group(r) as the outcome
Degenerate: a group with one scored sample or no spread has outcome 0 and stays out of the batch statistics.
Deviation: such groups are not shifted by the batch mean, which would reward or punish them for the others
    (--whiten_flat_groups: they are, as in other trainers); the variance is the population's (--whiten_unbiased:
    Bessel's correction).
"""
import torch
from torch import Tensor

from lightrft.algorithms.base import action_mask, advantage, from_outcome, reward_groups
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.segment import masked_mean, masked_var
from lightrft.types import Experience


@advantage("reinforce_baseline", needs_group=True, whitens=True, reads=("whiten_flat_groups", ))
def reinforce_baseline(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Return advantages [T]."""
    group, live = reward_groups(exp, cfg)
    returns = from_outcome(exp, torch.where(live, exp.rewards - group.mean, 0), cfg)
    part = exp.scored if cfg.whiten_flat_groups else live
    kept = action_mask(exp) & exp.per_token(part)
    shifted = returns - torch.where(kept, masked_mean(returns, kept, exp.spread), 0)
    variance = masked_var(returns, kept, cfg.whiten_unbiased, exp.spread)
    return shifted * (variance + 1e-8).rsqrt() if exp.spread.total(kept.sum()) else returns
