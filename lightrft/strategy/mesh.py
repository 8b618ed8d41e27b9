"""Mesh: the ranks that run together, and what each of them has a share of: samples, responses, weights.

Ranks that divide one thing need not be those that divide another. With tensor or sequence parallelism several ranks
train the same samples, and each of them still generates responses of its own. So code above this layer asks the mesh
for its share of a thing, and never counts ranks itself.
"""
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightrft.utils.errors import UserError

Item = TypeVar("Item")
_CHECKS = Counter[str]()  # of the numbers of groups, in this process, by the ranks of the group


@dataclass(frozen=True)
class Share:
    """Share number ``index`` of ``size``: the one of this process, in something that ranks divide among them.

    ``replica``: its place among the ranks that have this same share.
    """
    index: int
    size: int
    replica: int = 0

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return this share of ``items``, which are dealt one by one."""
        return items[self.index::self.size]

    def all(self, items: Sequence[Item]) -> list[Sequence[Item]]:
        """Return every share of ``items``, in order."""
        return [items[index::self.size] for index in range(self.size)]


@dataclass(frozen=True)
class Axes:
    """Number of ranks that divide a sequence (``sp``), a layer (``tp``) or the experts of a layer (``ep``).

    Neighbours divide the same one. The ``sp * tp`` ranks of one data rank hold the same samples; experts are divided
    over data ranks too.
    """
    sp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def replicas(self) -> int:
        """Number of ranks that train the same samples."""
        return self.sp * self.tp

    @property
    def divided(self) -> list[str]:
        """The axes of more than one rank, as ``"tp 2"``."""
        return [f"{name} {size}" for name, size in vars(self).items() if size > 1]


@dataclass(frozen=True)
class Mesh:
    """Ranks that run together.

    Args:
        ranks: ranks of the default process group, ascending.
        rank: index of this process among them.
        device_type: "cuda" or "cpu".
        group: process group of ``ranks``; None: the default one, which consists of them.
        axes: what else than samples the ranks divide.

    Raises:
        UserError: the axes do not divide the number of ranks.
    """
    ranks: Sequence[int]
    rank: int
    device_type: str = "cpu"
    group: dist.ProcessGroup | None = None
    axes: Axes = Axes()

    def __post_init__(self) -> None:
        for name, size in (("sp * tp", self.axes.replicas), ("ep", self.axes.ep)):
            _check_divides(f"{name} = {size}", size, len(self.ranks), "ranks")

    @property
    def data(self) -> Share:
        """The share of the samples that this process trains on."""
        return Share(self.data_rank(self.rank), len(self.ranks) // self.axes.replicas, self.rank % self.axes.replicas)

    @property
    def engines(self) -> Share:
        """The share of the responses that this process generates: every rank has its own, also one that shares an
        engine, which takes the requests of all its ranks."""
        return Share(self.rank, len(self.ranks))

    def data_rank(self, rank: int) -> int:
        """Return the index of the share of the samples that ``rank`` trains on."""
        return rank // self.axes.replicas

    def first_of(self, rank: int) -> int:
        """Return the first of the ranks that train the samples of ``rank``: where something counts once, it counts."""
        return self.data_rank(rank) * self.axes.replicas

    def new_group(self) -> dist.ProcessGroup:
        """Make one more process group of these ranks, on the CPU; every rank calls it equally often."""
        return dist.new_group(backend="gloo") if self.group is None else group_of(self.ranks, "gloo")

    def neighbours(self, size: int, limit_s: int) -> dist.ProcessGroup | None:
        """Make the group, on the CPU, of the ``size`` neighbours of which this rank is one; None for 1. Every rank of
        the mesh calls it equally often.

        Args:
            limit_s: seconds after which a collective of the group that does not finish is an error.

        Raises:
            UserError: ``size`` does not divide the ranks.
        """
        _check_divides(f"engine_tp_size {size}", size, len(self.ranks), "ranks that generate")
        first = self.rank // size * size
        return group_of(self.ranks[first:first + size], "gloo", limit_s) if size > 1 else None

    def dense(self, shard_size: int = 0) -> DeviceMesh:
        """Make the mesh of the weights: ``("shard",)`` over all data ranks, or ``("replicate", "shard")`` when fewer
        than all share one copy, with the axes ``"sp"`` and ``"tp"`` of more than one rank after them. Every rank of the
        mesh calls it equally often.

        Args:
            shard_size: data ranks that share one copy; 0 for all. Neighbours share, so a copy stays within a node.

        Raises:
            UserError: ``shard_size`` does not divide the number of data ranks.
        """
        copies, size = self._copies(shard_size)
        return self._of_shape({"replicate": copies, "shard": size, "sp": self.axes.sp, "tp": self.axes.tp})

    def experts(self, shard_size: int = 0) -> DeviceMesh:
        """Make the mesh of the experts, over the same ranks again: those of one copy hold ``ep`` parts of the experts,
        each divided over the ``"efsdp"`` ranks that hold the same part. Every rank of the mesh calls it equally often.

        Args:
            shard_size: that of :meth:`dense`.

        Raises:
            UserError: ``ep`` does not divide the ranks of one copy.
        """
        copies, size = self._copies(shard_size)
        ranks, ep = size * self.axes.replicas, self.axes.ep
        _check_divides(f"ep = {ep}", ep, ranks, "ranks of one copy")
        return self._of_shape({"replicate": copies, "efsdp": ranks // ep, "ep": ep})

    def _copies(self, shard_size: int) -> tuple[int, int]:
        """Return the number of copies of the weights, and of the data ranks that share each."""
        count = self.data.size
        size = shard_size or count
        _check_divides(f"shard size {size}", size, count, "ranks", " (--fsdp_shard_size, --initial_model_shard_size)")
        return count // size, size

    def _of_shape(self, sizes: dict[str, int]) -> DeviceMesh:
        """Make the mesh of these axes, without those of one rank but the one that shards."""
        sizes = {name: size for name, size in sizes.items() if size > 1 or name in ("shard", "efsdp")}
        shape, names = tuple(sizes.values()), tuple(sizes)
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


@cache
def mesh_of_all(size: int, rank: int, device_type: str, axes: Axes) -> Mesh:
    """Return the mesh of all ``size`` ranks, of which this process is ``rank``."""
    return Mesh(range(size), rank, device_type, axes=axes)


def _check_divides(what: str, size: int, count: int, of: str, where: str = "") -> None:
    """Raise an error that names ``what`` and the nearest valid size, if ``size`` does not divide ``count``."""
    if size < 1 or count % size:
        valid = [n for n in range(1, count + 1) if count % n == 0]
        nearest = min(valid, key=lambda n: abs(n - size))
        raise UserError(f"{what} does not divide the {count} {of}; the nearest that does is {nearest}{where}")


def group_of(ranks: Sequence[int], backend: str | None = None, limit_s: int | None = None) -> dist.ProcessGroup:
    """Make a process group of these ``ranks``; the other ranks take no part.

    Args:
        limit_s: seconds of a collective of the group; None: as of the default group.

    Raises:
        RuntimeError: the ranks have made different numbers of groups before. Torch names a group by that number, and
            each would wait for the others under a name of its own.
    """
    _check_counts(list(ranks), len(dist.distributed_c10d._world.pg_names))
    timeout = None if limit_s is None else timedelta(seconds=limit_s)
    return dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)


def _check_counts(ranks: list[int], made: int) -> None:
    """Raise an error unless every one of ``ranks`` has ``made`` as many groups as this one."""
    name = "_".join(map(str, ranks))
    _CHECKS[name] += 1
    store = dist.PrefixStore(f"lightrft/groups/{name}/{_CHECKS[name]}", dist.distributed_c10d._get_default_store())
    store.set(str(dist.get_rank()), str(made))
    counts = {rank: int(store.get(str(rank))) for rank in ranks}
    if len({*counts.values()}) > 1:
        raise RuntimeError(f"the ranks {ranks} begin a process group together, and have made different numbers of "
                           f"groups before: {', '.join(f'rank {rank} {count}' for rank, count in counts.items())}. "
                           "Every rank has to make the same groups, in the same order")
