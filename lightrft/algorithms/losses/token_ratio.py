"""Policy losses with one ratio per token, and the policy gradient without a ratio."""
from math import inf, log

import torch
from torch import Tensor

from lightrft.algorithms.base import clip_bounds, policy_loss, ratio_metrics
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.divergence import binary_kl, kl_estimate
from lightrft.ops.surrogate import (clipped_surrogate, divergence_bounded, pessimistic, safe_log_ratio, safe_ratio,
                                    truncated)
from lightrft.types import Experience


@policy_loss("ppo", skips_zero=True, reads=("eps_clip", "eps_clip_high", "dual_clip"))
def ppo(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, with bounds that may differ and an optional dual clip.

    Paper: Schulman et al. 2017, https://arxiv.org/abs/1707.06347 (Clip-Higher: https://arxiv.org/abs/2503.14476; dual
        clip: https://arxiv.org/abs/1912.09729)
    Equation: loss_t = max(-rho_t * A_t, -clip(rho_t, 1 - low, 1 + high) * A_t), rho_t = pi_t / pi_old_t (eq. 7);
        where A_t < 0 at most -dual * A_t
    Degenerate: first update on a rollout: rho is exactly 1 and the gradient is REINFORCE's.
    Deviation: the log-ratio is limited to +-20 nats.
    """
    ratio = safe_ratio(logprobs, exp.old_logprobs, exp.loss_mask)
    clipped = clipped_surrogate(ratio, exp.advantages, *clip_bounds(cfg), cfg.dual_clip)
    metrics = ratio_metrics(ratio, clipped.low, clipped.high)
    if cfg.dual_clip is not None:
        metrics["clip_frac_dual"] = clipped.dual.float()
    return clipped.loss, metrics


@policy_loss("cispo", skips_zero=True, reads=("eps_clip", "eps_clip_high", "cispo_absolute"))
def cispo(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO: REINFORCE weighted by a clipped, detached ratio, so that a clipped token keeps its gradient.

    Paper: MiniMax 2025 (MiniMax-M1), https://arxiv.org/abs/2506.13585 (bound on the ratio itself, ScaleRL:
        https://arxiv.org/abs/2510.13786)
    Equation: loss_t = -sg[clip(rho_t, 1 - low, 1 + high)] * A_t * log pi_t (eq. 4, 5)
    Degenerate: first update on a rollout, or bounds out of reach and rho = 1: REINFORCE.
    Deviation: both bounds are options. The paper sets no lower one (--eps_clip 1) and tunes the upper one; with
        --cispo_absolute it is high in place of 1 + high, without a lower one. clip_frac counts both signs of A. The
        log-ratio is limited to +-20 nats.
    """
    ratio = safe_ratio(logprobs, exp.old_logprobs, exp.loss_mask).detach()
    low, high = clip_bounds(cfg)
    smallest, largest = (0.0, high) if cfg.cispo_absolute else (1 - low, 1 + high)
    loss = -ratio.clamp(smallest, largest) * exp.advantages * logprobs
    return loss, ratio_metrics(ratio, ratio < smallest, ratio > largest)


@policy_loss("cpgd", reads=("eps_clip", "eps_clip_high", "policy_drift_coef"))
def cpgd(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """CPGD: the policy gradient of a clipped log-ratio, and a penalty on the drift from the rollout's policy.

    Paper: Liu et al. 2025, https://arxiv.org/abs/2505.12504
    Equation: loss_t = max(-l_t * A_t, -clip(l_t, log(1 - low), log(1 + high)) * A_t) + coef * KL(pi_old || pi),
        l_t = log(pi_t / pi_old_t)
    Degenerate: first update on a rollout: the gradient is REINFORCE's and the drift is 0.
    Deviation: the drift is the k3 estimate exp(l) - 1 - l, whose gradient (exp(l) - 1) * d log pi is unbiased; the
        paper also bounds that factor. The log-ratio is limited to +-20 nats.
    """
    log_ratio = safe_log_ratio(logprobs, exp.old_logprobs, exp.loss_mask)
    low, high = clip_bounds(cfg)
    clipped = pessimistic(log_ratio, exp.advantages, log(1 - low) if low < 1 else -inf, log(1 + high))
    drift = kl_estimate(exp.old_logprobs, logprobs, "k3")
    metrics = ratio_metrics(log_ratio.exp(), clipped.low, clipped.high)
    return clipped.loss + cfg.policy_drift_coef * drift, metrics


@policy_loss("sapo", skips_zero=True, reads=("sapo_tau_pos", "sapo_tau_neg"))
def sapo(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """SAPO: a smooth gate in place of the clip; the further a ratio is from 1, the lower the weight of its token.

    Paper: Gao et al. 2025, https://arxiv.org/abs/2511.20347
    Equation: loss_t = -A_t * 4 / tau * sigmoid(tau * (rho_t - 1)), tau = tau_pos where A_t > 0, else tau_neg
    Degenerate: first update on a rollout: the gradient is REINFORCE's, for every tau.
    Deviation: none; the log-ratio is limited to +-20 nats. The paper's mean is --loss_agg_mode seq-mean-token-mean.

    Returns:
        (loss [T], metrics); nothing is clipped.
    """
    ratio = safe_ratio(logprobs, exp.old_logprobs, exp.loss_mask)
    tau = torch.full_like(exp.advantages, cfg.sapo_tau_neg).masked_fill(exp.advantages > 0, cfg.sapo_tau_pos)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return -gate * exp.advantages, ratio_metrics(ratio)


@policy_loss("dppo_tv", skips_zero=True, reads=("dppo_delta", "dppo_ratio_max"))
def dppo_tv(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """DPPO with total variation: a token whose probability has moved too far gets no gradient in that direction.

    Paper: Qi et al. 2026, https://arxiv.org/abs/2602.04879
    Equation: loss_t = -M_t * rho_t * A_t, M_t = 0 where (rho_t - 1) * A_t > 0 and |pi_t - pi_old_t| > delta, else 1
        (eq. 11 to 13, binary approximation)
    Degenerate: first update on a rollout, or delta 1: REINFORCE with the plain ratio.
    Deviation: pi_old is the trainer's policy at the time of the rollout; the paper's is the engine's
        (--rollout_correction bypass). The log-ratio is limited to +-20 nats (--dppo_ratio_max: the truncated ratio of
        section 5.4). delta is --dppo_delta (the paper's 0.15).

    Returns:
        (loss [T], metrics); ``ratio`` is the one before ``dppo_ratio_max``.
    """
    moved = (logprobs.detach().exp() - exp.old_logprobs.exp()).abs()
    return _dppo(logprobs, exp, cfg, moved, 0.15)


@policy_loss("dppo_kl", skips_zero=True, reads=("dppo_delta", "dppo_ratio_max"))
def dppo_kl(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """DPPO with the KL of "this token or any other": a token whose probability moved too far stops moving away.

    Paper: Qi et al. 2026, https://arxiv.org/abs/2602.04879
    Equation: loss_t = -M_t * rho_t * A_t, M_t = 0 where (rho_t - 1) * A_t > 0 and
        pi_old_t * log(pi_old_t / pi_t) + (1 - pi_old_t) * log((1 - pi_old_t) / (1 - pi_t)) > delta, else 1
        (eq. 11, 12, 14, binary approximation)
    Degenerate: first update on a rollout: REINFORCE with the plain ratio.
    Deviation: pi_old is the trainer's policy at the time of the rollout; the paper's is the engine's
        (--rollout_correction bypass). The log-ratio is limited to +-20 nats (--dppo_ratio_max: the truncated ratio of
        section 5.4). delta is --dppo_delta (the paper's 0.05).

    Returns:
        (loss [T], metrics); ``ratio`` is the one before ``dppo_ratio_max``.
    """
    moved = binary_kl(exp.old_logprobs, logprobs.detach())
    return _dppo(logprobs, exp, cfg, moved, 0.05)


def _dppo(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig, moved: Tensor,
          default: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Stop tokens whose divergence ``moved`` [T] is above ``dppo_delta``, or above the default of the method."""
    ratio = safe_ratio(logprobs, exp.old_logprobs, exp.loss_mask)
    delta = default if cfg.dppo_delta is None else cfg.dppo_delta
    clipped = divergence_bounded(truncated(ratio, cfg.dppo_ratio_max), exp.advantages, moved, delta)
    return clipped.loss, ratio_metrics(ratio, clipped.low, clipped.high)


@policy_loss("gpg", "reinforce", needs_old=False, skips_zero=True, reads=())
def gpg(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """GPG, REINFORCE: the plain policy gradient, without a ratio.

    Paper: Chu et al. 2025 (GPG), https://arxiv.org/abs/2504.02546 (REINFORCE: https://doi.org/10.1007/BF00992696)
    Equation: loss_t = -A_t * log pi_t
    Degenerate: the gradient that every loss with a ratio has in the first update on a rollout.
    Deviation: GPG's rescaling of the advantages belongs to its estimator. Later updates on a rollout are not corrected
        for the policy having moved. ``ratio`` is reported all the same.
    """
    ratio = safe_ratio(logprobs.detach(), exp.old_logprobs, exp.loss_mask)
    return -exp.advantages * logprobs, ratio_metrics(ratio)
