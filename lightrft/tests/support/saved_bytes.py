"""Measures what autograd saves in a forward pass."""
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, Tensor


def saved_bytes(model: nn.Module, forward: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes of the storages that ``forward`` saves for its backward pass, without parameters of ``model``; its output.
    """
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights), out
