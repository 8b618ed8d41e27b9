"""Tensors whose parts lie on several ranks, put together."""
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, put together from the ranks' parts; a collective. ``DTensor.full_tensor`` gathers without
    waiting at once, and under gloo ranks have ended in it by SIGSEGV and SIGABRT."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.detach().to_local()
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            parts: list[Any] = [None] * tensor.device_mesh.size(axis)
            dist.all_gather_object(parts, whole, group=tensor.device_mesh.get_group(axis))
            whole = torch.cat(parts, placement.dim)
    return whole
