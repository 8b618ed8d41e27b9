"""MIS: the weight of each token, and no gradient from tokens whose weight is too large.

Paper: Liu, Li et al. 2025, "When Speed Kills Stability", https://richardli.xyz/rl-collapse, continued in
    https://arxiv.org/abs/2512.23075
Equation: w_t = pi_old_t / pi_rollout_t where low <= w_t <= high, else 0
Degenerate: engine and trainer agree: 1.
Deviation: there is a lower bound too; 0, the default, is the one-sided mask (high 2). Masked tokens stay in the
    denominators.
"""
from torch import Tensor

from lightrft.algorithms.base import correction, correction_bounds
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.importance import keep_inside
from lightrft.ops.surrogate import safe_ratio
from lightrft.types import Experience


@correction("mis", low=0.0, high=2.0, masks=True)
def mis(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """[T]."""
    ratio = safe_ratio(exp.old_logprobs, exp.rollout_logprobs, exp.loss_mask)
    return keep_inside(ratio, *correction_bounds(cfg))
