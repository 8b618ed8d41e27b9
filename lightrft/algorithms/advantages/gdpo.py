"""GDPO: every reward part is standardised within its group, then the weighted sum over the rollout batch.

Paper: Liu et al. 2026, https://arxiv.org/abs/2601.05242
Equation: S_i = sum_k w_k * (r_ik - mean(r_k)) / (std(r_k) + eps), A_i = (S_i - mean(S)) / sqrt(var(S) + 1e-8)
Degenerate: a part without spread in a group adds 0; one part: group_norm, scaled over the batch.
Deviation: eps is --std_eps, the group's deviation is unbiased and the batch's variance the population's, over scored
    samples (--whiten_unbiased: Bessel's correction). With several data sources each sample has the parts of its own,
    and the batch is one for all. The overlong penalty is one more part, of weight 1. --gdpo_whiten_tokens and
    --whiten_flat_groups whiten as verl does.
"""
import torch
from torch import Tensor

from lightrft.algorithms.base import action_mask, advantage, from_outcome, live_groups
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.segment import HERE, masked_mean, masked_var
from lightrft.types import Experience


@advantage("gdpo", needs_group=True, whitens=True, needs_parts=True,
           reads=("std_eps", "whiten_flat_groups", "gdpo_whiten_tokens"))
def gdpo(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Return advantages [T]."""
    total, taught = torch.zeros_like(exp.rewards), torch.zeros_like(exp.scored)
    for values, weights in zip(exp.reward_parts.unbind(1), exp.part_weights.unbind(1)):
        group, live = live_groups(values, exp.scored & ~values.isnan(), exp, cfg)
        total = total + torch.where(live, weights * (values - group.mean) / (group.std + cfg.std_eps), 0)
        taught = taught | live
    counted, spread = (total, exp.scored), HERE
    if cfg.gdpo_whiten_tokens:
        counted, spread = (exp.per_token(total), action_mask(exp)), exp.spread
    variance = masked_var(*counted, cfg.whiten_unbiased, spread)
    white = (total - masked_mean(*counted, spread)) * (variance + 1e-8).rsqrt()
    return from_outcome(exp, torch.where(exp.scored if cfg.whiten_flat_groups else taught, white, 0), cfg)
