"""DPPO with the KL of "this token or any other": a token whose probability moved too far stops moving away.

Paper: Qi et al. 2026, https://arxiv.org/abs/2602.04879
Equation: loss_t = -M_t * rho_t * A_t, M_t = 0 where (rho_t - 1) * A_t > 0 and
    pi_old_t * log(pi_old_t / pi_t) + (1 - pi_old_t) * log((1 - pi_old_t) / (1 - pi_t)) > delta, else 1
    (eq. 11, 12, 14, binary approximation)
Degenerate: first update on a rollout: REINFORCE with the plain ratio.
Deviation: pi_old is the trainer's policy at the time of the rollout; the paper's is the engine's (--rollout_correction
    bypass). The log-ratio is limited to +-20 nats (--dppo_ratio_max: the truncated ratio of section 5.4). delta is
    --dppo_delta (the paper's 0.05).
"""
from torch import Tensor

from lightrft.algorithms.base import policy_loss, ratio_metrics
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.divergence import binary_kl
from lightrft.ops.surrogate import divergence_bounded, safe_ratio, truncated
from lightrft.types import Experience

DELTA = 0.05


@policy_loss("dppo_kl", skips_zero=True, reads=("dppo_delta", "dppo_ratio_max"))
def dppo_kl(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss [T], metrics); ``ratio`` is the one before ``dppo_ratio_max``."""
    ratio = safe_ratio(logprobs, exp.old_logprobs, exp.loss_mask)
    moved = binary_kl(exp.old_logprobs, logprobs.detach())
    delta = DELTA if cfg.dppo_delta is None else cfg.dppo_delta
    clipped = divergence_bounded(truncated(ratio, cfg.dppo_ratio_max), exp.advantages, moved, delta)
    return clipped.loss, ratio_metrics(ratio, clipped.low, clipped.high)
