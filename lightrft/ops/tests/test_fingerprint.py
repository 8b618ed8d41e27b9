"""The fingerprint against a naive sum in Python integers, and what must and must not change it."""
from itertools import product

import pytest
import torch

from lightrft.ops import fingerprint as module
from lightrft.ops.fingerprint import fingerprint

SHAPES = [(7, ), (8, ), (1, ), (5, 6), (6, 5), (3, 8), (3, 4, 6), (2, 3, 2, 4), (1, 1), (0, ), (0, 4)]


def noise(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def naive(tensor):
    """The definition, element by element (words of eight bytes, mixed, where there are several dimensions)."""
    bits = tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    words = tensor.ndim > 1 and tensor.shape[-1] * tensor.element_size() % 8 == 0
    bits = bits.view(torch.int64) if words else bits
    total = 0
    for index in product(*(range(size) for size in bits.shape)):
        value = bits[index].item()
        value = value ^ (value >> 32) if words else value
        for dim, i in enumerate(index):
            value *= module._key(dim, bits.shape[dim], torch.device("cpu"))[i].item()
        total += value
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_definition(shape, dtype):
    assert fingerprint(noise(shape, dtype)).item() == naive(noise(shape, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, ), (10, 8), (7, 5), (6, 4, 8)])
def test_parts_add_up(shape, dtype, monkeypatch):
    """Rows on ranks (one without any), columns of tensor parallelism, blocks of any size, tensors inside others."""
    whole = noise(shape)
    expected = fingerprint(whole.to(dtype))
    assert fingerprint(whole, dtype) == expected, "rounding first is not the same"
    rest = (0, ) * (whole.ndim - 1)
    for rows in (1, 4, shape[0]):
        starts = range(0, shape[0] + rows, rows)
        found = [fingerprint(whole[first:first + rows], dtype, shape, (first, *rest)) for first in starts]
        assert torch.stack(found).sum() == expected
    if whole.shape[-1] == 8:
        halves = [fingerprint(whole[..., first:first + 4], dtype, shape, (0, ) * len(rest) + (first, ))
                  for first in (0, 4)]  # yapf: disable
        assert torch.stack(halves).sum() == expected
    monkeypatch.setitem(module._BLOCK, "cpu", 1)
    assert fingerprint(whole, dtype) == expected
    packed = torch.cat([torch.zeros(3), whole.flatten()])[3:].view(shape)
    assert fingerprint(packed, dtype) == expected, "a view into a larger tensor"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_counts(dtype):
    for shape in ((6, 8), (5, 7), (12, )):
        right = noise(shape, dtype)
        for index in range(right.numel()):
            wrong = right.clone()
            bits = wrong.view(-1).view(torch.uint8)
            bits[index * right.element_size()] ^= 1  # the lowest bit of the mantissa
            assert fingerprint(wrong) != fingerprint(right), index


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
    assert len({fingerprint(value).item() for value in (right, *wrong.values())}) == len(wrong) + 1
