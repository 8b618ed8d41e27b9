"""OPO: the reward minus the baseline of least gradient variance, a mean weighted by response length.

Paper: Hao et al. 2025, https://arxiv.org/abs/2505.23585
Equation: A_i = r_i - sum_j l_j * r_j / sum_j l_j, l_j the length of response j in tokens
Degenerate: a group with one scored sample or no spread: 0; equal lengths: dr_grpo.
Deviation: l counts the tokens that are in the loss; a sample without any has no gradient and no weight.
"""
import torch
from torch import Tensor

from lightrft.algorithms.base import advantage, from_outcome, reward_groups
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.segment import group_stats, segment_sum
from lightrft.types import Experience


@advantage("opo", needs_group=True, reads=())
def opo(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Return advantages [T]."""
    _, live = reward_groups(exp, cfg)
    lengths = exp.spread.gather(segment_sum(exp.loss_mask, exp.cu_seqlens)).to(exp.rewards.dtype)
    weighted = group_stats(lengths * exp.rewards, exp.group_ids, exp.scored).mean
    length = group_stats(lengths, exp.group_ids, exp.scored).mean
    baseline = weighted / torch.where(length > 0, length, 1)
    return from_outcome(exp, torch.where(live, exp.rewards - baseline, 0), cfg)
