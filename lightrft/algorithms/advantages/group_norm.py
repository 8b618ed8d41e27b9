"""GRPO: the reward, standardised within its group.

Paper: Shao et al. 2024 (DeepSeekMath), https://arxiv.org/abs/2402.03300
Equation: A_i = (r_i - mean(r)) / (std(r) + eps) (section 4.1.2)
Degenerate: a group with one scored sample or no spread: 0.
Deviation: the standard deviation is unbiased, eps is --std_eps; KL penalties are added per token, after the division.
"""
import torch
from torch import Tensor

from lightrft.algorithms.base import advantage, from_outcome, reward_groups
from lightrft.config.schema import AlgorithmConfig
from lightrft.types import Experience


@advantage("group_norm", "grpo", needs_group=True, reads=("std_eps", ))
def group_norm(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Return advantages [T]."""
    group, live = reward_groups(exp, cfg)
    return from_outcome(exp, torch.where(live, (exp.rewards - group.mean) / (group.std + cfg.std_eps), 0), cfg)
