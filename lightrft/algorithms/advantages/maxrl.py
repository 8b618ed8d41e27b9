"""MaxRL: the centred reward over the group's mean, which climbs the likelihood of success, not its rate.

Paper: Tajwar et al. 2026, https://arxiv.org/abs/2602.02710
Equation: A_i = (r_i - mean(r)) / mean(r)
Degenerate: a group with one scored sample, no spread or a mean reward that is not above 0: 0.
Deviation: none for rewards 0 and 1; rewards between them count as partial success. Negative rewards have no success
    rate: options that lead to them are refused, and groups that lose their mean to them are counted.
"""
import torch
from torch import Tensor

from lightrft.algorithms.base import advantage, from_outcome, reward_groups
from lightrft.config.schema import AlgorithmConfig
from lightrft.types import Experience


@advantage("maxrl", needs_group=True, needs_positive=True, reads=())
def maxrl(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Return advantages [T]."""
    group, live = reward_groups(exp, cfg)
    return from_outcome(exp, torch.where(live & (group.mean > 0), exp.rewards / group.mean - 1, 0), cfg)
