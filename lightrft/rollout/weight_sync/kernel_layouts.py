"""Layouts of weights that an engine rearranges for its kernels, found by sending it numbers.

A kernel may want the experts of a MoE in tiles, padded, or gates and ups in turns. In each case it moves elements. So
a weight is sent whose elements are their own numbers; the numbers in the engine then show where each element went.
"""
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import cast, NamedTuple

import torch
from torch import Tensor, nn

from lightrft.rollout.weight_sync.load_trace import Copy, Load

Order = Tensor | None  # flat index in its slot of each element of a block: int64 [elements]; None: that of the view


class _Block(NamedTuple):
    """Block that one copy writes to its slot, the part of a layer's tensor for one expert. ``number``: number of the
    first element of the matrix (rows and columns ``whole``) that contains the block, from ``start``."""
    weight: int
    tensor: int
    slot: int
    number: int
    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    view: tuple[tuple[int, ...], tuple[int, ...], int]  # shape, stride and offset in the slot

    @property
    def kind(self) -> tuple[object, ...]:
        """Key that is the same for all experts."""
        return self.tensor, *self[3:]

    def numbers(self) -> Tensor:
        """Numbers of its elements: int64 [elements]."""
        (row, column), (rows, columns) = self.start, self.shape
        left = self.number + (torch.arange(row, row + rows) * self.whole[1] + column)
        return (left[:, None] + torch.arange(columns)).flatten()


class Layouts:
    """Layouts of the layers of one model. Layers that are loaded alike have the same layout: one of them is sent
    numbers, and holds them until its weights come.

    Args:
        load: loads some weights as every sync does, with all that the engine derives from them.
    """

    def __init__(self, load: Load) -> None:
        self.load = load
        self._known: dict[tuple[object, ...], list[Order] | None] = {}

    def orders(self, layer: nn.Module, copies: Mapping[str, Sequence[Copy]]) -> list[Order] | None:
        """Orders of the elements of each of ``copies`` into ``layer``, by name of their weight; None: some elements are
        not found, because they are not moved but changed."""
        tensors: list[Tensor] = list(layer.parameters())
        blocks = _blocks(tensors, copies)
        key = (type(layer), *((one.shape, one.dtype) for one in tensors), *blocks)
        if key not in self._known:
            self._known[key] = self._measure(tensors, copies, blocks)
        return self._known[key]

    def _measure(self, tensors: list[Tensor], copies: Mapping[str, Sequence[Copy]],
                 blocks: list[_Block]) -> list[Order] | None:
        kinds = {block.kind: block for block in reversed(blocks)}
        stored = self._numbers_in([slot(tensors[one.tensor], one.slot) for one in kinds.values()], tensors, copies,
                                  blocks)  # yapf: disable
        orders = {}
        for (kind, block), numbers in zip(kinds.items(), stored):
            wanted, (known, at) = block.numbers().to(numbers.device), numbers.sort()
            order = at[torch.searchsorted(known, wanted).clamp_(max=len(at) - 1)]
            if not torch.equal(numbers[order], wanted):
                return None
            view = torch.arange(len(at), device=at.device).as_strided(*block.view).flatten()
            orders[kind] = None if torch.equal(order, view) else order
        return [orders[block.kind] for block in blocks]

    def _numbers_in(self, slots: list[Tensor], tensors: list[Tensor], copies: Mapping[str, Sequence[Copy]],
                    blocks: list[_Block]) -> list[Tensor]:
        """Numbers stored in each of ``slots``, int64 like it: sent digit by digit, each small enough for the dtypes."""
        bits = min(1 - round(math.log2(torch.finfo(one.dtype).eps)) for one in tensors)
        found = [torch.zeros(one.shape, dtype=torch.int64, device=one.device) for one in slots]
        sent = {block.weight: block for block in blocks}

        def stream(shift: int) -> Iterator[tuple[str, Tensor]]:
            for i, (name, (copy, *_)) in enumerate(copies.items()):
                block, target = sent[i], copy.view
                numbers = torch.arange(math.prod(block.whole), device=target.device) + block.number
                digit = (numbers >> shift) & ((1 << bits) - 1)
                yield name, digit.to(target.dtype).view(copy.weight.shape[-2:]).expand(copy.weight.shape)

        most = max(block.number + math.prod(block.whole) for block in blocks)
        for shift in range(0, most.bit_length(), bits):
            self.load(stream(shift))
            for numbers, one in zip(found, slots):
                numbers += one.long() << shift
        return found


def slot(tensor: Tensor, index: int) -> Tensor:
    """Slot of one expert, flat."""
    return tensor.detach().flatten(1)[index]


def slot_of(copy: Copy, tensor: Tensor) -> int:
    """Index of the expert in ``tensor`` that ``copy`` goes to."""
    return copy.view.storage_offset() // tensor.stride(0)


def _blocks(tensors: list[Tensor], copies: Mapping[str, Sequence[Copy]]) -> list[_Block]:
    """Blocks of all copies; weights that share a slot have distinct numbers."""
    found, free = [], dict[tuple[int, int], int]()
    index = {one.untyped_storage().data_ptr(): i for i, one in enumerate(tensors)}
    for i, group in enumerate(copies.values()):
        at = [index[copy.view.untyped_storage().data_ptr()] for copy in group]
        slots = [(j, slot_of(copy, tensors[j])) for j, copy in zip(at, group)]
        whole = (1, 1, *group[0].weight.shape)[-2:]
        number = max(free.get(one, 1) for one in slots)
        free |= dict.fromkeys(slots, number + math.prod(whole))
        for copy, (j, k) in zip(group, slots):
            start, shape = ((0, *cast(tuple[int, ...], copy.start))[-2:], (1, *copy.shape)[-2:])
            offset = int(copy.view.storage_offset()) - k * tensors[j].stride(0)
            view = tuple(copy.view.shape), copy.view.stride(), offset
            found.append(_Block(i, j, k, number, whole, start, shape, view))
    return found
