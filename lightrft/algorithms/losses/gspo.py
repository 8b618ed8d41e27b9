"""GSPO: one ratio per sequence, the geometric mean of its tokens' ratios, is clipped.

Paper: Zheng et al. 2025, https://arxiv.org/abs/2507.18071
Equation: loss_t = max(-s_i * A_t, -clip(s_i, 1 - low, 1 + high) * A_t),
    s_i = exp(mean_t log(pi_t / pi_old_t)) (eq. 5, 7)
Degenerate: one action token: PPO. First update on a rollout: the gradient of a sequence is that of the mean of log pi.
Deviation: advantages may differ within a sequence (gspo_token then follows each); s_i spans all turns of a sample; the
    log-ratio of a token is limited to +-20 nats. The paper's bounds are far tighter than PPO's, --eps_clip 3e-4
    --eps_clip_high 4e-4, its mean --loss_agg_mode seq-mean-token-mean.
"""
from torch import Tensor

from lightrft.algorithms.base import clip_bounds, policy_loss, ratio_metrics
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.surrogate import clipped_surrogate, safe_log_ratio, sequence_ratio
from lightrft.types import Experience


@policy_loss("gspo", skips_zero=True, reads=("eps_clip", "eps_clip_high"))
def gspo(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss [T], metrics); ``ratio`` is the sequence's."""
    log_ratio = safe_log_ratio(logprobs, exp.old_logprobs, exp.loss_mask)
    ratio = sequence_ratio(log_ratio, exp.loss_mask, exp.cu_seqlens)
    clipped = clipped_surrogate(ratio, exp.advantages, *clip_bounds(cfg))
    return clipped.loss, ratio_metrics(ratio, clipped.low, clipped.high)
