"""Tensors whose parts lie on several ranks, put together."""
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightrft.strategy.sharding import sharded_axes, shards


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, put together from the ranks' parts; a collective. ``DTensor.full_tensor`` gathers without
    waiting at once, and under gloo ranks have ended in it by SIGSEGV and SIGABRT."""
    if not isinstance(tensor, DTensor):
        return tensor
    parts = [tensor.detach().to_local()]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=parts[0].device)
    for axis in reversed(sharded_axes(tensor)):
        found: list[Any] = [None] * tensor.device_mesh.size(axis)
        dist.all_gather_object(found, parts, group=tensor.device_mesh.get_group(axis))
        parts = [part for some in found for part in some]
    for part, blocks in zip(parts, shards(tensor), strict=True):
        for block in blocks:
            whole[block.whole] = part[block.shard]
    return whole
