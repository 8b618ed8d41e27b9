"""Memory for models whose weights are still in files: a rank allocates its part of each and reads it."""
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lightrft.strategy.optimizer import first_row, like, local
from lightrft.utils.module_tensors import on_meta, replace_tensors

Builder = Callable[[], nn.Module]  # builds a model when it is its turn


@runtime_checkable
class ReadsWeights(Protocol):
    """A module that may have tensors on the meta device and reads them from files."""

    def read(self, name: str, first: int, rows: int) -> Tensor:
        """Return rows of the tensor that has ``name`` in this module."""


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give the tensors of ``model`` on the meta device memory on ``device`` and their values: of a sharded one this
    rank's rows. Tensors follow one another, so that one is read at a time."""

    def filled(name: str, tensor: Tensor) -> Tensor:
        if not isinstance(model, ReadsWeights):
            raise ValueError(f"{name} of {type(model).__name__} is on the meta device, and nothing can read it")
        own = torch.empty_like(local(tensor), device=device)
        if own.numel():
            own.copy_(model.read(name, first_row(tensor), len(own) if own.ndim else 1))
        return like(own, tensor)

    with torch.no_grad():
        replace_tensors(model, on_meta, filled)
