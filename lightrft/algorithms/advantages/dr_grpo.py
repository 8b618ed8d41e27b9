"""Dr.GRPO: the reward minus its group's mean, without the division that favours easy and hard prompts.

Paper: Liu et al. 2025, https://arxiv.org/abs/2503.20783
Equation: A_i = r_i - mean(r)
Degenerate: a group with one scored sample or no spread: 0.
Deviation: the paper's constant denominator is a separate option, --loss_agg_mode seq-mean-token-sum-norm.
"""
import torch
from torch import Tensor

from lightrft.algorithms.base import advantage, from_outcome, reward_groups
from lightrft.config.schema import AlgorithmConfig
from lightrft.types import Experience


@advantage("dr_grpo", needs_group=True, reads=())
def dr_grpo(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Return advantages [T]."""
    group, live = reward_groups(exp, cfg)
    return from_outcome(exp, torch.where(live, exp.rewards - group.mean, 0), cfg)
