"""Many sequences in one row: ``flat [T]`` and ``cu_seqlens [B + 1]`` (int32, from 0 to T)."""
import torch
from torch import Tensor


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
