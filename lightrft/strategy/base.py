"""The contract between the trainer and the way models are spread over ranks.

Everything above this layer sees full semantics: losses are *sums over ranks* (each rank back-propagates its share of
one global loss), parameters have their Hugging Face names, and world size 1 needs no branch.
"""
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

Lora = Literal["merged", "apart", "alone"]  # form of the adapters in full_params


@dataclass(frozen=True)
class OptimSpec:
    """AdamW and its schedule. ``schedule`` maps the optimizer step (0, 1, ...) to a factor on ``lr``."""
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    schedule: Callable[[int], float] = lambda step: 1.0


@dataclass
class Prepared:
    """A model placed on its device(s), with its optimizer and scheduler when it is trained."""
    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None  # torch.optim.lr_scheduler.LambdaLR, where there is an optimizer


@dataclass(frozen=True)
class Part:
    """Consecutive elements ``tensor`` of a flattened parameter, for which one rank is responsible.

    ``shape``: shape of the whole parameter; ``start``: number of its elements that come before them.
    """
    tensor: Tensor
    shape: torch.Size
    start: int

    def __mul__(self, factor: float) -> "Part":
        return Part(self.tensor * factor, self.shape, self.start)


class StrategyBase(ABC):
    """Process group, placement, gradients, collectives and state of models."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    distributed: bool = False  # whether there is a process group

    # -- life ---------------------------------------------------------------------------------------------------------
    @abstractmethod
    def setup(self) -> None:
        """Join the process group (if any) and choose the device."""

    @abstractmethod
    def teardown(self) -> None:
        """Leave the process group."""

    @abstractmethod
    def init_model_context(self) -> AbstractContextManager[Any]:
        """Context in which models are built from a config or a checkpoint, in float32 master weights."""

    @abstractmethod
    def prepare(self, model: nn.Module, optim: OptimSpec | None = None, shard_size: int = 0) -> Prepared:
        """Place (shard) ``model``; with ``optim`` also build AdamW over its trainable parameters and the schedule."""

    # -- gradients ----------------------------------------------------------------------------------------------------
    @abstractmethod
    def backward(self, loss: Tensor, prepared: Prepared, last: bool = True) -> None:
        """Back-propagate this rank's share of the loss. Gradients are *summed* over ranks, and only when ``last``."""

    @abstractmethod
    def optimizer_step(self, prepared: Prepared, max_norm: float = 0.0) -> float:
        """Clip to the global norm, step, advance the schedule, clear gradients; return the norm before clipping.

        A norm that is not finite (the same on all ranks) clears the gradients and changes nothing else.
        """

    @abstractmethod
    def discard_gradients(self, prepared: Prepared) -> None:
        """Drop every gradient accumulated since the last optimizer step, reduced or not."""

    @abstractmethod
    def gradients(self, prepared: Prepared) -> dict[str, Tensor]:
        """This rank's part of every gradient accumulated since the last optimizer step, by parameter name.

        They share storage with the model. Call this after a backward pass that was the ``last``.
        """

    @abstractmethod
    def global_norm(self, prepared: Prepared, parts: list[Tensor]) -> float:
        """Norm over all ranks of tensors that are sharded as :meth:`gradients` are; a collective."""

    # -- collectives --------------------------------------------------------------------------------------------------
    @abstractmethod
    def all_reduce(self, value: Tensor, op: str = "sum") -> Tensor:
        """Sum, max or min over ranks, out of place; any device, any dtype."""

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order (pickled; tensors arrive on CPU)."""

    @abstractmethod
    def exchange(self, outgoing: list[Any]) -> list[Any]:
        """Send ``outgoing[r]`` to rank r; return what each rank has sent to this one, in rank order (pickled)."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    def any_rank(self, flag: bool) -> bool:
        """True on all ranks if ``flag`` is true on any."""
        return bool(self.all_reduce(torch.tensor(int(flag)), "max").item())

    def sync_count(self, count: int) -> int:
        """The largest ``count`` of any rank. All ranks must run the same number of forward and backward passes per
        optimizer step, so a rank with fewer micro-batches pads with empty ones (loss mask all False) up to this
        number."""
        return int(self.all_reduce(torch.tensor(count), "max").item())

    @property
    def is_main(self) -> bool:
        """Rank 0."""
        return self.rank == 0

    # -- weights and state --------------------------------------------------------------------------------------------
    @abstractmethod
    def full_params(self, model: nn.Module, bucket_bytes: int = 512 << 20,
                    lora: Lora = "merged") -> Iterator[tuple[str, Tensor]]:
        """Full (unsharded) parameters of the wrapped HF model under their HF names, gathered in buckets; LoRA merged,
        or its matrices "apart" from the base weights, or "alone" (:func:`lightrft.models.lora.apart_params`).

        A collective: every rank iterates to the end. Tied parameters come once.
        """

    @abstractmethod
    def parts(self, model: nn.Module) -> Iterator[tuple[str, Part]]:
        """This rank's part of every parameter, under the names and in the order of :meth:`full_params` (LoRA apart). No
        collective: nothing moves. One rank is responsible for each element, whoever else holds it."""

    def free_full(self, model: nn.Module) -> None:
        """Free the full weights that a forward pass without a backward pass leaves behind; nothing by default."""

    @abstractmethod
    def offload(self, prepared: Prepared, optimizer_only: bool = False) -> None:
        """Move parameters, gradients and optimizer state (or only the latter) to host memory."""

    @abstractmethod
    def reload(self, prepared: Prepared) -> None:
        """Undo :meth:`offload`."""

    @abstractmethod
    def state_dict(self, prepared: Prepared) -> dict[str, Any]:
        """Model, optimizer and scheduler state, sharded as stored, in the form that ``torch.distributed.checkpoint``
        saves."""

    @abstractmethod
    def load_state_dict(self, prepared: Prepared, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned and the checkpoint filled in."""

    @abstractmethod
    def save_model(self, prepared: Prepared, path: Path, dtype: torch.dtype | None = None) -> None:
        """Write HF safetensors and config (LoRA: adapter in ``path/adapter`` and merged weights in ``path``).
        Collective."""
