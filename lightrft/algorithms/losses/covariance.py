"""Policy losses with a special treatment of the tokens that lower the entropy most."""
import torch
from torch import Tensor

from lightrft.algorithms.base import clip_bounds, policy_loss, ratio_metrics
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.divergence import kl_estimate
from lightrft.ops.selection import covariance, draw, largest, share
from lightrft.ops.surrogate import clipped_surrogate, safe_log_ratio, safe_ratio
from lightrft.types import Experience


def high_covariance(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig, seed: int) -> Tensor:
    """bool [T]: the drawn tokens of a whole mini-batch."""
    cov = covariance(logprobs, exp.advantages, exp.loss_mask, exp.ranks)
    candidates = exp.loss_mask & (cov >= cfg.clip_cov_low) & (cov <= cfg.clip_cov_high)
    if exp.old_logprobs is not None:  # else this is the first update on the rollout, where no ratio is clipped
        ratio = safe_ratio(logprobs, exp.old_logprobs, exp.loss_mask)
        clipped = clipped_surrogate(ratio, exp.advantages, *clip_bounds(cfg))
        candidates &= ~(clipped.low | clipped.high)
    return draw(candidates, share(cfg.clip_cov_ratio, exp.loss_mask, exp.ranks), seed, exp.cu_seqlens, exp.ranks)


@policy_loss("clip_cov", selects=high_covariance,
             reads=("eps_clip", "eps_clip_high", "clip_cov_ratio", "clip_cov_low", "clip_cov_high"))
def clip_cov(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Clip-Cov: PPO in which a few tokens, drawn from those that lower the entropy most, get no gradient.

    Paper: Cui et al. 2025, https://arxiv.org/abs/2505.22617
    Equation: loss_t = PPO's, 0 on the drawn tokens: share * N (rounded down) of those with low <= Cov_t <= high, Cov_t
        = (log pi_t - mean(log pi)) * (A_t - mean(A)) (eq. 10 to 12)
    Degenerate: no token between the bounds: PPO.
    Deviation: N and both means count the action tokens of the whole mini-batch, on all ranks, under the policy as it
        enters the optimizer step; the choice is seeded, and at least one candidate is drawn. PPO's clip (without dual
        clip) stays on, which the paper's formula leaves out, and a token that it clips is no candidate, as in the
        authors' code. The log-ratio is limited to +-20 nats.

    Returns:
        (loss [T], metrics); ``selected_frac``: the drawn tokens.
    """
    ratio = safe_ratio(logprobs, exp.old_logprobs, exp.loss_mask)
    clipped = clipped_surrogate(ratio, exp.advantages, *clip_bounds(cfg))
    metrics = ratio_metrics(ratio, clipped.low, clipped.high, selected_frac=exp.selected.float())
    return torch.where(exp.selected, 0, clipped.loss), metrics


def highest_covariance(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig, seed: int) -> Tensor:
    """bool [T]: the tokens of a whole mini-batch that get the penalty."""
    cov = covariance(logprobs, exp.advantages, exp.loss_mask, exp.ranks)
    count = share(cfg.kl_cov_ratio, exp.loss_mask, exp.ranks)
    return largest(cov, count, exp.loss_mask, exp.cu_seqlens, exp.ranks)


@policy_loss("kl_cov", selects=highest_covariance, reads=("kl_cov_ratio", "kl_cov_coef", "kl_cov_abs"))
def kl_cov(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """KL-Cov: the plain ratio, and a KL penalty on the few tokens that lower the entropy most.

    Paper: Cui et al. 2025, https://arxiv.org/abs/2505.22617
    Equation: loss_t = -rho_t * A_t, + coef * KL(pi_old || pi) on the share * N tokens (rounded down) with the largest
        Cov_t = (log pi_t - mean(log pi)) * (A_t - mean(A)) (eq. 10, 13, 14)
    Degenerate: first update on a rollout: the gradient is REINFORCE's.
    Deviation: N and both means count the action tokens of the whole mini-batch, on all ranks, under the policy as it
        enters the optimizer step; at least one token is chosen. The KL is the k3 estimate, with --kl_cov_abs the
        authors' code's |log-ratio|. The log-ratio is limited to +-20 nats.

    Returns:
        (loss [T], metrics); ``selected_frac``: the tokens with the penalty. Nothing is clipped.
    """
    log_ratio = safe_log_ratio(logprobs, exp.old_logprobs, exp.loss_mask)
    ratio = log_ratio.exp()
    kl = log_ratio.abs() if cfg.kl_cov_abs else kl_estimate(exp.old_logprobs, logprobs, "k3")
    penalty = torch.where(exp.selected, kl, 0)
    metrics = ratio_metrics(ratio, selected_frac=exp.selected.float())
    return -ratio * exp.advantages + cfg.kl_cov_coef * penalty, metrics
