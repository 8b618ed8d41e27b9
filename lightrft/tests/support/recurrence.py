"""Recurrences of transformers in float64."""
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightrft.models.stateful import stateful


class Double:
    """The module ``torch`` whose float32 is float64: transformers' recurrences compute in float32 whatever they get,
    and a recurrence that begins elsewhere rounds at other tokens."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name == "float32" else getattr(torch, name)


@contextmanager
def in_double(model: torch.nn.Module) -> Iterator[None]:
    """Let the layers with state of ``model``, which is in float64, compute in it."""
    modules: set[Any] = {sys.modules[type(layer).__module__] for layer in stateful(model)}
    assert modules, "no layer with state"
    try:
        for module in modules:
            module.torch = Double()
        yield
    finally:
        for module in modules:
            module.torch = torch
