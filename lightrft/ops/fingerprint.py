"""Fingerprints of tensors: one 64-bit number that any changed, moved or swapped element changes.

The bits of an element are an integer; it is multiplied by one odd random number per dimension, chosen by its index
there, and all products are added up modulo 2^64 (multilinear hashing; Carter and Wegman 1979, "Universal classes of
hash functions"). Integer sums are exact in any order: the fingerprints of the parts of a tensor, wherever they lie, add
up to that of the whole. One changed element always changes the number; several cancel with a chance of about 2^-32.
"""
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = {"cpu": 1 << 17}  # elements that are hashed at once: what stays in the cache of a core, or fills a GPU
_BLOCK_GPU = 1 << 25


@lru_cache(maxsize=None)
def _key(dim: int, size: int, device: torch.device) -> Tensor:
    """Odd int64 [size], the same in every process."""
    generator = torch.Generator().manual_seed(dim)
    return (torch.randint(-1 << 62, 1 << 62, (size, ), generator=generator) * 2 + 1).to(device)


def _words(rows: Tensor, per_word: int) -> Tensor:
    """The bits of [n, m] as integers: [n, m], or [n, m / per_word] words of eight bytes.

    High bits are mixed into low ones there: sign bits alone would vanish in pairs modulo 2^64.
    """
    rows = rows.contiguous()
    if per_word == 1:
        return rows.view(_INTS[rows.element_size()])
    aligned = rows.storage_offset() * rows.element_size() % 8 == 0
    words = (rows if aligned else rows.clone()).view(torch.int64)
    return words ^ (words >> 32)


def fingerprint(part: Tensor, dtype: torch.dtype | None = None, shape: Sequence[int] = (),
                start: Sequence[int] = ()) -> Tensor:
    """The fingerprint of ``part``, or its share in that of the tensor it is a part of: int64 [], on its device.

    Args:
        part: of one dimension or more; it is read block by block, in a few MiB.
        dtype: what its elements are rounded to first.
        shape: of the whole tensor; default: that of the part.
        start: index of the part's first element in the whole, in every dimension. Where the last of several dimensions
            is cut, no eight bytes may be torn apart.
    """
    dtype, shape, start = dtype or part.dtype, shape or part.shape, start or (0, ) * part.ndim
    per_word = 8 // dtype.itemsize if len(shape) > 1 and shape[-1] * dtype.itemsize % 8 == 0 else 1
    *outer, last = (_key(dim, size, part.device) for dim, size in enumerate([*shape[:-1], shape[-1] // per_word]))
    last = last[start[-1] // per_word:][:part.shape[-1] // per_word]
    rows = part[None] if part.ndim == 1 else part.flatten(0, -2)
    blocks = rows.split(max(1, _BLOCK.get(part.device.type, _BLOCK_GPU) // max(1, part.shape[-1])))
    sums = torch.cat([(_words(block.to(dtype), per_word) * last).sum(-1) for block in blocks])
    sums = sums.view(part.shape[:-1])
    for key, first in zip(reversed(outer), reversed(start[:-1])):
        sums = (sums * key[first:first + sums.shape[-1]]).sum(-1)
    return sums
