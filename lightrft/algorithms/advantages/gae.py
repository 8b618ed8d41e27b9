"""Generalised advantage estimation with a learned critic.

Paper: Schulman et al. 2016, https://arxiv.org/abs/1506.02438
Equation: A_t = sum_l (gamma * lambda)^l * (r_{t+l} + gamma * V_{t+l+1} - V_{t+l}) (eq. 16)
Degenerate: one action token: A = r - V.
Deviation: time counts action tokens only; the tokens of an environment between two turns are skipped.
"""
from torch import Tensor

from lightrft.algorithms.base import action_mask, advantage
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.returns import gae as estimate
from lightrft.types import Experience


@advantage("gae", needs_critic=True, reads=("lambd", ))
def gae(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Return advantages [T]. The caller computes the critic's target, ``advantages + values``, before any whitening."""
    return estimate(exp.token_rewards, exp.values, action_mask(exp), exp.cu_seqlens, cfg.gamma, cfg.lambd)[0]
