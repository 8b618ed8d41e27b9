"""RLOO: the other samples of the group are the baseline.

Paper: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740
Equation: A_i = r_i - sum_{j != i} r_j / (n - 1) = n / (n - 1) * (r_i - mean(r))
Degenerate: a group with one scored sample or no spread: 0.
Deviation: n counts the scored samples; KL penalties are added per token, after the baseline.
"""
import torch
from torch import Tensor

from lightrft.algorithms.base import advantage, from_outcome, reward_groups
from lightrft.config.schema import AlgorithmConfig
from lightrft.types import Experience


@advantage("rloo", needs_group=True, reads=())
def rloo(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Return advantages [T]."""
    group, live = reward_groups(exp, cfg)
    scale = group.size / (group.size - 1).clamp_min(1)
    return from_outcome(exp, torch.where(live, scale * (exp.rewards - group.mean), 0), cfg)
