"""Base of the strategies that update local tensors: the optimizer step, the state and the export."""
import functools
import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lightrft.config.schema import StrategyConfig
from lightrft.strategy import export
from lightrft.strategy.optimizer import (clip, LocalAdamW, offload_optimizer, part, reload_optimizer, set_schedule_step,
                                         squared_norm)
from lightrft.strategy.base import Lora, Part, Prepared, StrategyBase


@runtime_checkable
class ExportsParams(Protocol):
    """A module that turns its own parameters into those of the HF model it wraps (names stripped, LoRA merged)."""

    def export_params(self, stream: Iterator[tuple[str, Any]], merge: bool = True) -> Iterator[tuple[str, Any]]:
        """Map own names and full tensors to HF names and tensors."""


def default_dtype(dtype: torch.dtype) -> ExitStack:
    """Context in which new floating-point tensors have ``dtype`` and live on the CPU."""
    stack, before = ExitStack(), torch.get_default_dtype()
    stack.callback(torch.set_default_dtype, before)
    stack.enter_context(torch.device("cpu"))
    torch.set_default_dtype(dtype)
    return stack


def autocast(model: nn.Module, device_type: str) -> None:
    """Let the forward pass of ``model`` compute in bfloat16 where that is safe; its weights stay as they are."""
    forward = model.forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=torch.bfloat16):
            return forward(*args, **kwargs)

    model.forward = wrapped


