"""Policy losses with one ratio per sequence."""
from torch import Tensor

from lightrft.algorithms.base import clip_bounds, policy_loss, ratio_metrics
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.surrogate import clipped_surrogate, pessimistic, safe_log_ratio, sequence_ratio
from lightrft.types import Experience


@policy_loss("gspo", skips_zero=True, reads=("eps_clip", "eps_clip_high"))
def gspo(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO: one ratio per sequence, the geometric mean of its tokens' ratios, is clipped.

    Paper: Zheng et al. 2025, https://arxiv.org/abs/2507.18071
    Equation: loss_t = max(-s_i * A_t, -clip(s_i, 1 - low, 1 + high) * A_t), s_i = exp(mean_t log(pi_t / pi_old_t)) (eq.
        5, 7)
    Degenerate: one action token: PPO. First update on a rollout: the gradient of a sequence is that of the mean of log
        pi.
    Deviation: advantages may differ within a sequence (gspo_token then follows each); s_i spans all turns of a sample;
        the log-ratio of a token is limited to +-20 nats. The paper's bounds are far tighter than PPO's, --eps_clip 3e-4
        --eps_clip_high 4e-4, its mean --loss_agg_mode seq-mean-token-mean.

    Returns:
        (loss [T], metrics); ``ratio`` is the sequence's.
    """
    log_ratio = safe_log_ratio(logprobs, exp.old_logprobs, exp.loss_mask)
    ratio = sequence_ratio(log_ratio, exp.loss_mask, exp.cu_seqlens)
    clipped = clipped_surrogate(ratio, exp.advantages, *clip_bounds(cfg))
    return clipped.loss, ratio_metrics(ratio, clipped.low, clipped.high)


@policy_loss("gspo_token", skips_zero=True, reads=("eps_clip", "eps_clip_high"))
def gspo_token(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO-token: GSPO's sequence ratio in value, each token's own log-prob in the gradient.

    Paper: Zheng et al. 2025, https://arxiv.org/abs/2507.18071
    Equation: loss_t = max(-s_t * A_t, -clip(s_t, 1 - low, 1 + high) * A_t), s_t = sg[s_i] * pi_t / sg[pi_t] (eq. 13,
        14)
    Degenerate: the value is gspo's; with one advantage per sequence the gradient of a sequence is gspo's too. One
        action token: PPO.
    Deviation: the log-ratio of a token is limited to +-20 nats; for bounds and aggregation see gspo.

    Returns:
        (loss [T], metrics); ``ratio`` is the sequence's.
    """
    log_ratio = safe_log_ratio(logprobs, exp.old_logprobs, exp.loss_mask)
    ratio = sequence_ratio(log_ratio.detach(), exp.loss_mask, exp.cu_seqlens)
    ratio = ratio * (log_ratio - log_ratio.detach()).exp()
    clipped = clipped_surrogate(ratio, exp.advantages, *clip_bounds(cfg))
    return clipped.loss, ratio_metrics(ratio, clipped.low, clipped.high)


@policy_loss("gmpo", skips_zero=True, reads=("eps_clip", "eps_clip_high"))
def gmpo(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """GMPO: the geometric mean over a sequence of token ratios that were clipped one by one, in log space.

    Paper: Zhao et al. 2025, https://arxiv.org/abs/2507.20673
    Equation: loss_t = -A_t * exp(mean_t c_t), c_t the log-ratio l_t, at most high where A_t > 0 and at least -low where
        A_t < 0
    Degenerate: one action token: PPO with the bounds exp(-low), exp(high). First update on a rollout: the gradient of a
        sequence is that of the mean of log pi.
    Deviation: advantages may differ within a sequence; the log-ratio is limited to +-20 nats. --eps_clip and
        --eps_clip_high are in nats: the paper's bounds exp(-0.4), exp(0.4) are --eps_clip 0.4, its mean --loss_agg_mode
        seq-mean-token-mean.

    Returns:
        (loss [T], metrics); ``ratio`` is the sequence's, after clipping.
    """
    log_ratio, sign = safe_log_ratio(logprobs, exp.old_logprobs, exp.loss_mask), exp.advantages.sign()
    low, high = clip_bounds(cfg)
    clipped = pessimistic(log_ratio, sign, -low, high)  # its loss is -sign * c
    ratio = sequence_ratio(-sign * clipped.loss + (1 - sign.abs()) * log_ratio, exp.loss_mask, exp.cu_seqlens)
    return -ratio * exp.advantages, ratio_metrics(ratio, clipped.low, clipped.high)
