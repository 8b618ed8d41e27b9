"""Materialization of models whose weights are still in files: a rank allocates its part of each tensor and reads it."""
from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lightrft.strategy.sharding import filled, ReadsBlock, Slices
from lightrft.utils.tensors import on_meta, replace_tensors

Builder = Callable[[], nn.Module]  # builds a model when it is its turn


@runtime_checkable
class ReadsWeights(Protocol):
    """A module that may have tensors on the meta device and reads them from files."""

    def read(self, name: str, at: Slices) -> Tensor:
        """Return the block at the indices ``at`` of the tensor that has ``name`` in this module."""


def reader(model: nn.Module) -> ReadsBlock:
    """Return what reads the tensors of ``model`` on the meta device."""
    if isinstance(model, ReadsWeights):
        return model.read

    def refuse(name: str, at: Slices) -> Tensor:
        raise ValueError(f"{name} of {type(model).__name__} is on the meta device, and nothing can read it")

    return refuse


def read_elements(model: nn.Module, name: str, shape: torch.Size, start: int, count: int) -> Tensor:
    """Return ``count`` (at least 1) elements, from ``start`` on, of a flattened tensor that ``model`` reads; of its
    file, the rows that hold them are read."""
    width = shape[1:].numel()
    first = start // width
    rows = reader(model)(name, (slice(first, -(-(start + count) // width)), ))
    return rows.reshape(-1)[start - first * width:][:count]


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give the tensors of ``model`` on the meta device memory on ``device`` and their values: of a sharded one this
    rank's blocks. Tensors follow one another, so that one is read at a time."""

    with torch.no_grad():
        replace_tensors(model, on_meta, partial(filled, device, reader(model)))
