"""Map from each weight of the trainer to its memory in an engine's model: fused tensors, shards, copies."""
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightrft.ops.fingerprint import Piece, fingerprints
from lightrft.rollout.weight_sync.load_trace import Copy, Load, trace_loader
from lightrft.rollout.weight_sync.kernel_layouts import Layouts, Order, slot, slot_of
from lightrft.rollout.weight_sync.sync import Shapes

Key = tuple[tuple[int, ...], tuple[int, ...]]  # start of a block in the full weight, and its shape


@dataclass(frozen=True)
class WeightSlice:
    """A block of a full weight in the engine's model, of shape ``shape`` from the element at index ``start``.

    ``view``: the block; or, with ``order``, rows of memory, each of which has the elements of a matrix of the block at
    these positions.
    """
    view: Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]
    order: Order = None

    @property
    def key(self) -> Key:
        """Key of the block: its start and shape."""
        return self.start, self.shape

    def read(self) -> Tensor:
        """Read the block, in its shape."""
        return self.view if self.order is None else self.view[:, self.order].view(self.shape)


def _slice_of(copy: Copy, order: Order = None, tensor: Tensor | None = None) -> WeightSlice | None:
    """Slice of ``copy``, whose elements are stored in its view, or in ``order`` in its slot in ``tensor``."""
    if copy.start is None:
        return None
    if order is None or tensor is None:
        return WeightSlice(copy.view.view(copy.shape), copy.start, copy.shape)
    return WeightSlice(slot(tensor, slot_of(copy, tensor))[None], copy.start, copy.shape, order)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _slices(copies: Mapping[str, Sequence[Copy]], derived: Iterable[nn.Module], rearranged: Iterable[nn.Module],
            reload: Load) -> dict[str, list[WeightSlice | None]]:
    """Slices of all copies, by name of the weight; for the arguments see :class:`WeightMap`."""
    hidden = {_address(parameter) for layer in derived for parameter in layer.parameters()}
    slices = {name: [None if _address(copy.view) in hidden else _slice_of(copy) for copy in group]
              for name, group in copies.items()}  # yapf: disable
    layouts = Layouts(reload)
    for layer in rearranged:
        tensors = {_address(parameter): parameter for parameter in layer.parameters()}
        inside = {name: group for name, group in copies.items() if group and _address(group[0].view) in tensors}
        blocks = all(copy.start is not None for group in inside.values() for copy in group)
        orders = layouts.orders(layer, inside) if inside and blocks else None
        following = iter(orders or ())
        slices |= {name: [_slice_of(copy, next(following), tensors[_address(copy.view)]) if orders else None
                          for copy in group] for name, group in inside.items()}  # yapf: disable
    return slices


def _joined(slices: Iterable[WeightSlice]) -> list[WeightSlice]:
    """Join blocks of single experts into one, where all that differ in nothing else are at even distances."""
    groups: dict[tuple[object, ...], list[WeightSlice]] = {}
    for one in sorted(slices, key=lambda one: one.start):
        like = id(one.order), one.start[1:], one.shape, _address(one.view), one.view.stride()
        groups.setdefault(like, []).append(one)
    return [one for group in groups.values() for one in _as_one(group)]


def _as_one(group: list[WeightSlice]) -> list[WeightSlice]:
    first, offsets = group[0], [one.view.storage_offset() for one in group]
    step = (offsets[-1] - offsets[0]) // max(len(group) - 1, 1)
    follow = all(one.shape[0] == 1 and one.start[0] == first.start[0] + i and offsets[i] == offsets[0] + i * step
                 for i, one in enumerate(group))  # yapf: disable
    if len(group) == 1 or not follow:
        return group
    view = first.view.as_strided((len(group), *first.view.shape[1:]), (step, *first.view.stride()[1:]), offsets[0])
    return [WeightSlice(view, first.start, (len(group), *first.shape[1:]), first.order)]


