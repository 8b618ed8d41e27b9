"""GSPO-token: GSPO's sequence ratio in value, each token's own log-prob in the gradient.

Paper: Zheng et al. 2025, https://arxiv.org/abs/2507.18071
Equation: loss_t = max(-s_t * A_t, -clip(s_t, 1 - low, 1 + high) * A_t), s_t = sg[s_i] * pi_t / sg[pi_t] (eq. 13, 14)
Degenerate: the value is gspo's; with one advantage per sequence the gradient of a sequence is gspo's too. One action
    token: PPO.
Deviation: the log-ratio of a token is limited to +-20 nats; for bounds and aggregation see gspo.
"""
from torch import Tensor

from lightrft.algorithms.base import clip_bounds, policy_loss, ratio_metrics
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.surrogate import clipped_surrogate, safe_log_ratio, sequence_ratio
from lightrft.types import Experience


@policy_loss("gspo_token", skips_zero=True, reads=("eps_clip", "eps_clip_high"))
def gspo_token(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss [T], metrics); ``ratio`` is the sequence's."""
    log_ratio = safe_log_ratio(logprobs, exp.old_logprobs, exp.loss_mask)
    ratio = sequence_ratio(log_ratio.detach(), exp.loss_mask, exp.cu_seqlens)
    ratio = ratio * (log_ratio - log_ratio.detach()).exp()
    clipped = clipped_surrogate(ratio, exp.advantages, *clip_bounds(cfg))
    return clipped.loss, ratio_metrics(ratio, clipped.low, clipped.high)
