"""Sequence-level TIS: the probability ratio of the whole response, truncated.

Paper: Liu, Li et al. 2025, "When Speed Kills Stability", https://richardli.xyz/rl-collapse; truncation: Ionides 2008,
    https://doi.org/10.1198/106186008X320456
Equation: w_t = clip(prod_s pi_old_s / pi_rollout_s, low, high), s over the action tokens of the response
Degenerate: one action token: tis.
Deviation: there is a lower bound too; 0, the default, is one-sided (high 2). The log of the product is limited to
    +-20 nats.
"""
from torch import Tensor

from lightrft.algorithms.base import correction, correction_bounds
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.importance import sequence_product
from lightrft.types import Experience


@correction("seq_tis", low=0.0, high=2.0)
def seq_tis(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """[T], one value per sequence."""
    ratio = sequence_product(exp.old_logprobs, exp.rollout_logprobs, exp.loss_mask, exp.cu_seqlens)
    return ratio.clamp(*correction_bounds(cfg))
