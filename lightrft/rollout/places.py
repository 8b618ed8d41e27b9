"""Where an engine's model keeps each weight of the trainer: fused tensors, shards, copies."""
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightrft.ops.fingerprint import Piece, fingerprints
from lightrft.rollout.named_weights import Shapes

Load = Callable[[Iterator[tuple[str, Tensor]]], Any]  # gives weights to the engine's own loader
Key = tuple[tuple[int, ...], tuple[int, ...]]  # where a part begins in the full weight, and its shape


@dataclass(frozen=True)
class Place:
    """``view`` into the engine's model, whose first element is that at index ``start`` of the full weight."""
    view: Tensor
    start: tuple[int, ...]

    @property
    def key(self) -> Key:
        """Which part it is."""
        return self.start, tuple(self.view.shape)


class _Copies(TorchDispatchMode):
    """Does no copy: notes for each where it would have gone and what would have been copied."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every operation."""
        if func is torch.ops.aten.copy_.default:
            self.found.append((args[0], args[1]))
            return args[0]
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _copies(load: Load, shapes: Shapes) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """What ``load`` copies where for each full weight, without copying: (destination, meta view of the weight)."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    copies = _Copies()

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, shape in shapes.items():
            copies.found = found[name] = []
            yield name, torch.empty(shape, device="meta")

    with copies:
        load(stream())
    return found


def _place(view: Tensor, part: Tensor, shape: torch.Size) -> Place | None:
    """None where ``part`` is not a block of a weight of ``shape``, laid out as the view is."""
    whole = torch.empty(shape, device="meta")
    if part.ndim != whole.ndim or part.stride() != whole.stride() or part.shape != view.shape:
        return None
    return Place(view, tuple(int(i) for i in torch.unravel_index(torch.tensor(part.storage_offset()), shape)))


class Places:
    """The weights that can be read back, by HF name. A collective of the ranks of ``group``, several of which may hold
    the same part (norms, routers, key and value heads that are fewer than the ranks).

    A weight whose parts are no blocks of it, do not cover it, lie twice on one rank or in one of the layers
    ``derived``, cannot; without ``shapes`` none can.

    Attributes:
        dtypes: what each is held in.
        held: the parts that this rank holds.
    """

    def __init__(self, load: Load, shapes: Shapes, group: dist.ProcessGroup | None = None,
                 derived: Iterable[nn.Module] = ()) -> None:
        self.group = group
        self.dtypes: dict[str, torch.dtype] = {}
        self.held: dict[str, dict[Key, Tensor]] = {}
        self.shapes = shapes
        self._parts: dict[str, list[tuple[Key, bool]]] = {}  # of all ranks, and whether this one is the first with it
        found = _copies(load, shapes)
        changed = {parameter.untyped_storage().data_ptr() for layer in derived for parameter in layer.parameters()}
        places = {name: [None if view.untyped_storage().data_ptr() in changed else _place(view, part, shapes[name])
                         for view, part in copies] for name, copies in found.items()}  # yapf: disable
        here = {name: {one.key: one.view for one in parts} for name, parts in places.items() if all(parts)}
        here = {name: parts for name, parts in here.items() if len(parts) == len(places[name])}
        keys = self._of_all_ranks({name: list(parts) for name, parts in here.items()})
        for name, parts in here.items():
            ranks = [set(there.get(name, ())) for there in keys]
            if sum(prod(shape) for _, shape in set().union(*ranks)) == shapes[name].numel():
                before = set().union(*ranks[:dist.get_rank(group) if group else 0])
                self.dtypes[name], self.held[name] = next(iter(parts.values())).dtype, parts
                self._parts[name] = [(key, key in parts and key not in before) for key in sorted(set().union(*ranks))]

    def _of_all_ranks(self, keys: dict[str, list[Key]]) -> list[dict[str, list[Key]]]:
        if self.group is None:
            return [keys]
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, keys, group=self.group)
        return found

    def fingerprints(self, names: list[str]) -> Tensor:
        """Of the weights as they lie now, whole: int64 [names] on the CPU. A collective of the ranks of the group.

        A rank takes the parts that it holds itself, and those it lacks from the first rank that has them: so a copy
        that is wrong shows on the ranks that compute with it.
        """
        parts = [(i, key, first) for i, name in enumerate(names) for key, first in self._parts[name]]
        here = torch.tensor([key in self.held[names[i]] for i, key, _ in parts], dtype=torch.bool)
        pieces = [Piece(self.held[names[i]][key], None, self.shapes[names[i]], key[0])
                  for i, key, _ in parts if key in self.held[names[i]]]  # yapf: disable
        values = torch.zeros(len(parts), dtype=torch.int64)
        if pieces:
            values[here] = fingerprints(pieces).cpu()
        if self.group is not None:
            theirs = values * torch.tensor([first for *_, first in parts], dtype=torch.int64)
            dist.all_reduce(theirs, group=self.group)
            values = torch.where(here, values, theirs)
        return torch.zeros(len(names),
                           dtype=torch.int64).index_add_(0, torch.tensor([i for i, *_ in parts], dtype=torch.int64),
                                                         values)
