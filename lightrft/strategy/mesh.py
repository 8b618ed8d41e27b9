"""Mesh: the ranks that run together, and what each of them has a share of: samples, responses, weights.

Ranks that divide one thing need not be those that divide another. With tensor or sequence parallelism several ranks
train the same samples; an engine on several ranks takes the responses of all of them. So code above this layer asks
the mesh for its share of a thing, and never counts ranks itself. Today every rank has a share of its own of both.
"""
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightrft.utils.errors import UserError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Share:
    """Share number ``index`` of ``size``: the one of this process, in something that ranks divide among them."""
    index: int
    size: int

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return this share of ``items``, which are dealt one by one."""
        return items[self.index::self.size]

    def all(self, items: Sequence[Item]) -> list[Sequence[Item]]:
        """Return every share of ``items``, in order."""
        return [items[index::self.size] for index in range(self.size)]


@dataclass(frozen=True)
class Mesh:
    """Ranks that run together.

    Args:
        ranks: ranks of the default process group, ascending.
        rank: index of this process among them.
        device_type: "cuda" or "cpu".
        group: process group of ``ranks``; None: the default one, which consists of them.
    """
    ranks: Sequence[int]
    rank: int
    device_type: str = "cpu"
    group: dist.ProcessGroup | None = None

    @property
    def data(self) -> Share:
        """The share of the samples that this process trains on."""
        return Share(self.rank, len(self.ranks))

    @property
    def engines(self) -> Share:
        """The share of the responses that this process generates."""
        return Share(self.rank, len(self.ranks))

    def new_group(self) -> dist.ProcessGroup:
        """Make one more process group of these ranks, on the CPU; every rank calls it equally often."""
        return dist.new_group(backend="gloo") if self.group is None else group_of(self.ranks, backend="gloo")

    def dense(self, shard_size: int = 0) -> DeviceMesh:
        """Make the mesh of the weights: ``("shard",)`` over all ranks, or ``("replicate", "shard")`` when fewer than
        all share one copy. Every rank of the mesh calls it equally often. One for experts would be made beside it.

        Args:
            shard_size: ranks that share one copy; 0 for all. Neighbours share, so a copy stays within a node.

        Raises:
            UserError: ``shard_size`` does not divide the number of ranks.
        """
        count = len(self.ranks)
        size = shard_size or count
        if size < 0 or count % size:
            valid = [n for n in range(1, count + 1) if count % n == 0]
            nearest = min(valid, key=lambda n: abs(n - size))
            raise UserError(f"shard size {size} does not divide the {count} ranks; the nearest that does is {nearest} "
                            "(--fsdp_shard_size, --initial_model_shard_size)")
        shape, names = ((count, ), ("shard", )) if size == count else ((count // size, size), ("replicate", "shard"))
        if self.group is None:
            return init_device_mesh(self.device_type, shape, mesh_dim_names=names)
        return self._of_groups(torch.tensor(self.ranks).view(shape), names)

    def _of_groups(self, table: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
        """Make a mesh of some ranks of the default group, without the others."""
        at = (table == self.ranks[self.rank]).nonzero()[0].tolist()
        lines = [table.movedim(axis, -1)[tuple(at[:axis] + at[axis + 1:])].tolist() for axis in range(table.ndim)]
        groups = [group_of(line) for line in lines]
        return DeviceMesh.from_group(groups if table.ndim > 1 else groups[0], self.device_type,
                                     mesh=table if table.ndim > 1 else None, mesh_dim_names=names)


def group_of(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Make a process group of these ``ranks``; the other ranks take no part."""
    return dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
