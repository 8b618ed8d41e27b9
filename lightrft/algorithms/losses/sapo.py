"""SAPO: a smooth gate in place of the clip; the further a ratio is from 1, the less its token weighs.

Paper: Gao et al. 2025, https://arxiv.org/abs/2511.20347
Equation: loss_t = -A_t * 4 / tau * sigmoid(tau * (rho_t - 1)), tau = tau_pos where A_t > 0, else tau_neg
Degenerate: first update on a rollout: the gradient is REINFORCE's, for every tau.
Deviation: none; the log-ratio is limited to +-20 nats. The paper's mean is --loss_agg_mode seq-mean-token-mean.
"""
import torch
from torch import Tensor

from lightrft.algorithms.base import policy_loss, ratio_metrics
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.surrogate import safe_ratio
from lightrft.types import Experience


@policy_loss("sapo", skips_zero=True, reads=("sapo_tau_pos", "sapo_tau_neg"))
def sapo(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss [T], metrics); nothing is clipped."""
    ratio = safe_ratio(logprobs, exp.old_logprobs, exp.loss_mask)
    taus = exp.advantages.new_tensor([cfg.sapo_tau_neg, cfg.sapo_tau_pos])
    tau = taus[(exp.advantages > 0).long()]
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    nowhere = torch.zeros_like(exp.loss_mask)
    return -gate * exp.advantages, ratio_metrics(ratio, nowhere, nowhere)
