"""A plugin of policy losses and a correction whose gradient depends on how the batch is cut: easy mistakes."""
import os

import torch
from torch import Tensor

from lightrft.algorithms.base import correction, policy_loss
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.segment import segment_sum
from lightrft.ops.surrogate import safe_ratio
from lightrft.types import Experience

Loss = tuple[Tensor, dict[str, Tensor]]


def plain(logprobs: Tensor, exp: Experience, advantages: Tensor | None = None) -> Loss:
    """``-ratio * A``, the right way."""
    ratio = torch.where(exp.loss_mask, logprobs - exp.old_logprobs, 0).exp()
    zeros = torch.zeros_like(ratio)
    loss = -ratio * (exp.advantages if advantages is None else advantages)
    return loss, {"ratio": ratio, "clip_frac_low": zeros, "clip_frac_high": zeros}


@policy_loss("own_tokens")
def own_tokens(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> Loss:
    """Divides by the tokens of its micro-batch."""
    loss, metrics = plain(logprobs, exp)
    return loss / exp.loss_mask.sum().clamp(min=1), metrics


@policy_loss("own_seqs")
def own_seqs(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> Loss:
    """Divides by the sequences of its micro-batch."""
    loss, metrics = plain(logprobs, exp)
    return loss / (segment_sum(exp.loss_mask, exp.cu_seqlens) > 0).sum().clamp(min=1), metrics


@policy_loss("own_length")
def own_length(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> Loss:
    """Divides by the length of its micro-batch, as a plain mean does."""
    loss, metrics = plain(logprobs, exp)
    return loss / max(exp.num_tokens, 1), metrics


@policy_loss("own_baseline")
def own_baseline(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> Loss:
    """Subtracts the mean advantage of its micro-batch."""
    kept = exp.advantages[exp.loss_mask]
    return plain(logprobs, exp, exp.advantages - kept.sum() / max(len(kept), 1))


@policy_loss("own_weights")
def own_weights(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> Loss:
    """Divides the ratio by its mean over the micro-batch: seen only where the ratio is not 1."""
    loss, metrics = plain(logprobs, exp)
    kept = metrics["ratio"].detach()[exp.loss_mask]
    return loss / (kept.mean() if len(kept) else 1.0), metrics


@policy_loss("own_rank")
def own_rank(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> Loss:
    """Counts the samples of rank 1 twice."""
    loss, metrics = plain(logprobs, exp)
    return loss * (1 + int(os.environ.get("RANK", "0"))), metrics


@correction("own_mean")
def own_mean(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Divides the weights by their mean over the micro-batch."""
    weights = safe_ratio(exp.old_logprobs, exp.rollout_logprobs, exp.loss_mask)
    kept = weights[exp.loss_mask]
    return weights / (kept.mean() if len(kept) else 1.0)
