"""Packed sequences, ``flat [T]`` with ``cu_seqlens [B + 1]`` (int32, from 0 to T): sums, means, gathers.

Statistics are per sequence, per group of samples or over a mask; values outside a mask may be NaN. A batch may be
divided over ranks. Statistics over the whole batch then take its :class:`Ranks`.
"""
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightrft.utils.tensors import upload


class Ranks:
    """Ranks that hold the B sequences of a batch; this one holds b of them. Here: one rank, which holds all.

    Values per sequence are known of the whole batch on every rank, values per token only of a rank's own sequences.
    Every method is a collective, in the order of the sequences in the batch.
    """

    def own(self, values: Tensor) -> Tensor:
        """Return the values [b, ...] of this rank's sequences among those of the batch [B, ...]; no collective."""
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Return the values [B] of all sequences, from those of each rank [b]."""
        return values

    def total(self, value: Tensor) -> Tensor:
        """Return the sum over ranks, of any shape."""
        return value

    def columns(self, values: dict[Any, Tensor]) -> dict[Any, Tensor]:
        """Return the columns [B] of all sequences by key, from those of each rank [b]; NaN, or 0 of integers,
        where the rank of a sequence does not have the key."""
        return values

    def stack(self, values: Tensor) -> Tensor:
        """Return the values of every rank, [ranks, ...]."""
        return values[None]


HERE = Ranks()


def seq_ids(cu_seqlens: Tensor, total: int | None = None) -> Tensor:
    """``cat([full(len_b, b)])``: the sequence each token belongs to, int64 [T]. ``total`` (T) saves a device sync."""
    lens = cu_seqlens.diff().long()
    return torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens, output_size=total)


def position_ids(cu_seqlens: Tensor, total: int | None = None) -> Tensor:
    """``cat([arange(len_b)])``: int64 [T], restarting at 0 in every sequence."""
    starts = cu_seqlens[:-1].long()[seq_ids(cu_seqlens, total)]
    return torch.arange(len(starts), device=starts.device) - starts


def shift_right(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``cat([cat([0, x_b[:-1]])])``: what token t - 1 of the same sequence holds, 0 at the first; differentiable."""
    padded = torch.cat([torch.zeros_like(x[:1]) if len(x) else x.new_zeros((1, *x.shape[1:])), x])
    return padded.index_fill(0, cu_seqlens[:-1].long(), 0)[:len(x)]


def segment_sum(x: Tensor, cu_seqlens: Tensor, mask: Tensor | None = None) -> Tensor:
    """``stack([x_b[mask_b].sum()])``: [T] -> [B], differentiable; 0 for an empty sequence. Integers stay integers."""
    x = x.long() if x.dtype == torch.bool else x
    x = x if mask is None else torch.where(mask, x, 0)
    return x.new_zeros(len(cu_seqlens) - 1).index_add(0, seq_ids(cu_seqlens, len(x)), x)


def segment_mean(x: Tensor, cu_seqlens: Tensor, mask: Tensor | None = None) -> Tensor:
    """``stack([x_b[mask_b].mean()])``: [T] -> [B]; the mean over nothing is 0."""
    lens = cu_seqlens.diff() if mask is None else segment_sum(mask, cu_seqlens)
    return segment_sum(x, cu_seqlens, mask) / lens.clamp_min(1)