class WeightMap:
    """Map of the weights that can be read back, by HF name. A collective of the ranks of ``group``, several of which
    may hold the same part (norms, routers, key and value heads that are fewer than the ranks).

    A weight cannot be read back if its parts are no blocks of it, do not cover it, are stored twice on one rank or
    belong to one of the layers ``derived``; without ``shapes`` none can.

    Args:
        load: the engine's own loader, which fills the tensors of its model.
        model: the engine's model, every parameter of which must be filled; None: this is checked elsewhere.
        rearranged: layers whose kernels may move the elements of their weights.
        reload: loads some weights as every sync does (:class:`~lightrft.rollout.weight_sync.kernel_layouts.Layouts`);
            the weights of a rearranged layer are numbers afterwards.

    Attributes:
        dtypes: dtype in which each weight is held.
        held: the parts that this rank holds.
        lost: number of elements of each weight that no rank stores; complete weights are left out.
        empty: parameters of the model that receive nothing.
    """

    def __init__(self, load: Load, shapes: Shapes, group: dist.ProcessGroup | None = None,
                 derived: Iterable[nn.Module] = (), rearranged: Iterable[nn.Module] = (), reload: Load | None = None,
                 model: nn.Module | None = None) -> None:
        self.group, self.shapes = group, shapes
        self.dtypes: dict[str, torch.dtype] = {}
        self.held: dict[str, dict[Key, WeightSlice]] = {}
        self.lost: dict[str, int] = {}
        self._parts: dict[str, list[tuple[Key, bool]]] = {}  # of all ranks, and whether this one is the first with it
        rank = dist.get_rank(group) if group else 0
        copies = trace_loader(load, shapes)
        taken = {name: [(one.start or (-1 - rank, i), one.shape) for i, one in enumerate(some)]
                 for name, some in copies.items()}  # yapf: disable
        filled = {_address(copy.view) for some in copies.values() for copy in some}
        self.empty = [name for name, parameter in (model.named_parameters() if model else ())
                      if _address(parameter) not in filled and "scale" not in name]  # yapf: disable
        slices = _slices(copies, derived, rearranged, reload or load)
        here = {name: _joined(one for one in parts if one is not None) for name, parts in slices.items()
                if None not in parts and len(set(taken[name])) == len(parts)}  # yapf: disable
        keys = {name: [one.key for one in parts] for name, parts in here.items()}
        # of the first part: a rank may hold none, where SGLang fills up heads with zeros (on a CPU)
        dtypes = {name: parts[0].view.dtype for name, parts in here.items() if parts}
        everywhere = self._of_all_ranks((taken, keys, dtypes))
        for name, shape in shapes.items():
            if _size(there.get(name, ()) for there, *_ in everywhere) < shape.numel():
                self.lost[name] = shape.numel() - _size(there.get(name, ()) for there, *_ in everywhere)
            elif all(name in there for _, there, _ in everywhere):
                self._keep(name, here[name], [set(there[name]) for _, there, _ in everywhere], rank)
                self.dtypes |= {name: there[name] for *_, there in everywhere if name in there and name in self.held}

    def _keep(self, name: str, parts: list[WeightSlice], ranks: list[set[Key]], rank: int) -> None:
        if _size(ranks) == self.shapes[name].numel():
            before = set().union(*ranks[:rank])
            self.held[name] = {one.key: one for one in parts}
            self._parts[name] = [(key, key in ranks[rank] and key not in before) for key in sorted(set().union(*ranks))]

    def _of_all_ranks(self, mine: Any) -> list[Any]:
        if self.group is None:
            return [mine]
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def fault(self, engine: str) -> str:
        """Reason why no run can use an ``engine`` that skips a weight, or a part of one, or has an extra one."""
        fault = f"{engine} has {self.empty[0]}, for which the trainer sends no weight" if self.empty else ""
        for name, count in list(self.lost.items())[:1]:
            others = f", nor all of {len(self.lost) - 1} others" if len(self.lost) > 1 else ""
            fault = f"{engine} does not hold {count} of the {self.shapes[name].numel()} elements of {name}{others}"
        return fault and (
            f"{fault}: it would generate with random values. This release of the engine stores the model in another "
            "form than the trainer; see lightrft doctor for matching versions, or use another --engine_type")

    def fingerprints(self, names: list[str]) -> Tensor:
        """Current fingerprints of the whole weights: int64 [names] on the CPU. A collective of the ranks of the group.

        A rank uses the parts that it holds itself, and takes those it lacks from the first rank that has them. So a
        wrong copy shows on the ranks that compute with it.
        """
        parts = [(i, key, first) for i, name in enumerate(names) for key, first in self._parts[name]]
        here = torch.tensor([key in self.held[names[i]] for i, key, _ in parts], dtype=torch.bool)
        values = torch.zeros(len(parts), dtype=torch.int64)
        values[here] = self._own([(self.held[names[i]][key], self.shapes[names[i]])
                                  for i, key, _ in parts if key in self.held[names[i]]])  # yapf: disable
        if self.group is not None:
            first_of_each = values * torch.tensor([first for *_, first in parts], dtype=torch.int64)
            dist.all_reduce(first_of_each, group=self.group)
            values = torch.where(here, values, first_of_each)
        return torch.zeros(len(names),
                           dtype=torch.int64).index_add_(0, torch.tensor([i for i, *_ in parts], dtype=torch.int64),
                                                         values)

    @staticmethod
    def _own(held: list[tuple[WeightSlice, torch.Size]]) -> Tensor:
        """Fingerprints of slices of weights of these shapes. Slices with an order are copied to be read, so they are
        read one by one."""
        values = torch.zeros(len(held), dtype=torch.int64)
        plain = [i for i, (one, _) in enumerate(held) if one.order is None]
        for some in (plain, *([i] for i in sorted({*range(len(held))} - {*plain}))):
            if some:
                pieces = [Piece(held[i][0].read(), None, held[i][1], held[i][0].start) for i in some]
                values[some] = fingerprints(pieces).cpu()
        return values


def _size(keys: Iterable[Iterable[Key]]) -> int:
    """Elements of the blocks together, each counted once."""
    return sum(prod(shape) for _, shape in {key for some in keys for key in some})
