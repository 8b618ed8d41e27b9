"""Tensors whose parts lie on several ranks, put together."""
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightrft.strategy.sharding import sharded_axes, shards


def full(tensor: Tensor) -> Tensor:
    """The whole tensor; a collective."""
    return wholes({"": tensor})[""]


def wholes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor put together from the ranks' parts, which all travel at once; a collective.

    ``DTensor.full_tensor`` gathers without waiting at once, and under gloo ranks have ended in it by SIGSEGV and
    SIGABRT.
    """
    divided: dict[tuple[DeviceMesh, tuple[int, ...]], dict[str, DTensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            divided[tensor.device_mesh, tuple(sharded_axes(tensor))][name] = tensor
    result = dict(tensors)
    for (mesh, axes), some in divided.items():
        result |= _gathered(mesh, axes, some)
    return result


def _gathered(mesh: DeviceMesh, axes: tuple[int, ...], tensors: dict[str, DTensor]) -> dict[str, Tensor]:
    parts: list[Any] = [_packed([tensor.detach().to_local() for tensor in tensors.values()])]  # of one rank, then more
    for axis in reversed(axes):
        replies: list[Any] = [None] * mesh.size(axis)
        dist.all_gather_object(replies, parts, group=mesh.get_group(axis))
        parts = [part for reply in replies for part in reply]
    shares = [_unpacked(*part) for part in parts]
    return {name: _joined(tensor, [share[index] for share in shares])
            for index, (name, tensor) in enumerate(tensors.items())}  # yapf: disable


def _packed(tensors: Sequence[Tensor]) -> tuple[list[tuple[torch.Size, torch.dtype]], Tensor]:
    """Shapes and types, and the bytes of all in one tensor: to pickle each would take longer than to send them."""
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return [(tensor.shape, tensor.dtype) for tensor in tensors], torch.cat(flat)


def _unpacked(forms: Sequence[tuple[torch.Size, torch.dtype]], flat: Tensor) -> list[Tensor]:
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in forms]
    return [part.clone().view(dtype).view(shape) for part, (shape, dtype) in zip(flat.split(sizes), forms)]


def _joined(tensor: DTensor, parts: Sequence[Tensor]) -> Tensor:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=parts[0].device)
    for part, blocks in zip(parts, shards(tensor), strict=True):
        for block in blocks:
            whole[block.whole] = part[block.shard]
    return whole
