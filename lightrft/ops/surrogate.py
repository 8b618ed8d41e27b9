"""Importance ratios of tokens and sequences, their bounds and the veto, and the clipped surrogate of PPO."""
from typing import NamedTuple

import torch
from torch import Tensor

from lightrft.ops.divergence import MAX_LOG_RATIO
from lightrft.ops.segment import expand, segment_mean, segment_sum


def safe_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """``exp(new - old)`` where mask, else 1: [T]. A NaN or inf outside the mask reaches neither value nor gradient.

    The log-ratio is limited to +-20 nats, beyond which the gradient is 0.
    """
    return safe_log_ratio(new, old, mask).exp()


def safe_log_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """``new - old`` where mask, else 0, limited to +-20 nats: [T]."""
    return torch.where(mask, new - old, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_ratio(log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``log_ratio_b[mask_b].mean().exp()`` on each token of sequence b: [T]; 1 where a sequence keeps nothing."""
    return expand(segment_mean(log_ratio, cu_seqlens, mask).exp(), cu_seqlens, len(log_ratio))


class Clipped(NamedTuple):
    """A clipped token loss and where a bound was active, all [T]."""
    loss: Tensor
    low: Tensor  # bool, the lower bound replaced the ratio (A < 0)
    high: Tensor  # bool, the upper bound replaced the ratio (A > 0)
    dual: Tensor  # bool, the dual bound replaced the ratio (A < 0)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> Clipped:
    """``max(-ratio * A, -ratio.clamp(1 - low, 1 + high) * A)``; with ``dual``, at most ``-dual * A`` where A < 0.

    PPO (arXiv:1707.06347, eq. 7); bounds apart: DAPO's Clip-Higher (arXiv:2503.14476); dual clip: arXiv:1912.09729.
    """
    clipped = pessimistic(ratio, advantages, 1 - low, 1 + high)
    if dual is None:
        return clipped
    capped = (advantages < 0) & (clipped.loss > -dual * advantages)
    return clipped._replace(loss=torch.where(capped, -dual * advantages, clipped.loss), dual=capped)


def pessimistic(x: Tensor, advantages: Tensor, smallest: float, largest: float) -> Clipped:
    """``max(-x * A, -x.clamp(smallest, largest) * A)`` of a ratio or a log-ratio ``x``, all [T]."""
    plain, bounded = -x * advantages, -x.clamp(smallest, largest) * advantages
    replaced = bounded > plain
    return Clipped(torch.maximum(plain, bounded), replaced & (advantages < 0), replaced & (advantages > 0),
                   torch.zeros_like(replaced))


def truncated(ratio: Tensor, largest: float | None) -> Tensor:
    """``ratio.clamp_max(largest)``, [T], with the gradient of a truncated weight: ``d = value * d log pi`` everywhere.

    A plain clamp has no gradient beyond its bound; a truncated importance weight has, for its factor log pi is free.
    """
    return ratio if largest is None else ratio * (largest / ratio).clamp_max(1).detach()


def divergence_bounded(ratio: Tensor, advantages: Tensor, divergence: Tensor, delta: float) -> Clipped:
    """``-ratio * A``, but 0 where the token already moved by more than ``delta`` and A would move it on, all [T]."""
    away = ((ratio - 1) * advantages > 0) & (divergence > delta)
    return Clipped(torch.where(away, 0, -ratio * advantages), away & (advantages < 0), away & (advantages > 0),
                   torch.zeros_like(away))


def sequence_product(new: Tensor, old: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``prod(exp(new_b - old_b)[mask_b])`` on each token of sequence b: [T]; 1 where a sequence keeps nothing.

    The logarithms of a factor and of the product are limited to +-20 nats. What the mask leaves out may be NaN.
    """
    log_product = segment_sum(safe_log_ratio(new, old, mask), cu_seqlens)
    return expand(log_product.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), cu_seqlens, len(mask))


def keep_inside(weights: Tensor, low: float, high: float) -> Tensor:
    """``weights``, but 0 where they are below ``low`` or above ``high`` (NaN stays NaN)."""
    return torch.where((weights < low) | (weights > high), 0, weights)


def any_below(weights: Tensor, floor: float, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``(weights_b[mask_b] < floor).any()`` on each token of sequence b: bool [T]."""
    return expand(segment_sum(mask & (weights < floor), cu_seqlens) > 0, cu_seqlens, len(mask))
