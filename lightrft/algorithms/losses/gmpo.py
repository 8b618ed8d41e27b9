"""GMPO: the geometric mean over a sequence of token ratios that were clipped one by one, in log space.

Paper: Zhao et al. 2025, https://arxiv.org/abs/2507.20673
Equation: loss_t = -A_t * exp(mean_t c_t), c_t the log-ratio l_t, at most high where A_t > 0 and at least -low where
    A_t < 0
Degenerate: one action token: PPO with the bounds exp(-low), exp(high). First update on a rollout: the gradient of a
    sequence is that of the mean of log pi.
Deviation: advantages may differ within a sequence; the log-ratio is limited to +-20 nats. --eps_clip and
    --eps_clip_high are in nats: the paper's bounds exp(-0.4), exp(0.4) are --eps_clip 0.4, its mean --loss_agg_mode
    seq-mean-token-mean.
"""
from torch import Tensor

from lightrft.algorithms.base import clip_bounds, policy_loss, ratio_metrics
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.surrogate import pessimistic, safe_log_ratio, sequence_ratio
from lightrft.types import Experience


@policy_loss("gmpo", skips_zero=True, reads=("eps_clip", "eps_clip_high"))
def gmpo(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss [T], metrics); ``ratio`` is the sequence's, after clipping."""
    log_ratio, sign = safe_log_ratio(logprobs, exp.old_logprobs, exp.loss_mask), exp.advantages.sign()
    low, high = clip_bounds(cfg)
    clipped = pessimistic(log_ratio, sign, -low, high)  # its loss is -sign * c
    ratio = sequence_ratio(-sign * clipped.loss + (1 - sign.abs()) * log_ratio, exp.loss_mask, exp.cu_seqlens)
    return -ratio * exp.advantages, ratio_metrics(ratio, clipped.low, clipped.high)
