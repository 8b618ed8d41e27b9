"""Trace of an engine's loader on full weights: the part of each that it copies and the target, without copying."""
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightrft.rollout.weight_sync.sync import Shapes
from lightrft.utils.errors import UserError

Load = Callable[[Iterator[tuple[str, Tensor]]], Any]  # gives weights to the engine's own loader


class Copy(NamedTuple):
    """Copy of ``part`` of a full ``weight`` (both without data) to ``view``, in the engine's model."""
    view: Tensor
    part: Tensor
    weight: Tensor

    @property
    def start(self) -> tuple[int, ...] | None:
        """Index in the weight of the part's first element; None where the part is not a block of the weight with the
        same strides and unchanged values (SGLang's loader adds 1 to norms of Gemma)."""
        of_weight = self.part.untyped_storage()._cdata == self.weight.untyped_storage()._cdata
        if not of_weight or self.weight._version or self._block is None or self.part.shape != self.view.shape:
            return None
        return tuple(int(i) for i in torch.unravel_index(torch.tensor(self.part.storage_offset()), self.weight.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part, with a 1 for every dimension that it lacks: of one expert, or of the channels of a
        convolution, whose middle dimension vLLM drops in some models."""
        return tuple(self.part.shape) if self._block is None else self._block

    @property
    def _block(self) -> tuple[int, ...] | None:
        """``shape``, if each dimension of the part is one of the weight."""
        left, sizes = [*zip(self.part.shape, self.part.stride())], []
        for size, stride in zip(reversed(self.weight.shape), reversed(self.weight.stride())):
            fits = left and left[-1][0] <= size and left[-1][1] == stride
            sizes.append(left.pop()[0] if fits else 1)
        return None if left else tuple(sizes[::-1])


class _Watch(TorchDispatchMode):
    """Dispatch mode that skips copies of weights and records the target and the source of each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept an operation; torch calls this for every one."""
        if func is torch.ops.aten.copy_.default and args[1].is_meta:  # else the model copies its own
            self.found.append((args[0], args[1]))
            return args[0]
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def trace_loader(load: Load, shapes: Shapes) -> dict[str, list[Copy]]:
    """Trace the copies that ``load`` makes of weights of these ``shapes``.

    Raises:
        UserError: ``load`` refuses a weight.
    """
    found: dict[str, tuple[Tensor, list[tuple[Tensor, Tensor]]]] = {}
    watch = _Watch()

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, shape in shapes.items():
            weight = torch.empty(shape, device="meta")
            watch.found = []
            found[name] = weight, watch.found
            yield name, weight

    try:
        with watch:
            load(stream())
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"the engine cannot load {next(reversed(found), 'weights')}: {error}; its weights of this "
                        "model differ in form from the trainer's; use another --engine_type") from error
    return {
        name: [Copy(view, part, weight) for view, part in _once(copies)] for name, (weight, copies) in found.items()
    }


def _once(copies: list[tuple[Tensor, Tensor]]) -> Iterable[tuple[Tensor, Tensor]]:
    """Drop repetitions: some loaders fill the tensor that tied weights share under either name."""
    return {(view.data_ptr(), view.shape, part.storage_offset()): (view, part) for view, part in copies}.values()