def untied_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers; a tied one comes once, under its first name."""
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value


def trained(prepared: Prepared) -> LocalAdamW:
    """The optimizer of ``prepared``; an error when it was prepared without one."""
    if not isinstance(prepared.optimizer, LocalAdamW):
        raise ValueError("this model was prepared without an OptimSpec, so it cannot be trained")
    return prepared.optimizer


class CommonStrategy(StrategyBase):
    """A strategy whose optimizer is :class:`LocalAdamW`. Subclasses place models, reduce gradients and gather
    tensors."""

    def __init__(self, cfg: StrategyConfig, bf16: bool = False) -> None:
        self.cfg, self.bf16 = cfg, bf16

    def init_model_context(self) -> AbstractContextManager[Any]:
        """Context that builds models in float32 on the CPU; :meth:`prepare` moves what this rank keeps."""
        return default_dtype(torch.float32)

    # -- gradients ----------------------------------------------------------------------------------------------------
    def backward(self, loss: Tensor, prepared: Prepared, last: bool = True) -> None:
        """Implement :meth:`StrategyBase.backward`. Ranks call it equally often per step; micro-batches may be empty."""
        optimizer = trained(prepared)
        if not loss.requires_grad:
            raise ValueError(
                "the loss does not depend on the model; an empty micro-batch must pass through it all the same "
                "(for example as the sum of its masked log-probs)")
        self._backward(loss, prepared.model, last)
        optimizer.backwards += 1

    def _backward(self, loss: Tensor, model: nn.Module, last: bool) -> None:
        """Run the pass itself; strategies that synchronize gradients extend it."""
        loss.backward()

    def _replicas(self, model: nn.Module) -> int:
        """Number of ranks that hold the same part of ``model``."""
        return 1

    def discard_gradients(self, prepared: Prepared) -> None:
        """Implement :meth:`StrategyBase.discard_gradients`: the way to abandon a step half-way."""
        trained(prepared).zero_grad()

    def gradients(self, prepared: Prepared) -> dict[str, Tensor]:
        """Implement :meth:`StrategyBase.gradients`."""
        optimizer = trained(prepared)
        optimizer.bind()
        return optimizer.named_grads()

    def global_norm(self, prepared: Prepared, parts: list[Tensor]) -> float:
        """Implement :meth:`StrategyBase.global_norm`."""
        square = squared_norm(parts, self.device) / self._replicas(prepared.model)
        return math.sqrt(self.all_reduce(square).item())

    def optimizer_step(self, prepared: Prepared, max_norm: float = 0.0) -> float:
        """Implement :meth:`StrategyBase.optimizer_step`."""
        optimizer = trained(prepared)
        reload_optimizer(optimizer)
        optimizer.bind()
        grads = list(optimizer.named_grads().values())
        norm = self._grad_norm(prepared, grads)
        if math.isfinite(norm):
            clip(grads, norm, max_norm)
            self._update(prepared)
            prepared.scheduler.step()
        self.discard_gradients(prepared)
        return norm

    def _update(self, prepared: Prepared) -> None:
        """Run the step of the optimizer itself."""
        trained(prepared).step()

    def _grad_norm(self, prepared: Prepared, grads: list[Tensor]) -> float:
        """Norm of the whole gradient: one all-reduce, which also checks that no rank ran more micro-batches."""
        square = squared_norm(grads, self.device) / self._replicas(prepared.model)
        backwards = trained(prepared).backwards
        count = torch.full_like(square, backwards)
        square, total, spread = self.all_reduce(torch.stack([square, count, count * count])).tolist()
        if spread * self.world_size != total * total:
            raise RuntimeError(f"this rank ran {backwards} micro-batches, other ranks a different number; pad with "
                               "empty ones up to strategy.sync_count(n)")
        return math.sqrt(square) if math.isfinite(square) else square

    # -- weights and state --------------------------------------------------------------------------------------------
    @abstractmethod
    def gathered(self, model: nn.Module, bucket_bytes: int, of: str = "") -> Iterator[tuple[str, Tensor]]:
        """Full parameters under the names they have in ``model``; only those with ``of`` in their name."""

    def full_params(self, model: nn.Module, bucket_bytes: int = 512 << 20,
                    lora: Lora = "merged") -> Iterator[tuple[str, Tensor]]:
        """Implement :meth:`StrategyBase.full_params`."""
        stream = self.gathered(model, bucket_bytes, ".lora_" if lora == "alone" else "")
        return model.export_params(stream, lora == "merged") if isinstance(model, ExportsParams) else stream

    def part(self, param: nn.Parameter) -> Part:
        """The elements of ``param`` for which this rank is responsible."""
        return part(param)

    def parts(self, model: nn.Module) -> Iterator[tuple[str, Part]]:
        """Implement :meth:`StrategyBase.parts`."""
        found = ((name, self.part(param)) for name, param in model.named_parameters())
        return model.export_params(found, False) if isinstance(model, ExportsParams) else found

    def offload(self, prepared: Prepared, optimizer_only: bool = False) -> None:
        """Implement :meth:`StrategyBase.offload`."""
        if prepared.optimizer is not None:
            offload_optimizer(trained(prepared))
        if not optimizer_only:
            self._move(prepared, torch.device("cpu"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # for engines that allocate outside of torch

    def reload(self, prepared: Prepared) -> None:
        """Implement :meth:`StrategyBase.reload`."""
        self._move(prepared, self.device)
        if prepared.optimizer is not None:
            reload_optimizer(trained(prepared))

    def _move(self, prepared: Prepared, device: torch.device) -> None:
        if next(prepared.model.parameters()).device != device:
            prepared.model.to(device)
        if prepared.optimizer is not None:
            trained(prepared).bind()

    def state_dict(self, prepared: Prepared) -> dict[str, Any]:
        """Return a flat state: ``model/<name>``, ``optim/<name>/<moment>`` and ``schedule/step``. Writing into the
        tensors of the first two writes into the model and the optimizer."""
        state: dict[str, Any] = {f"model/{name}": value.detach() for name, value in untied_state(prepared.model)}
        if prepared.optimizer is not None:
            state.update({f"optim/{key}": value for key, value in trained(prepared).named_state().items()})
            state["schedule/step"] = torch.tensor(prepared.scheduler.last_epoch)
        return state

    def load_state_dict(self, prepared: Prepared, state: dict[str, Any]) -> None:
        """Implement :meth:`StrategyBase.load_state_dict`; tensors that share storage with a target need no copy."""
        own = self.state_dict(prepared)
        with torch.no_grad():
            for key, target in own.items():
                if key != "schedule/step":
                    target.copy_(state[key])
        if prepared.optimizer is not None:
            set_schedule_step(prepared.scheduler, int(state["schedule/step"]))

    def save_model(self, prepared: Prepared, path: Path, dtype: torch.dtype | None = None) -> None:
        """Implement :meth:`StrategyBase.save_model`."""
        export.save_model(self, prepared.model, Path(path), dtype)
