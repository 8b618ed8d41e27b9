"""CPGD: the policy gradient of a clipped log-ratio, and a penalty on the drift from the rollout's policy.

Paper: Liu et al. 2025, https://arxiv.org/abs/2505.12504
Equation: loss_t = max(-l_t * A_t, -clip(l_t, log(1 - low), log(1 + high)) * A_t) + coef * KL(pi_old || pi),
    l_t = log(pi_t / pi_old_t)
Degenerate: first update on a rollout: the gradient is REINFORCE's and the drift is 0.
Deviation: the drift is the k3 estimate exp(l) - 1 - l, whose gradient (exp(l) - 1) * d log pi is unbiased; the paper
    also bounds that factor. The log-ratio is limited to +-20 nats.
"""
from math import inf, log

from torch import Tensor

from lightrft.algorithms.base import clip_bounds, policy_loss, ratio_metrics
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.divergence import kl_estimate
from lightrft.ops.surrogate import pessimistic, safe_log_ratio
from lightrft.types import Experience


@policy_loss("cpgd", reads=("eps_clip", "eps_clip_high", "policy_drift_coef"))
def cpgd(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss [T], metrics)."""
    log_ratio = safe_log_ratio(logprobs, exp.old_logprobs, exp.loss_mask)
    low, high = clip_bounds(cfg)
    clipped = pessimistic(log_ratio, exp.advantages, log(1 - low) if low < 1 else -inf, log(1 + high))
    drift = kl_estimate(exp.old_logprobs, logprobs, "k3")
    metrics = ratio_metrics(log_ratio.exp(), clipped.low, clipped.high)
    return clipped.loss + cfg.policy_drift_coef * drift, metrics
