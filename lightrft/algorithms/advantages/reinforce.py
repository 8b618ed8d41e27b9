"""The plain discounted return, no baseline and no normalisation.

Paper: Williams 1992, https://doi.org/10.1007/BF00992696
Equation: A_t = sum_l gamma^l * r_{t+l}
Degenerate: rewards that never differ still push every token; add a baseline or --advantages_norm.
Deviation: none.
"""
from torch import Tensor

from lightrft.algorithms.base import action_mask, advantage
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.returns import discounted_returns
from lightrft.types import Experience


@advantage("reinforce", reads=())
def reinforce(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Return advantages [T]."""
    return discounted_returns(exp.token_rewards, action_mask(exp), exp.cu_seqlens, cfg.gamma)
