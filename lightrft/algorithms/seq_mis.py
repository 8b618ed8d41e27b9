"""Sequence-level MIS: the probability ratio of the whole response; responses outside the bounds teach nothing.

Paper: Liu, Li et al. 2025, "When Speed Kills Stability", https://richardli.xyz/rl-collapse, continued in
    https://arxiv.org/abs/2512.23075
Equation: w_t = prod_s pi_old_s / pi_rollout_s where low <= w_t <= high, else 0, s over the action tokens
Degenerate: one action token: mis.
Deviation: there is a lower bound too; 0, the default, is one-sided (high 2). The log of the product is limited to
    +-20 nats. Masked sequences stay in the denominators.
"""
from torch import Tensor

from lightrft.algorithms.base import correction, correction_bounds
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.importance import keep_inside, sequence_product
from lightrft.types import Experience


@correction("seq_mis", low=0.0, high=2.0, masks=True)
def seq_mis(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """[T], one value per sequence."""
    ratio = sequence_product(exp.old_logprobs, exp.rollout_logprobs, exp.loss_mask, exp.cu_seqlens)
    return keep_inside(ratio, *correction_bounds(cfg))
