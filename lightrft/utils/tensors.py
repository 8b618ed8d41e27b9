"""Tensors: copies from the host that do not wait for a GPU, runs up to a size, replacement in a module, modules that
stay in float32."""
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import nn, Tensor


def upload(values: Tensor | np.ndarray | list[int], device: torch.device | str) -> Tensor:
    """Copy a tensor, an array or a list to ``device``; to a GPU through pinned memory, so that the host does not wait
    for kernels before it.

    torch's allocator reuses the pinned memory only after the copy.
    """
    tensor = torch.as_tensor(values)
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def uploads(tensors: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """:func:`upload` of each tensor, by name."""
    return {name: upload(tensor, device) for name, tensor in tensors.items()}


Item = TypeVar("Item")


def runs(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Yield consecutive items whose sizes together are at most ``most``; a larger one is alone."""
    run: list[Item] = []
    total = 0
    for item in items:
        if run and total + size(item) > most:
            yield run
            run, total = [], 0
        run.append(item)
        total += size(item)
    if run:
        yield run


def replace_tensors(model: nn.Module, chosen: Callable[[Tensor], bool], make: Callable[[str, Tensor], Tensor]) -> None:
    """Put ``make(name, tensor)`` in the place of every ``chosen`` parameter and buffer of ``model``.

    A tensor that is held in several places is made once, for its first name, and stays tied. Parameters stay
    parameters, trainable or not; a parameter that ``make`` returns is taken itself.
    """
    made: dict[Tensor, Tensor] = {}  # by identity

    def replaced(name: str, tensor: Tensor) -> Tensor:
        if tensor not in made:
            value = make(name, tensor.detach())
            if isinstance(value, nn.Parameter):
                value.requires_grad_(tensor.requires_grad)
            elif isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value, tensor.requires_grad)
            made[tensor] = value
        return made[tensor]

    for prefix, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None and chosen(tensor):
                    held[key] = replaced(f"{prefix}.{key}" if prefix else key, tensor)


def on_meta(tensor: Tensor) -> bool:
    """Return True for a tensor without memory."""
    return tensor.is_meta


def to_meta(model: nn.Module, chosen: Callable[[Tensor], bool]) -> None:
    """Put tensors without memory in the place of the ``chosen`` ones."""
    replace_tensors(model, chosen,
                    lambda name, tensor: torch.empty_like(tensor, device="meta", memory_format=torch.contiguous_format))


def keep_float32(module: nn.Module) -> None:
    """Let ``module`` compute in float32 where the rest of its model computes in bfloat16."""
    vars(module)["_keeps_float32"] = True


def keeps_float32(module: nn.Module) -> bool:
    """Return True for a module of :func:`keep_float32`."""
    return "_keeps_float32" in vars(module)
