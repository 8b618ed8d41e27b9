"""Measures what is kept of a forward pass for its backward pass."""
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn, Tensor
from torch.utils import checkpoint


def saved_bytes(model: nn.Module, forward: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes of the storages that ``forward`` saves for its backward pass, without parameters of ``model``; its output.

    Results that selective recomputation keeps are no saved tensors of autograd: they are read where torch puts them.
    """
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    class Keeping(checkpoint._VersionWrapper):

        def __init__(self, value: Any) -> None:
            super().__init__(value)
            kept.update({value.untyped_storage().data_ptr(): value} if isinstance(value, Tensor) else {})

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), \
            mock.patch.object(checkpoint, "_VersionWrapper", Keeping):
        out = forward()
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights), out
