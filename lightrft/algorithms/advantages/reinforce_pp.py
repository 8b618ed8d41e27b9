"""REINFORCE++: the discounted return, whitened over all action tokens of the rollout batch.

Paper: Hu et al. 2025, https://arxiv.org/abs/2501.03262
Equation: A_t = (R_t - mean(R)) / sqrt(var(R) + 1e-8), R_t = sum_l gamma^l * r_{t+l}
Degenerate: all returns equal: 0.
Deviation: the variance is the population's, over the tokens of every rank (--whiten_unbiased: Bessel's correction).
"""
from torch import Tensor

from lightrft.algorithms.base import action_mask, advantage
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.returns import discounted_returns
from lightrft.ops.segment import masked_whiten
from lightrft.types import Experience


@advantage("reinforce++", whitens=True, reads=())
def reinforce_pp(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Return advantages [T]."""
    mask = action_mask(exp)
    returns = discounted_returns(exp.token_rewards, mask, exp.cu_seqlens, cfg.gamma)
    return masked_whiten(returns, mask, unbiased=cfg.whiten_unbiased, spread=exp.spread)
