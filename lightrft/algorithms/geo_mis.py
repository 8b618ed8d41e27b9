"""Geometric MIS: the geometric mean of a response's token weights; responses outside the bounds teach nothing.

Paper: Liu, Li et al. 2025, "When Speed Kills Stability", part 3, https://richardli.xyz/rl-collapse-3, continued in
    https://arxiv.org/abs/2512.23075
Equation: w_t = (prod_s pi_old_s / pi_rollout_s) ** (1 / n) where low <= w_t <= high, else 0, s over the n action tokens
Degenerate: one action token: mis with the same bounds.
Deviation: the mean itself is the weight, and the log-ratio of a token is limited to +-20 nats. The defaults 0.999 and
    1.001 suit engines without quantisation. Masked sequences stay in the denominators.
"""
from torch import Tensor

from lightrft.algorithms.base import correction, correction_bounds
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.importance import keep_inside
from lightrft.ops.surrogate import safe_log_ratio, sequence_ratio
from lightrft.types import Experience


@correction("geo_mis", low=0.999, high=1.001, masks=True)
def geo_mis(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """[T], one value per sequence."""
    log_ratio = safe_log_ratio(exp.old_logprobs, exp.rollout_logprobs, exp.loss_mask)
    ratio = sequence_ratio(log_ratio, exp.loss_mask, exp.cu_seqlens)
    return keep_inside(ratio, *correction_bounds(cfg))
