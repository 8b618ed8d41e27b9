"""Geometric TIS: the geometric mean of a response's token weights, truncated; it does not grow with the length.

Paper: the length-normalised ratio of GSPO, Zheng et al. 2025, https://arxiv.org/abs/2507.18071; truncation: Ionides
    2008, https://doi.org/10.1198/106186008X320456
Equation: w_t = clip((prod_s pi_old_s / pi_rollout_s) ** (1 / n), low, high), s over the n action tokens
Degenerate: one action token: tis.
Deviation: GSPO's ratio (eq. 7) is of the policy now to the old one, this of the old one to the engine (high 2).
"""
from torch import Tensor

from lightrft.algorithms.base import correction, correction_bounds
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.surrogate import safe_log_ratio, sequence_ratio
from lightrft.types import Experience


@correction("geo_tis", low=0.0, high=2.0)
def geo_tis(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """[T], one value per sequence."""
    log_ratio = safe_log_ratio(exp.old_logprobs, exp.rollout_logprobs, exp.loss_mask)
    ratio = sequence_ratio(log_ratio, exp.loss_mask, exp.cu_seqlens)
    return ratio.clamp(*correction_bounds(cfg))
