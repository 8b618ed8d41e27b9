"""Measures what is kept of a forward pass for its backward pass."""
from collections import deque
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn, Tensor
from torch.utils._pytree import tree_leaves

from lightrft.models import recomputation


def saved_bytes(model: nn.Module, forward: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes of the storages that ``forward`` saves for its backward pass, without parameters of ``model``; its output.

    Results that selective recomputation keeps are no saved tensors of autograd: they are read where they are put.
    """
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    class Results(deque[Any]):

        def append(self, result: Any) -> None:
            super().append(result)
            kept.update({value.untyped_storage().data_ptr(): value
                         for value in tree_leaves(result) if isinstance(value, Tensor)})  # yapf: disable

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), \
            mock.patch.object(recomputation, "deque", Results):
        out = forward()
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights), out
