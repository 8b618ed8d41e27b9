"""Fingerprints of tensors: one 64-bit number that any changed, moved or swapped element changes.

The bits of an element are an integer; it is multiplied by one odd random number per dimension, chosen by its index
there, and all products are added up modulo 2^64 (multilinear hashing; Carter and Wegman 1979, "Universal classes of
hash functions"). Integer sums are exact in any order: the fingerprints of the parts of a tensor, on any device, add up
to that of the whole. One changed element always changes the number; several cancel with a chance of about 2^-32.
"""
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SMALL = 1 << 15  # elements; tensors up to this size are joined
_BLOCK = {"cpu": 1 << 17}  # elements that are multiplied at once: they fit in the cache of a core, or fill a GPU
_BLOCK_GPU = 1 << 25


class Piece(NamedTuple):
    """Tensor of one or more dimensions, or a part of one.

    ``dtype``: type to which the elements are rounded first; None: unchanged. ``shape``: shape of the whole tensor, and
    ``start``: index there of the part's first element; empty: the part is the whole.
    """
    tensor: Tensor
    dtype: torch.dtype | None = None
    shape: Sequence[int] = ()
    start: Sequence[int] = ()


def slice_pieces(elements: Tensor, dtype: torch.dtype | None, shape: Sequence[int], start: int) -> list[Piece]:
    """Split consecutive ``elements`` [n] of a flattened tensor of ``shape``, from ``start`` on, into pieces of it."""
    pieces, done = [], 0
    for first, box in _boxes(shape, start, start + len(elements)):
        size = prod(box)
        pieces.append(Piece(elements[done:done + size].view(box), dtype, shape, first))
        done += size
    return pieces


def _boxes(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the fewest boxes that elements ``start`` to ``end`` of a flattened tensor fill: first index, shape."""
    if len(shape) == 1 and start < end:
        yield (start, ), (end - start, )
    if len(shape) == 1 or start >= end:
        return
    row = prod(shape[1:])
    whole = range(-(-start // row), end // row)
    if start % row:  # the end of a row, or a part from its middle
        index = start // row
        for first, box in _boxes(shape[1:], start % row, min(row, end - index * row)):
            yield (index, *first), (1, *box)
    if whole:
        yield (whole.start, *(0 for _ in shape[1:])), (len(whole), *shape[1:])
    if end % row and end // row >= whole.start:  # the start of a row
        for first, box in _boxes(shape[1:], 0, end % row):
            yield (end // row, *first), (1, *box)


def fingerprints(pieces: Sequence[Piece]) -> Tensor:
    """Return the fingerprint of every piece, or its share in that of its whole tensor: int64 [pieces].

    The pieces and the result are on one device. Large pieces are read block by block, in a few MiB.
    """
    found: list[Tensor | None] = [None] * len(pieces)
    together: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for i, piece in enumerate(pieces):
        if piece.tensor.numel() > _SMALL:
            found[i] = _large(piece)
        else:
            together.setdefault((piece.tensor.dtype, piece.dtype or piece.tensor.dtype), []).append(i)
    for (_, dtype), indices in together.items():
        for i, value in zip(indices, _small([pieces[i] for i in indices], dtype).unbind()):
            found[i] = value
    return torch.stack([value for value in found if value is not None])


def _large(piece: Piece) -> Tensor:
    """int64 []: sum over the last dimension, block by block, then over the others."""
    part, dtype = piece.tensor, piece.dtype or piece.tensor.dtype
    *outer, last = _keys(piece.shape or part.shape, piece.start or (0, ) * part.ndim, part.shape, part.device)
    rows = part[None] if part.ndim == 1 else part.flatten(0, -2)
    blocks = rows.split(max(1, _BLOCK.get(part.device.type, _BLOCK_GPU) // len(last)))
    sums = torch.cat([(_bits(block.to(dtype)) * last).sum(-1) for block in blocks]).view(part.shape[:-1])
    for key in reversed(outer):
        sums = (sums * key).sum(-1)
    return sums


def _small(pieces: list[Piece], dtype: torch.dtype) -> Tensor:
    """int64 [pieces]: fingerprints of pieces of one type, in a few operations."""
    layouts = tuple((tuple(p.shape or p.tensor.shape), tuple(p.start or (0, ) * p.tensor.ndim), tuple(p.tensor.shape))
                    for p in pieces)  # yapf: disable
    key, bounds = _joint_key(layouts, pieces[0].tensor.device)
    zero = pieces[0].tensor.new_zeros(1)
    flat = torch.cat([zero, *(piece.tensor.reshape(-1) for piece in pieces)]).to(dtype)
    sums = _bits(flat).long().mul_(key)
    return torch.cumsum(sums, 0, out=sums)[bounds].diff()


def _bits(tensor: Tensor) -> Tensor:
    """View the elements as integers of their size."""
    return tensor.contiguous().view(_INTS[tensor.element_size()])


@lru_cache(maxsize=None)
def _key(dim: int, size: int, device: torch.device) -> Tensor:
    """Return the factors of a dimension: odd int64 [size], the same in every process."""
    generator = torch.Generator().manual_seed(dim)
    return (torch.randint(-1 << 62, 1 << 62, (size, ), generator=generator) * 2 + 1).to(device)


def _keys(shape: Sequence[int], start: Sequence[int], part: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return the factors of every dimension, for the rows, columns, ... of the part."""
    return [_key(dim, size, device)[first:first + length]
            for dim, (size, first, length) in enumerate(zip(shape, start, part))]  # yapf: disable


@lru_cache(maxsize=8)
def _joint_key(layouts: tuple[tuple[tuple[int, ...], ...], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the factors of all elements of (shape, start, shape of the part) and the bounds of the parts.

    The factors follow a 0, part after part. The bounds are the indices of the last element before each part and of the
    very last element.
    """
    flat = [torch.zeros(1, dtype=torch.int64, device=device)]
    for shape, start, part in layouts:
        *outer, key = _keys(shape, start, part, device)
        for other in reversed(outer):
            key = (other[:, None] * key.flatten()).flatten()
        flat.append(key)
    return torch.cat(flat), torch.tensor([len(key) for key in flat], device=device).cumsum(0) - 1