def segment_softmax(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``cat([x_b.softmax(0)])``: [T] -> [T], differentiable."""
    ids = seq_ids(cu_seqlens, len(x))
    peak = x.new_full((len(cu_seqlens) - 1, ), -torch.inf).scatter_reduce(0, ids, x.detach(), "amax")
    grown = (x - peak[ids]).exp()
    return grown / segment_sum(grown, cu_seqlens)[ids]


def expand(per_seq: Tensor, cu_seqlens: Tensor, total: int | None = None) -> Tensor:
    """``cat([full(len_b, per_seq[b])])``: [B] -> [T]."""
    return per_seq[seq_ids(cu_seqlens, total)]


def last_token(mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """``(stack([start_b + mask_b.nonzero().max()]), stack([mask_b.any()]))``: index int64 [B] into [T], and valid [B].

    The index of a sequence whose mask is empty is 0 and means nothing.
    """
    steps = torch.where(mask, torch.arange(len(mask), device=mask.device), -1)
    index = steps.new_full((len(cu_seqlens) - 1, ), -1)
    index = index.scatter_reduce(0, seq_ids(cu_seqlens, len(mask)), steps, "amax")
    return index.clamp_min(0), index >= 0


def response_lengths(drawn: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``stack([len_b - drawn_b.nonzero().min()])``: [T] -> int64 [B], from the first drawn token to the end; else 0.

    Tokens that an environment appended between two turns count.
    """
    steps = torch.where(drawn, torch.arange(len(drawn), device=drawn.device), len(drawn))
    ends = cu_seqlens[1:].long()
    first = ends.clone().scatter_reduce(0, seq_ids(cu_seqlens, len(drawn)), steps, "amin")
    return ends - first


class GroupStats(NamedTuple):
    """Statistics of each sample's group, all [B]."""
    mean: Tensor
    std: Tensor  # unbiased; 0 when the group has fewer than two valid samples
    size: Tensor  # valid samples
    spread: Tensor  # largest minus smallest valid value


def group_stats(values: Tensor, group_ids: Tensor, valid: Tensor) -> GroupStats:
    """``x = values[(group_ids == group_ids[b]) & valid]; (x.mean(), x.std(), len(x), x.max() - x.min())`` for each b.

    Args:
        values: [B] float; those that are not valid may be NaN.
        group_ids: [B] integers in any order; groups need not be contiguous nor equally large.
        valid: [B] bool. A group without a valid value has mean, std, size and spread 0.
    """
    unique, inverse = torch.unique(group_ids, return_inverse=True)
    zeros = values.new_zeros(len(unique))

    def total(x: Tensor) -> Tensor:
        return zeros.index_add(0, inverse, torch.where(valid, x, 0))[inverse]

    def extreme(kind: str, outside: float) -> Tensor:
        start = torch.full_like(zeros, outside)
        return start.scatter_reduce(0, inverse, torch.where(valid, values, outside), kind)[inverse]

    size = total(torch.ones_like(values))
    mean = total(values) / size.clamp_min(1)
    std = (total((values - mean)**2) / (size - 1).clamp_min(1)).sqrt()
    spread = extreme("amax", -torch.inf) - extreme("amin", torch.inf)
    return GroupStats(mean, std, size, torch.where(size > 0, spread, 0))


def _mean_and_count(x: Tensor, mask: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return the mean of ``x[mask]``, 0 over nothing, and the number of values, both over all ranks and scalars."""
    total, count = ranks.total(torch.stack([torch.where(mask, x, 0).sum().double(), mask.sum().double()]))
    return total.to(x.dtype) / count.to(x.dtype).clamp_min(1), count.to(x.dtype)


def _centred_and_var(x: Tensor, mask: Tensor, unbiased: bool, ranks: Ranks) -> tuple[Tensor, Tensor]:
    mean, count = _mean_and_count(x, mask, ranks)
    centred = torch.where(mask, x - mean, 0)
    return centred, ranks.total((centred**2).sum()) / (count - int(unbiased)).clamp_min(1)


def masked_mean(x: Tensor, mask: Tensor, ranks: Ranks = HERE) -> Tensor:
    """``x[mask].mean()`` over all ranks, a scalar; the mean over nothing is 0."""
    return _mean_and_count(x, mask, ranks)[0]


def masked_var(x: Tensor, mask: Tensor, unbiased: bool = False, ranks: Ranks = HERE) -> Tensor:
    """``x[mask].var(correction=int(unbiased))`` over all ranks, a scalar; 0 where that is undefined."""
    return _centred_and_var(x, mask, unbiased, ranks)[1]


def masked_whiten(x: Tensor, mask: Tensor, eps: float = 1e-8, unbiased: bool = False, ranks: Ranks = HERE) -> Tensor:
    """``(x - x[mask].mean()) / sqrt(x[mask].var(correction=int(unbiased)) + eps)`` where mask, else 0."""
    centred, variance = _centred_and_var(x, mask, unbiased, ranks)
    return centred * (variance + eps).rsqrt()


class Moments(NamedTuple):
    """Statistics of a set of numbers, all 0 where it is empty."""
    mean: float
    std: float  # of the whole set, not an estimate
    min: float
    max: float
    size: int


def moments(values: Tensor, ranks: Ranks = HERE) -> Moments:
    """Return the moments of ``values`` [n] of all ranks; n may differ between ranks."""
    own = [0.0, 0.0, 0.0, torch.inf, -torch.inf]
    if len(values):
        found = values.mean(), values.std(correction=0), values.min(), values.max()
        own = [len(values), *(each.item() for each in found)]
    counts, means, stds, lows, highs = ranks.stack(torch.tensor(own, dtype=torch.float64)).unbind(1)
    if not counts.sum():
        return Moments(0.0, 0.0, 0.0, 0.0, 0)
    weights = counts / counts.sum()  # exactly 1 on one rank
    mean = (weights * means).sum()
    variance = (weights * (stds**2 + (means - mean)**2)).sum()
    return Moments(mean.item(), variance.sqrt().item(), lows.min().item(), highs.max().item(), int(counts.sum()))


class RowGather:
    """``x[index]`` for x [n, ...]; differentiable, and called as often as there are x.

    The gradient of a row is the sum over its copies, in the order of ``index``, so that it is the same in every run. It
    is a gather too where every row is taken once: no slow ``index_add``.

    Args:
        index: int64 [m].
        rows: n.
        device: of x; ``index`` may be on the host.
        used: bool [m]; the gradient of the other copies, padding, is not read. None: all are used.
    """

    def __init__(self, index: Tensor, rows: int, device: torch.device | str, used: Tensor | None = None) -> None:
        order = index.argsort(stable=True)
        order = order if used is None else order[used[order]]
        counts = index[order].bincount(minlength=rows)
        self.index, self._order = upload(index, device), upload(order, device)
        self._starts = None if bool((counts == 1).all()) else upload(counts.cumsum(0) - counts, device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x[index]``."""
        return _Gather.apply(x, self)

    def add_up(self, grad: Tensor) -> Tensor:
        """Return the gradient [n, ...] of x from that of ``x[index]``."""
        if self._starts is None:
            return grad.index_select(0, self._order)
        sums = F.embedding_bag(self._order, grad.flatten(1), self._starts, mode="sum")
        return sums.unflatten(1, grad.shape[1:])


class _Gather(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: RowGather) -> Tensor:
        ctx.gather = gather
        return x.index_select(0, gather.index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.gather.add_up(grad), None
