"""Fingerprints against a naive sum in Python integers, and what must and must not change them."""
from itertools import product

import pytest
import torch

from lightrft.ops import fingerprint as module
from lightrft.ops.fingerprint import Piece, fingerprints, slice_pieces

SHAPES = [(7, ), (8, ), (1, ), (5, 6), (6, 5), (3, 8), (3, 4, 6), (2, 3, 2, 4), (1, 1), (0, ), (0, 4), (4, 0)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SMALL = pytest.mark.parametrize("small", [0, 20, 1 << 15])  # all alone, some together, all together


def noise(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one(tensor, *layout):
    return fingerprints([Piece(tensor, *layout)])[0]


def naive(tensor):
    """The definition, element by element."""
    bits = tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    total = 0
    for index in product(*(range(size) for size in bits.shape)):
        value = bits[index].item()
        for dim, i in enumerate(index):
            value *= module._key(dim, bits.shape[dim], torch.device("cpu"))[i].item()
        total += value
    return (total + 2**63) % 2**64 - 2**63


@DTYPES
@SMALL
def test_the_definition(dtype, small, monkeypatch):
    monkeypatch.setattr(module, "_SMALL", small)
    tensors = [noise(shape, dtype, seed) for seed, shape in enumerate(SHAPES)]
    expected = [naive(tensor) for tensor in tensors]
    assert fingerprints([Piece(tensor) for tensor in tensors]).tolist() == expected
    mixed = [noise(shape, torch.float32 if seed % 3 else dtype, seed) for seed, shape in enumerate(SHAPES)]
    rounded = [naive(tensor.to(dtype)) for tensor in mixed]
    assert fingerprints([Piece(tensor, dtype) for tensor in mixed]).tolist() == rounded


@DTYPES
@SMALL
@pytest.mark.parametrize("shape", [(9, ), (10, 8), (7, 5), (6, 4, 8)])
def test_parts_add_up(shape, dtype, small, monkeypatch):
    """Rows on ranks (one without any), columns of tensor parallelism, blocks of any size, views into others."""
    monkeypatch.setattr(module, "_SMALL", small)
    whole, rest = noise(shape), (0, ) * (len(shape) - 1)
    expected = one(whole.to(dtype))
    for rows in (1, 4, shape[0]):
        starts = range(0, shape[0] + rows, rows)
        pieces = [Piece(whole[first:first + rows], dtype, shape, (first, *rest)) for first in starts]
        assert fingerprints(pieces).sum() == expected
    for columns in (1, 2, shape[-1]):
        starts = range(0, shape[-1], columns)
        pieces = [Piece(whole[..., c:c + columns], dtype, shape, (0, ) * len(rest) + (c, )) for c in starts]
        assert fingerprints(pieces).sum() == expected
    monkeypatch.setitem(module._BLOCK, "cpu", 1)
    assert one(whole, dtype) == expected
    assert one(torch.cat([torch.zeros(3), whole.flatten()])[3:].view(shape), dtype) == expected


@DTYPES
@SMALL
def test_every_bit_counts(dtype, small, monkeypatch):
    monkeypatch.setattr(module, "_SMALL", small)
    for shape in ((6, 8), (5, 7), (12, )):
        right = noise(shape, dtype)
        size = right.element_size()
        for bit in range(right.numel() * size * 8):
            wrong = right.clone()
            wrong.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
            assert one(wrong) != one(right), bit


@DTYPES
@pytest.mark.parametrize("shape", [(8, 8), (16, ), (7, 7)])
def test_what_goes_wrong_is_seen(shape, dtype):
    right = noise(shape, dtype)
    wrong = {
        "negated": -right,
        "scaled": noise(shape).mul(1 + 1e-2).to(dtype),
        "rows in another order": right.roll(1, 0),
        "two signs": torch.where(torch.arange(right.numel()).view(shape) < 2, -right, right),
        "zero": torch.zeros_like(right),
        "another": noise(shape, dtype, 1),
    }
    if right.ndim == 2:
        wrong |= {"transposed": right.T, "columns in another order": right.roll(1, 1), "halves": right.roll(4, 1)}
    assert len({one(value).item() for value in (right, *wrong.values())}) == len(wrong) + 1


@pytest.mark.parametrize("shape", [(7, ), (5, 6), (3, 1), (2, 3, 4), (2, 3, 2, 2)])
def test_slices_add_up_wherever_a_tensor_is_cut(shape):
    """Every cut into three slices of the flattened tensor, empty ones included, is exact, in few pieces."""
    whole = noise(shape)
    flat, size = whole.flatten(), whole.numel()
    for first, second in ((i, j) for i in range(size + 1) for j in range(i, size + 1)):
        slices = [(flat[a:b], a) for a, b in ((0, first), (first, second), (second, size))]
        found = [slice_pieces(elements, None, shape, start) for elements, start in slices]
        assert all(len(pieces) < 2 * len(shape) for pieces in found)
        assert fingerprints([piece for pieces in found for piece in pieces]).sum() == one(whole), (first, second)
