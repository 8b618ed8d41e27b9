"""GPG: the centred reward, scaled up for the groups of the batch that teach nothing.

Paper: Chu et al. 2025, https://arxiv.org/abs/2504.02546
Equation: A_i = alpha * (r_i - mean(r)) / F_norm, F_norm = 1, alpha = B / (B - M), M of B samples in flat groups
Degenerate: a group with one scored sample or no spread: 0; every group has spread: dr_grpo.
Deviation: B and M count scored samples of the rollout batch of all ranks, because a group may have lost some; groups
    with one scored sample are in M. The threshold below which the paper samples again is a separate matter.
"""
import torch
from torch import Tensor

from lightrft.algorithms.base import advantage, from_outcome, reward_groups
from lightrft.config.schema import AlgorithmConfig
from lightrft.types import Experience


@advantage("gpg", needs_group=True, reads=())
def gpg(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Return advantages [T]; ``exp`` is the rollout batch of all ranks, so alpha is global."""
    group, live = reward_groups(exp, cfg)
    alpha = exp.scored.sum() / live.sum().clamp_min(1).to(exp.rewards.dtype)
    return from_outcome(exp, torch.where(live, alpha * (exp.rewards - group.mean), 0), cfg)
