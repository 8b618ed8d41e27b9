"""CISPO: REINFORCE weighted by a clipped, detached ratio, so that a clipped token keeps its gradient.

Paper: MiniMax 2025 (MiniMax-M1), https://arxiv.org/abs/2506.13585 (bound on the ratio itself, ScaleRL:
    https://arxiv.org/abs/2510.13786)
Equation: loss_t = -sg[clip(rho_t, 1 - low, 1 + high)] * A_t * log pi_t (eq. 4, 5)
Degenerate: first update on a rollout, or bounds out of reach and rho = 1: REINFORCE.
Deviation: both bounds are options. The paper sets no lower one (--eps_clip 1) and tunes the upper one; with
    --cispo_absolute it is high in place of 1 + high, without a lower one. clip_frac counts both signs of A. The
    log-ratio is limited to +-20 nats.
"""
from torch import Tensor

from lightrft.algorithms.base import clip_bounds, policy_loss, ratio_metrics
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.surrogate import safe_ratio
from lightrft.types import Experience


@policy_loss("cispo", skips_zero=True, reads=("eps_clip", "eps_clip_high", "cispo_absolute"))
def cispo(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss [T], metrics)."""
    ratio = safe_ratio(logprobs, exp.old_logprobs, exp.loss_mask).detach()
    low, high = clip_bounds(cfg)
    smallest, largest = (0.0, high) if cfg.cispo_absolute else (1 - low, 1 + high)
    loss = -ratio.clamp(smallest, largest) * exp.advantages * logprobs
    return loss, ratio_metrics(ratio, ratio < smallest, ratio > largest)
