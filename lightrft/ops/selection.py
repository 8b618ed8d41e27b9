"""Selection of the tokens of a mini-batch that a loss treats differently. Packed [T] fields, on one rank or on many.

The selected set does not depend on the :class:`~lightrft.ops.segment.Ranks`: tokens are counted in the order of the
sequences in the batch, whichever rank holds them. No rank holds the values of all tokens.
"""
import torch
from torch import Tensor

from lightrft.ops.segment import HERE, masked_mean, segment_sum, Ranks

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def covariance(x: Tensor, y: Tensor, mask: Tensor, ranks: Ranks = HERE) -> Tensor:
    """``(x - x[mask].mean()) * (y - y[mask].mean())`` where mask, else 0: float64 [T]; its mean is Cov(x, y)."""
    x, y = x.double(), y.double()
    return torch.where(mask, (x - masked_mean(x, mask, ranks)) * (y - masked_mean(y, mask, ranks)), 0)


def share(ratio: float, mask: Tensor, ranks: Ranks = HERE) -> int:
    """``floor(ratio * mask.sum())``, but at least 1."""
    return max(int(ratio * _count(mask, ranks)), 1)


def draw(candidates: Tensor, count: int, seed: int, cu_seqlens: Tensor, ranks: Ranks = HERE) -> Tensor:
    """bool [T]: ``count`` of the ``candidates`` (all, when there are fewer), drawn with ``seed``; on the CPU."""
    number, total = _numbers(candidates, cu_seqlens, ranks)
    picked = torch.zeros(total, dtype=torch.bool)
    picked[torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count]] = True
    chosen = torch.zeros_like(candidates)
    chosen[candidates] = picked[number]
    return chosen


def largest(x: Tensor, count: int, mask: Tensor, cu_seqlens: Tensor, ranks: Ranks = HERE) -> Tensor:
    """bool [T]: the ``count`` largest of ``x[mask]`` (all, when there are fewer); of equal ones the first."""
    keys = _ordered(x)
    bound = _bound(keys[mask], count, ranks)
    above = mask & (keys > bound)
    ties = mask & (keys == bound)
    number, _ = _numbers(ties, cu_seqlens, ranks)
    above[ties] = number < count - _count(above, ranks)
    return above


def _count(mask: Tensor, ranks: Ranks) -> int:
    return int(ranks.total(mask.sum()))


def _numbers(mask: Tensor, cu_seqlens: Tensor, ranks: Ranks) -> tuple[Tensor, int]:
    """Number the tokens of ``mask`` in all ranks, in the order of the batch: those of this rank, and their total."""
    own = segment_sum(mask, cu_seqlens)
    counts = ranks.gather(own)
    first = ranks.own(counts.cumsum(0) - counts)
    within = torch.arange(int(own.sum())) - torch.repeat_interleave(own.cumsum(0) - own, own)
    return torch.repeat_interleave(first, own) + within, int(counts.sum())


def _ordered(x: Tensor) -> Tensor:
    """Map floats to int64 that are ordered like them (the bits of a negative float run backwards)."""
    bits = (x + 0.0).view(_INTEGERS[x.dtype])  # -0.0 becomes 0.0
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits).long()


def _bound(keys: Tensor, count: int, ranks: Ranks) -> int:
    """Return the ``count``-th largest key of all ranks by bisection; the least integer when there are fewer."""
    low, high = -2**63, 2**63 - 1  # the largest number that at least ``count`` keys reach lies between them
    while low < high:
        middle = (low + high + 1) // 2
        if _count(keys >= middle, ranks) >= count:
            low = middle
        else:
            high = middle - 1
    return low
