"""Importance weights of whole sequences, their bounds and the veto. Token weights: :func:`.surrogate.safe_ratio`."""
import torch
from torch import Tensor

from lightrft.ops.segment import expand, segment_mean, segment_sum
from lightrft.ops.surrogate import MAX_LOG_RATIO


def sequence_ratio(new: Tensor, old: Tensor, mask: Tensor, cu_seqlens: Tensor, geometric: bool) -> Tensor:
    """``prod(exp(new_b - old_b)[mask_b])`` of each token's sequence, or the geometric mean of the factors: [T].

    1 where a sequence keeps no token. The logarithm is limited to +-20 nats. What the mask leaves out may be NaN.
    """
    reduce = segment_mean if geometric else segment_sum
    log_ratio = reduce(torch.where(mask, new - old, 0), cu_seqlens, mask)
    return expand(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), cu_seqlens, len(mask))


def keep_inside(weights: Tensor, low: float, high: float) -> Tensor:
    """``weights`` where ``low <= weights <= high``, else 0."""
    return torch.where((weights >= low) & (weights <= high), weights, 0)


def any_below(weights: Tensor, floor: float, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``(weights_b[mask_b] < floor).any()`` for each token of sequence b: bool [T]."""
    return expand(segment_sum(mask & (weights < floor), cu_seqlens) > 0, cu_seqlens, len(mask))
