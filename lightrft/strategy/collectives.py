"""Collectives in the forms the trainer needs: any dtype, and many shards gathered at once."""
import io
import pickle
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightrft.strategy.sharding import local, row_axis, sharded_axes, shards
from lightrft.utils.tensors import runs

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
ALL_GATHER = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
Named = tuple[str, Tensor]
_SMALL_BYTES = 1 << 20  # full size below which tensors share an all-gather


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ``dtype`` is reduced: supported by gloo and NCCL, without loss."""
    if dtype.is_floating_point:
        return dtype if dtype == torch.float64 else torch.float32
    return torch.int64


def all_reduce(value: Tensor, op: str, group: dist.ProcessGroup | None = None) -> Tensor:
    """The reduction of ``value`` over the ranks of ``group`` (None: all) in its own dtype, out of place (sums of bool
    are int64)."""
    if op not in OPS:
        raise ValueError(f"unknown reduction {op!r}; known: {', '.join(OPS)}")
    result = value.detach().to(wide(value.dtype), copy=True).contiguous()
    dist.all_reduce(result, OPS[op], group)
    return result if op == "sum" and value.dtype == torch.bool else result.to(value.dtype)


class _Pickler(pickle.Pickler):
    """Pickler of CPU tensors as numpy arrays, in a tenth of the time that tensors take."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.dtype != torch.bfloat16:
            return torch.from_numpy, (value.detach().numpy(), )
        return NotImplemented


def _pickled(value: Any, header: int = 0) -> Tensor:
    """uint8: the pickle of ``value``, after ``header`` zeros."""
    stream = io.BytesIO(bytes(header))
    stream.seek(header)
    _Pickler(stream, protocol=5).dump(value)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


