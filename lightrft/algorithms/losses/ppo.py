"""PPO's clipped surrogate, with bounds that may differ and an optional dual clip.

Paper: Schulman et al. 2017, https://arxiv.org/abs/1707.06347 (Clip-Higher: https://arxiv.org/abs/2503.14476; dual clip:
    https://arxiv.org/abs/1912.09729)
Equation: loss_t = max(-rho_t * A_t, -clip(rho_t, 1 - low, 1 + high) * A_t), rho_t = pi_t / pi_old_t (eq. 7);
    where A_t < 0 at most -dual * A_t
Degenerate: first update on a rollout: rho is exactly 1 and the gradient is REINFORCE's.
Deviation: the log-ratio is limited to +-20 nats.
"""
from torch import Tensor

from lightrft.algorithms.base import clip_bounds, policy_loss, ratio_metrics
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.surrogate import clipped_surrogate, safe_ratio
from lightrft.types import Experience


@policy_loss("ppo", skips_zero=True, reads=("eps_clip", "eps_clip_high", "dual_clip"))
def ppo(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss [T], metrics)."""
    ratio = safe_ratio(logprobs, exp.old_logprobs, exp.loss_mask)
    clipped = clipped_surrogate(ratio, exp.advantages, *clip_bounds(cfg), cfg.dual_clip)
    metrics = ratio_metrics(ratio, clipped.low, clipped.high)
    if cfg.dual_clip is not None:
        metrics["clip_frac_dual"] = clipped.dual.float()
    return clipped.loss, metrics
