"""CPGD: the outcome minus the mean outcome of the prompt under the policy of the rollout.

Paper: Liu et al. 2025, https://arxiv.org/abs/2505.12504
Equation: A_i = r_i - mean(r), the group's mean for the expectation over the old policy
Degenerate: a group with one scored sample or no spread: 0.
Deviation: the prompts weigh the same; --norm_group_std divides by the standard deviation of the group plus --std_eps.
    The clipped log-ratio and the policy drift are in --policy_loss cpgd.
"""
import torch
from torch import Tensor

from lightrft.algorithms.base import advantage, from_outcome, group_scale, reward_groups
from lightrft.config.schema import AlgorithmConfig
from lightrft.types import Experience


@advantage("cpgd", needs_group=True, reads=("norm_group_std", "std_eps"))
def cpgd(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Return advantages [T]."""
    group, live = reward_groups(exp, cfg)
    return from_outcome(exp, torch.where(live, (exp.rewards - group.mean) / group_scale(group, cfg), 0), cfg)
