"""TIS: the weight of each token, truncated.

Paper: Yao et al. 2025, https://openreview.net/forum?id=8MHqvb4lK9; truncation: Ionides 2008,
    https://doi.org/10.1198/106186008X320456
Equation: w_t = clip(pi_old_t / pi_rollout_t, low, high)
Degenerate: engine and trainer agree: 1.
Deviation: there is a lower bound too; 0, the default, is the paper's one-sided truncation (high 2).
"""
from torch import Tensor

from lightrft.algorithms.base import correction, correction_bounds
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.surrogate import safe_ratio
from lightrft.types import Experience


@correction("tis", low=0.0, high=2.0)
def tis(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """[T]."""
    ratio = safe_ratio(exp.old_logprobs, exp.rollout_logprobs, exp.loss_mask)
    return ratio.clamp(*correction_bounds(cfg))
