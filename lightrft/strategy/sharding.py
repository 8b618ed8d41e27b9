"""Shards: which elements of a tensor a rank stores, and for which it is responsible, by its placements on a mesh."""
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard, Placement, Shard

from lightrft.ops.fingerprint import Piece, slice_pieces

Slices = tuple[slice, ...]
ReadsBlock = Callable[[str, Slices], Tensor]  # of the tensor of a name


class Block(NamedTuple):
    """Block of a tensor on one rank: its indices in the ``whole`` tensor, and in the ``shard`` that the rank stores."""
    whole: Slices
    shard: Slices


@dataclass(frozen=True)
class ParamSlice:
    """Elements of a parameter of ``shape`` for which one rank is responsible: ``pieces`` of it, or none."""
    pieces: Sequence[Piece]
    shape: torch.Size

    def __mul__(self, factor: float) -> "ParamSlice":
        return ParamSlice([piece._replace(tensor=piece.tensor * factor) for piece in self.pieces], self.shape)


def local(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that is stored on this rank, sharing its storage, without autograd history."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def full_shape(param: Tensor) -> torch.Size:
    """Shape of a whole parameter, also where DeepSpeed divides it and leaves an empty tensor."""
    return vars(param).get("ds_shape", param.shape)


def is_whole(param: Tensor) -> bool:
    """True if all of a parameter is stored on this rank."""
    return not isinstance(param, DTensor) and "ds_shape" not in vars(param)


def sharded_axes(tensor: DTensor) -> list[int]:
    """Axes of the mesh of ``tensor`` over which its elements are divided; over all others they are replicated.

    Raises:
        ValueError: the ranks hold summands of the elements (``Partial``).
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"a tensor that is not yet summed over its ranks has no shards: {tensor.placements}")
    return [axis for axis, placement in enumerate(tensor.placements)
            if not placement.is_replicate() and tensor.device_mesh.size(axis) > 1]  # yapf: disable


def row_axis(tensor: DTensor) -> int | None:
    """The axis over which consecutive rows are divided; None of a tensor that is divided in another way, or not."""
    axes = sharded_axes(tensor)
    return axes[0] if len(axes) == 1 and _by_rows(tensor.placements[axes[0]]) else None


def cuts_rows(tensor: Tensor) -> bool:
    """True if ranks hold parts of one row, of all dimensions but the first."""
    return isinstance(tensor, DTensor) and any(tensor.placements[axis].dim  # type: ignore[attr-defined]
                                               for axis in sharded_axes(tensor))  # yapf: disable


def _by_rows(placement: Placement) -> bool:
    return isinstance(placement, Shard) and not isinstance(placement, _StridedShard) and placement.dim == 0


def count_shards(tensor: Tensor) -> int:
    """Number of different shards of ``tensor``, each of which may be on several ranks."""
    return prod(map(tensor.device_mesh.size, sharded_axes(tensor))) if isinstance(tensor, DTensor) else 1


def names_by_shards(tensors: Mapping[str, Tensor]) -> dict[int, list[str]]:
    """Names of tensors by :func:`count_shards` of them."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(count_shards(tensor), []).append(name)
    return names


def _chunk(runs: list[range], count: int, index: int) -> list[range]:
    """Chunk ``index`` of the indices in ``runs``, cut into ``count`` of them as ``torch.chunk`` does."""
    size = -(-sum(map(len, runs)) // count)
    first, end, before, chunk = index * size, (index + 1) * size, 0, []
    for run in runs:
        chunk.append(run[max(first - before, 0):max(end - before, 0)])
        before += len(run)
    return [run for run in chunk if run]


def _shard_of(runs: list[range], placement: Shard | _StridedShard, size: int, index: int) -> list[range]:
    """The indices of ``runs`` that remain on rank ``index`` of ``size``."""
    factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
    return [run for k in range(factor) for run in _chunk(_chunk(runs, factor, k), size, index)]


def _in_shard(runs: list[range]) -> Iterator[slice]:
    """Indices in the shard of ``runs`` of the whole, which follow one another there."""
    first = 0
    for run in runs:
        yield slice(first, first + len(run))
        first += len(run)


def blocks_at(tensor: DTensor, coordinate: Sequence[int]) -> list[Block]:
    """Blocks of ``tensor`` that the rank with this ``coordinate`` in its mesh stores."""
    dims = [[range(size)] for size in tensor.shape]
    for placement, size, index in zip(tensor.placements, tensor.device_mesh.shape, coordinate):
        if isinstance(placement, (Shard, _StridedShard)):
            dims[placement.dim] = _shard_of(dims[placement.dim], placement, size, index)
    wholes = product(*([slice(run.start, run.stop) for run in runs if run] for runs in dims))
    return [Block(*both) for both in zip(wholes, product(*map(_in_shard, dims)))]


def blocks(tensor: Tensor) -> list[Block]:
    """Blocks of ``tensor`` that this rank stores; none outside of its mesh."""
    if not isinstance(tensor, DTensor):
        whole = tuple(slice(0, size) for size in tensor.shape)
        return [Block(whole, whole)] if tensor.numel() else []
    coordinate = tensor.device_mesh.get_coordinate()
    return blocks_at(tensor, coordinate) if coordinate is not None else []


def shards(tensor: DTensor) -> Iterator[list[Block]]:
    """Blocks of every shard that this rank's replica of ``tensor`` consists of, in the order of the sharded axes."""
    axes = sharded_axes(tensor)
    own: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    for indices in product(*(range(tensor.device_mesh.size(axis)) for axis in axes)):
        replaced = dict(zip(axes, indices))
        yield blocks_at(tensor, [replaced.get(axis, index) for axis, index in enumerate(own)])


def flat_slice(elements: Tensor, shape: torch.Size, start: int) -> ParamSlice:
    """Consecutive ``elements`` [n], from ``start`` on, of a flattened parameter of ``shape``."""
    return ParamSlice(slice_pieces(elements, None, shape, start), shape)


def own_slice(tensor: Tensor, first_rank: int = 0) -> ParamSlice:
    """The elements of ``tensor`` for which this rank is responsible: what it stores, as the first of their replicas.

    ``first_rank``: the first rank of the default group that holds a part of the model. Meshes that do not contain it
    are replicas of the one that does, as those of tensor parallel ranks for what these do not divide.
    """
    if not isinstance(tensor, DTensor):
        return flat_slice(tensor.detach().view(-1), tensor.shape, 0)
    axes, shard = sharded_axes(tensor), local(tensor)
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    first = not any(index for axis, index in enumerate(coordinate) if axis not in axes)
    first = first and bool((tensor.device_mesh.mesh == first_rank).any())
    return ParamSlice([
        Piece(torch.atleast_1d(shard[block.shard]), None, tensor.shape, [at.start for at in block.whole])
        for block in (blocks(tensor) if first else ())
    ], tensor.shape)


def like(shard: Tensor, owner: Tensor) -> Tensor:
    """Wrap ``shard`` in the layout of ``owner`` over the ranks; it shares the storage, on the device of ``shard``, and
    may have another type, and other sizes of dimensions that are not divided.

    Raises:
        ValueError: ``shard`` differs in a dimension that is divided.
    """
    if not isinstance(owner, DTensor):
        return shard
    divided = {owner.placements[axis].dim for axis in sharded_axes(owner)}  # type: ignore[attr-defined]
    inside = local(owner).shape
    if any(shard.shape[dim] != inside[dim] for dim in divided):
        raise ValueError(f"a shard of {list(shard.shape)} does not fit one of {list(inside)}, {owner.placements}")
    shape = [owner.shape[dim] if dim in divided else size for dim, size in enumerate(shard.shape)]
    whole = torch.empty(shape, device="meta")
    spec = owner._spec.shallow_copy_with_tensor_meta(TensorMeta(whole.shape, whole.stride(), shard.dtype))
    return DTensor(shard, spec, requires_grad=False)


def filled(device: torch.device, read: ReadsBlock, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor on ``device`` in the place of the one of this ``name``, which has no data; ``read`` returns the
    blocks of the whole one that this rank stores."""
    shard = torch.empty_like(local(tensor), device=device)
    for block in blocks(tensor):
        shard[block.shard] = read(name, block.whole)
    return like(shard, tensor)
