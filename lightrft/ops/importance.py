"""Importance weights of whole sequences, their bounds and the veto; those of tokens are in :mod:`.surrogate`."""
import torch
from torch import Tensor

from lightrft.ops.segment import expand, segment_sum
from lightrft.ops.surrogate import MAX_LOG_RATIO, safe_log_ratio


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
