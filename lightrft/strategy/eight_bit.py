"""Moments in eight bits: bitsandbytes' dynamic code, with one float32 scale per block.

A block never crosses a row, so moments do not depend on the number of ranks that share a parameter by rows, and a
checkpoint is exact on all numbers of ranks. Blockwise codes: Dettmers et al., 8-bit Optimizers via Block-wise
Quantization, arXiv:2110.02861, section 2.
"""
from functools import cache

import torch
from torch import Tensor

from lightrft.strategy.memory import BLOCKS


def block_size(shape: torch.Size) -> int:
    """Return the elements per block of a parameter of this shape; 0 where its moments stay float32: vectors, and rows
    that are no whole number of blocks."""
    row = shape[1:].numel() if len(shape) >= 2 else 0
    return next((size for size in BLOCKS if row and row % size == 0), 0)


@cache
def _code(signed: bool, device: torch.device) -> Tensor:
    """The 256 values that a moment can take, as shares of its block's scale, ascending."""
    from bitsandbytes.functional import create_dynamic_map
    return create_dynamic_map(signed=signed).to(device)


def encode_moment(moment: Tensor, signed: bool, size: int) -> tuple[Tensor, Tensor]:
    """Encode the float32 rows of a moment.

    Args:
        signed: whether it has negative values.
        size: elements per block.

    Returns:
        Codes (uint8, in the shape of ``moment``) and scales (float32 [rows, blocks per row]): each block's largest
        absolute value.
    """
    blocks = moment.shape[1:].numel() // size
    code = _code(signed, moment.device)
    if not moment.numel():  # a rank without rows
        return moment.to(torch.uint8), moment.new_empty(0, blocks)
    codes, scales = torch.ops.bitsandbytes.quantize_blockwise(moment.contiguous(), code, size)
    return codes, scales.view(-1, blocks)


def decode_moment(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Undo :func:`encode_moment`, up to rounding."""
    if not codes.numel():
        return codes.float()
    size = codes.shape[1:].numel() // scales.shape[1]
    code = _code(signed, codes.device)
    return torch.ops.bitsandbytes.dequantize_blockwise(codes, scales.view(-1), code, size, torch.float32)
