"""Moves between the device and host memory."""
import torch
from torch import Tensor

from lightrft.strategy.optimizer import MOMENTS, LocalAdamW


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned host memory (on a machine without CUDA: the tensor itself)."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


def offload_optimizer(optimizer: LocalAdamW) -> None:
    """Move both moments to host memory."""
    for state in optimizer.state.values():
        state.update({key: to_host(state[key]) for key in MOMENTS if key in state})


def reload_optimizer(optimizer: LocalAdamW) -> None:
    """Move both moments to where their parameters are."""
    for shard, state in optimizer.state.items():
        state.update({key: state[key].to(shard.device, non_blocking=True) for key in MOMENTS if key in state})
