"""IcePop: the weight of each token, and no gradient from tokens on which engine and trainer disagree either way.

Paper: Ling Team 2025 (Ring-1T), https://arxiv.org/abs/2510.18855
Equation: w_t = M(pi_old_t / pi_rollout_t), M(k) = k where low <= k <= high, else 0
Degenerate: engine and trainer agree: 1; low = 0: mis.
Deviation: none (low 0.5, high 5). Masked tokens stay in the denominators.
"""
from torch import Tensor

from lightrft.algorithms.base import correction, correction_bounds
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.importance import keep_inside
from lightrft.ops.surrogate import safe_ratio
from lightrft.types import Experience


@correction("icepop", low=0.5, high=5.0, masks=True)
def icepop(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """[T]."""
    ratio = safe_ratio(exp.old_logprobs, exp.rollout_logprobs, exp.loss_mask)
    return keep_inside(ratio, *correction_bounds(cfg))
