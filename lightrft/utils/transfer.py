"""Copies from the host to a GPU that do not wait for it."""
import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """``tensor.to(device)``; to a GPU through pinned memory, so that the host does not wait for kernels before it.

    torch's allocator reuses the pinned memory only after the copy.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