class ObjectExchange:
    """Exchange of pickled objects between the ranks of ``group`` (None: all), in one all-to-all as a rule.

    Every pair of ranks exchanges ``room`` bytes, which begin with the size of the object and the largest size that the
    sender has for any rank. So all ranks know whether a second all-to-all with exact sizes must follow. The room grows
    with the objects, up to ``limit`` bytes for all pairs of a rank together.
    """
    header, room, limit = 16, 1 << 12, 1 << 22

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def exchange(self, outgoing: list[Any]) -> list[Any]:
        """Send ``outgoing[r]`` to rank r, on the CPU; return what each rank has sent to this one, in rank order.

        What a rank sends to itself is not pickled. Each rank holds only what it sends and receives.
        """
        rank = dist.get_rank(self.group)
        parts = [torch.zeros(self.header, dtype=torch.uint8) if r == rank else _pickled(value, self.header)
                 for r, value in enumerate(outgoing)]  # yapf: disable
        return self._read(parts, outgoing[rank])

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in rank order, as ``dist.all_gather_object``."""
        return self._read([_pickled(value, self.header)] * dist.get_world_size(self.group), value)

    def _read(self, parts: list[Tensor], own: Any) -> list[Any]:
        """Deliver ``parts[r]`` to rank r; return the objects that arrive, ``own`` in the place of this rank."""
        rank = dist.get_rank(self.group)
        return [own if r == rank else pickle.loads(part[self.header:].numpy().data)
                for r, part in enumerate(self._deliver(parts))]  # yapf: disable

    def _deliver(self, parts: list[Tensor]) -> list[Tensor]:
        """Send ``parts[r]`` uint8 [size] to rank r; return the part of every rank for this one."""
        sent = [len(part) for part in parts]
        mine = torch.zeros(len(parts), self.room, dtype=torch.uint8)
        for row, part, size in zip(mine, parts, sent):
            part[:self.header].view(torch.int64)[:] = torch.tensor([size, max(sent)])
            row[:size] = part[:self.room]
        rows = torch.empty_like(mine)
        dist.all_to_all_single(rows, mine, group=self.group)
        sizes, most = rows[:, :self.header].reshape(-1).view(torch.int64).view(-1, 2).unbind(1)
        received, largest = sizes.tolist(), int(most.max())
        if largest <= self.room:
            return [row[:size] for row, size in zip(rows, received)]
        self.room = max(self.room, min(largest * 5 // 4, self.limit // len(parts)))
        data = torch.empty(sum(received), dtype=torch.uint8)
        dist.all_to_all_single(data, torch.cat(parts), received, sent, group=self.group)
        return list(data.split(received))


def buckets(named: Iterable[Named], bucket_bytes: int) -> Iterator[list[Named]]:
    """Consecutive tensors of one dtype and one layout over the ranks whose full sizes together fit ``bucket_bytes``
    (one that is larger goes alone)."""
    for _, alike in groupby(named, lambda one: (one[1].dtype, _layout(one[1]))):
        yield from runs(alike, lambda one: one[1].numel() * one[1].element_size(), bucket_bytes)


def _layout(tensor: Tensor) -> Any:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _padded(shard: Tensor, rows: int) -> Tensor:
    """``shard`` flattened and filled up to ``rows`` rows."""
    missing = (rows - shard.shape[0]) * shard.shape[1:].numel()
    return torch.cat([shard.flatten(), shard.new_zeros(missing)]) if missing else shard.flatten()


def gather_bucket(bucket: list[Named], device: torch.device) -> Iterator[Named]:
    """Full tensors of ``bucket``, of one dtype and one layout: one all-gather for all small ones; a large one is
    gathered straight into its own memory, when its turn comes, because copying it twice costs more than a collective.
    Those that are not divided by rows alone are gathered one by one."""
    first = bucket[0][1]
    if not isinstance(first, DTensor) or not sharded_axes(first):
        yield from ((name, local(tensor)) for name, tensor in bucket)
        return
    sharded = cast(list[tuple[str, DTensor]], bucket)  # as the first is
    if row_axis(first) is None:
        yield from ((name, _gather_blocks(tensor, device)) for name, tensor in sharded)
        return
    small = [tensor for _, tensor in sharded if _is_small(tensor)]
    together = _gather_together(small, device) if len(small) > 1 else None
    for name, shard in sharded:
        yield name, next(together) if together and _is_small(shard) else _gather_alone(shard, device)


def _row_group(tensor: DTensor) -> Any:
    """The process group whose ranks together hold ``tensor``, divided by rows."""
    return tensor.device_mesh.get_group(row_axis(tensor))


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() < _SMALL_BYTES


def _rows(tensor: DTensor, size: int) -> int:
    """Rows of a shard, padding included."""
    return -(-tensor.shape[0] // size)


def _gather_alone(tensor: DTensor, device: torch.device) -> Tensor:
    group = _row_group(tensor)
    rows = _rows(tensor, group.size())
    full = torch.empty(rows * group.size(), *tensor.shape[1:], dtype=tensor.dtype, device=device)
    ALL_GATHER(full.view(-1), _padded(local(tensor).to(device), rows), group=group)
    return full[:tensor.shape[0]]


def _gather_together(tensors: list[DTensor], device: torch.device) -> Iterator[Tensor]:
    group = _row_group(tensors[0])
    size = group.size()
    rows = [_rows(tensor, size) for tensor in tensors]
    mine = torch.cat([_padded(local(tensor).to(device), n) for tensor, n in zip(tensors, rows)])
    full = mine.new_empty(size, mine.numel())
    ALL_GATHER(full.view(-1), mine, group=group)
    offset = 0
    for tensor, n in zip(tensors, rows):
        width = n * tensor.shape[1:].numel()
        yield full[:, offset:offset + width].reshape(n * size, *tensor.shape[1:])[:tensor.shape[0]]
        offset += width


def _gather_blocks(tensor: DTensor, device: torch.device) -> Tensor:
    """The whole of a tensor that is divided in any way: one all-gather per axis, then each block goes to its place."""
    pieces, full = list(shards(tensor)), torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    sizes = [sum(full[block.whole].numel() for block in blocks) for blocks in pieces]
    rows = full.new_zeros(1, max(sizes))
    rows[0, :local(tensor).numel()] = local(tensor).flatten()
    for axis in reversed(sharded_axes(tensor)):
        gathered = rows.new_empty(tensor.device_mesh.size(axis) * len(rows), rows.shape[1])
        ALL_GATHER(gathered.view(-1), rows.view(-1), group=tensor.device_mesh.get_group(axis))
        rows = gathered
    for row, size, blocks in zip(rows, sizes, pieces):
        if blocks:
            shard = row[:size].view([max(at.stop for at in dims) for dims in zip(*(block.shard for block in blocks))])
            for block in blocks:
                full[block.whole] = shard[block.shard]
    return full
