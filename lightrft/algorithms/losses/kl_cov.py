"""KL-Cov: the plain ratio, and a KL penalty on the few tokens that lower the entropy most.

Paper: Cui et al. 2025, https://arxiv.org/abs/2505.22617
Equation: loss_t = -rho_t * A_t, + coef * KL(pi_old || pi) on the share * N tokens (rounded down) with the largest
    Cov_t = (log pi_t - mean(log pi)) * (A_t - mean(A)) (eq. 10, 13, 14)
Degenerate: first update on a rollout: the gradient is REINFORCE's.
Deviation: N and both means count the action tokens of the whole mini-batch, on all ranks, under the policy as it enters
    the optimizer step; at least one token is chosen. The KL is the k3 estimate, with --kl_cov_abs the authors' code's
    |log-ratio|. The log-ratio is limited to +-20 nats.
"""
import torch
from torch import Tensor

from lightrft.algorithms.base import policy_loss, ratio_metrics
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.divergence import kl_estimate
from lightrft.ops.selection import covariance, largest, share
from lightrft.ops.surrogate import safe_log_ratio
from lightrft.types import Experience


def highest_covariance(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig, seed: int) -> Tensor:
    """bool [T]: the tokens of a whole mini-batch that get the penalty."""
    cov = covariance(logprobs, exp.advantages, exp.loss_mask, exp.spread)
    count = share(cfg.kl_cov_ratio, exp.loss_mask, exp.spread)
    return largest(cov, count, exp.loss_mask, exp.cu_seqlens, exp.spread)


@policy_loss("kl_cov", selects=highest_covariance, reads=("kl_cov_ratio", "kl_cov_coef", "kl_cov_abs"))
def kl_cov(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss [T], metrics); ``selected_frac``: the tokens with the penalty. Nothing is clipped."""
    log_ratio = safe_log_ratio(logprobs, exp.old_logprobs, exp.loss_mask)
    ratio = log_ratio.exp()
    kl = log_ratio.abs() if cfg.kl_cov_abs else kl_estimate(exp.old_logprobs, logprobs, "k3")
    penalty = torch.where(exp.selected, kl, 0)
    nowhere = torch.zeros_like(exp.loss_mask)
    metrics = ratio_metrics(ratio, nowhere, nowhere, selected_frac=exp.selected.float())
    return -ratio * exp.advantages + cfg.kl_cov_coef * penalty, metrics
