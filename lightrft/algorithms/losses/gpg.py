"""GPG, REINFORCE: the plain policy gradient, without a ratio.

Paper: Chu et al. 2025 (GPG), https://arxiv.org/abs/2504.02546 (REINFORCE: https://doi.org/10.1007/BF00992696)
Equation: loss_t = -A_t * log pi_t
Degenerate: the gradient that every loss with a ratio has in the first update on a rollout.
Deviation: GPG's rescaling of the advantages belongs to its estimator. Later updates on a rollout are not corrected for
    the policy having moved. ``ratio`` is reported all the same.
"""
import torch
from torch import Tensor

from lightrft.algorithms.base import policy_loss, ratio_metrics
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.surrogate import safe_ratio
from lightrft.types import Experience


@policy_loss("gpg", "reinforce", needs_old=False, skips_zero=True, reads=())
def gpg(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss [T], metrics)."""
    ratio = safe_ratio(logprobs.detach(), exp.old_logprobs, exp.loss_mask)
    nowhere = torch.zeros_like(exp.loss_mask)
    return -exp.advantages * logprobs, ratio_metrics(ratio, nowhere, nowhere)
