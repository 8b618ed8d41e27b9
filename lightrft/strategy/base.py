"""Interface of all strategies (distribution of models over ranks) towards the trainer, and their shared code.

Code above this layer does not see the distribution: losses are *sums over ranks* (each rank back-propagates its share
of one global loss), parameters have their Hugging Face names, and world size 1 needs no branch.
"""
import math
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightrft.config.schema import StrategyConfig
from lightrft.strategy import export
from lightrft.strategy.materialize import Builder
from lightrft.strategy.mixed_precision import ComputeCopy
from lightrft.strategy.host_buffers import HostBuffers
from lightrft.strategy.mesh import Axes, Mesh, mesh_of_all
from lightrft.strategy.optimizer import LocalOptimizer, OptimSpec, clip, load, set_schedule_step, squared_norm
from lightrft.strategy.optimizers import OPTIMIZERS
from lightrft.strategy.sharding import like, local, names_by_shards, own_slice, ParamSlice
from lightrft.utils.errors import UserError
from lightrft.utils.lightrft_names import answers_names

ADAPTER_BUCKET_BYTES = 64 << 20


@dataclass
class Prepared:
    """A model placed on its device(s), with its optimizer and scheduler when it is trained."""
    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None  # torch.optim.lr_scheduler.LambdaLR, where there is an optimizer
    copy: ComputeCopy | None = None  # of the weights, where the model computes with one

    def refresh(self) -> None:
        """Update everything that is derived from weights that have changed."""
        if self.copy is not None:
            self.copy.refresh()


@runtime_checkable
class ExportsParams(Protocol):
    """A module that turns its own parameters into those of the HF model it wraps (names stripped, LoRA merged)."""

    def export_params(self, stream: Iterator[tuple[str, Any]], merge: bool = True) -> Iterator[tuple[str, Any]]:
        """Map own names and full tensors to HF names and tensors."""

    def trained_names(self, merge: bool = True) -> set[str]:
        """Return the own names of the parameters from which the exported weights that training changes are made."""


def default_dtype(dtype: torch.dtype) -> ExitStack:
    """Context in which new floating-point tensors have ``dtype`` and live on the CPU."""
    stack, before = ExitStack(), torch.get_default_dtype()
    stack.callback(torch.set_default_dtype, before)
    stack.enter_context(torch.device("cpu"))
    torch.set_default_dtype(dtype)
    return stack


def untied_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers; a tied one comes once, under its first name."""
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value


def named_in(model: nn.Module, names: Collection[str] | None) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of ``model`` whose names are in ``names``; None: all."""
    return ((name, param) for name, param in model.named_parameters() if names is None or name in names)


def trained(prepared: Prepared) -> LocalOptimizer:
    """The optimizer of ``prepared``; an error when it was prepared without one."""
    if not isinstance(prepared.optimizer, LocalOptimizer):
        raise ValueError("this model was prepared without an OptimSpec, so it cannot be trained")
    return prepared.optimizer


@answers_names
class StrategyBase(ABC):
    """Process group, placement, gradients, collectives and state of models.

    The optimizer of every strategy is :class:`LocalOptimizer`. Subclasses place models, reduce gradients and gather
    tensors. With ``bf16`` forward passes compute in bfloat16; weights, gradients' sums and moments stay float32.
    """
    name: ClassVar[str] = "single"  # as --strategy has it
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    distributed: bool = False  # True while there is a process group
    axes: Axes = Axes()  # what else than samples the ranks divide
    plans: bool = False  # True where models have no values, and nothing computes

    def __init__(self, cfg: StrategyConfig | None = None, bf16: bool = False) -> None:
        self.cfg, self.bf16 = cfg or StrategyConfig(), bf16
        self.args: Namespace | None = None  # of a script that parses its command line itself
        self.host = HostBuffers()  # of offloaded weights

    @property
    def mesh(self) -> Mesh:
        """The ranks of this strategy, and the shares of this one."""
        return mesh_of_all(self.world_size, self.rank, self.device.type, self.axes)

    # -- life ---------------------------------------------------------------------------------------------------------
    @abstractmethod
    def setup(self) -> None:
        """Join the process group (if any) and choose the device."""

    @abstractmethod
    def teardown(self) -> None:
        """Leave the process group."""

    def init_model_context(self, meta_init: bool = False) -> AbstractContextManager[Any]:
        """Context that builds models in float32 on the CPU; :meth:`prepare` moves what this rank keeps.

        ``meta_init`` is accepted from LightRFT's scripts: weights are always read where they are needed.
        """
        return default_dtype(torch.float32)

    def prepare(self, model: nn.Module | Builder, optim: OptimSpec | None = None, shard_size: int = 0) -> Prepared:
        """Place (shard) ``model``; with ``optim`` also build the optimizer of its trained parameters and the schedule.

        Args:
            model: a model, or what builds one. Its weights may be on the meta device, if it reads them
                (:class:`~lightrft.strategy.materialize.ReadsWeights`).
            shard_size: ranks that share one copy, where the strategy shards; 0: its own choice.

        Raises:
            UserError: the optimizer is unknown, or this strategy cannot train with it.
        """
        if not isinstance(model, nn.Module):
            with self.init_model_context():
                model = model()
        if optim is not None:
            name = optim.options.optim
            if refusal := OPTIMIZERS.get(name).refusal(name, self.name, self.cfg.zero_stage):
                raise UserError(refusal)
        return self._prepare(model, optim, shard_size)

    @abstractmethod
    def _prepare(self, model: nn.Module, optim: OptimSpec | None, shard_size: int) -> Prepared:
        """Place (shard) a model that is built."""

    # -- gradients ----------------------------------------------------------------------------------------------------
    def backward(self, loss: Tensor, prepared: Prepared, last: bool = True) -> None:
        """Back-propagate this rank's share of the loss. Gradients are *summed* over ranks, and only when ``last``.

        All ranks call it equally often per step; a rank with fewer micro-batches adds empty ones (loss mask all False).
        """
        optimizer = trained(prepared)
        if not loss.requires_grad:
            raise ValueError(
                "the loss does not depend on the model; an empty micro-batch must go through the model too (for "
                "example as the sum of its masked log-probs)")
        self._backward(loss, prepared.model, last)
        optimizer.backwards += 1

    def _backward(self, loss: Tensor, model: nn.Module, last: bool) -> None:
        """Run the pass itself; strategies that synchronize gradients extend it."""
        loss.backward()

    def _by_replicas(self, params: dict[str, Tensor]) -> dict[int, list[str]]:
        """Names of parameters by the number of ranks that hold the same part of them."""
        return {self.world_size // shards: names for shards, names in names_by_shards(params).items()}

    def optimizer_step(self, prepared: Prepared, max_norm: float = 0.0) -> float:
        """Clip to the global norm, step, advance the schedule, clear gradients; return the norm before clipping.

        A norm that is not finite (the same on all ranks) clears the gradients and changes nothing else.
        """
        optimizer = trained(prepared)
        optimizer.bind()
        grads = optimizer.named_grads()
        norm = self._grad_norm(prepared, grads)
        if math.isfinite(norm):
            clip(list(grads.values()), norm, max_norm)
            self._update(prepared)
            prepared.refresh()
            prepared.scheduler.step()
        self.discard_gradients(prepared)
        return norm

    def _update(self, prepared: Prepared) -> None:
        """Run the step of the optimizer itself."""
        trained(prepared).step()

    def _square(self, prepared: Prepared, parts: dict[str, Tensor]) -> Tensor:
        """This rank's share in the squared norm of tensors that are sharded as the parameters of their names are: what
        several ranks hold counts once."""
        owners = trained(prepared).owners
        squares = [
            squared_norm([parts[name] for name in names], self.device) / replicas
            for replicas, names in self._by_replicas({name: owners[name] for name in parts}).items()
        ]
        return torch.stack(squares).sum() if squares else squared_norm([], self.device)

    def _grad_norm(self, prepared: Prepared, grads: dict[str, Tensor]) -> float:
        """Norm of the whole gradient: one all-reduce, which also checks that no rank ran more micro-batches."""
        square = self._square(prepared, grads)
        backwards = trained(prepared).backwards
        count = torch.full_like(square, backwards)
        square, total, spread = self.all_reduce(torch.stack([square, count, count * count])).tolist()
        if spread * self.world_size != total * total:
            raise RuntimeError(f"this rank ran {backwards} micro-batches, other ranks a different number; pad with "
                               "empty ones up to the largest number of any rank")
        return math.sqrt(square) if math.isfinite(square) else square

    def discard_gradients(self, prepared: Prepared) -> None:
        """Drop every gradient accumulated since the last optimizer step, reduced or not."""
        trained(prepared).zero_grad()

    def gradients(self, prepared: Prepared) -> dict[str, Tensor]:
        """This rank's part of every gradient accumulated since the last optimizer step, by parameter name.

        They share storage with the model. Call this after a backward pass that was the ``last``.
        """
        optimizer = trained(prepared)
        optimizer.bind()
        return optimizer.named_grads()

    def global_norm(self, prepared: Prepared, parts: dict[str, Tensor]) -> float:
        """Norm over all ranks of tensors that are sharded as :meth:`gradients` are; a collective."""
        return math.sqrt(self.all_reduce(self._square(prepared, parts)).item())

    # -- collectives --------------------------------------------------------------------------------------------------
    @abstractmethod
    def all_reduce(self, value: Tensor, op: str = "sum") -> Tensor:
        """Sum, max or min over ranks, out of place; any device, any dtype (sums of bool are int64)."""

    def sum_data_ranks(self, value: Tensor) -> Tensor:
        """Sum over data ranks: ranks that train the same samples have the same ``value``, which counts once."""
        return self.all_reduce(torch.zeros_like(value) if self.mesh.data.replica else value)

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order (pickled; tensors arrive on CPU)."""

    @abstractmethod
    def exchange(self, outgoing: list[Any]) -> list[Any]:
        """Send ``outgoing[r]`` to rank r; return what each rank has sent to this one, in rank order (pickled)."""

    def gather_object(self, value: Any, nothing: Any) -> list[Any]:
        """The value of every rank on rank 0, in rank order; ``nothing`` in their place on the other ranks (pickled).
        """
        return self.exchange([value, *[nothing] * (self.world_size - 1)])

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    def any_rank(self, flag: bool) -> bool:
        """True on all ranks if ``flag`` is true on any."""
        return bool(self.all_reduce(torch.tensor(int(flag)), "max").item())

    @property
    def is_main(self) -> bool:
        """Rank 0."""
        return self.rank == 0

    # -- weights ------------------------------------------------------------------------------------------------------
    @abstractmethod
    def gathered(self, model: nn.Module, bucket_bytes: int,
                 names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Full parameters under the names they have in ``model``; only those in ``names``, if given. A collective."""

    def full_params(self, model: nn.Module, bucket_bytes: int = 512 << 20, merge: bool = True,
                    trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Full (unsharded) parameters of the wrapped HF model under their HF names, gathered in buckets; LoRA merged,
        or its matrices apart from the base weights (:func:`lightrft.models.lora.apart_params`).

        A collective: every rank iterates to the end. Tied parameters come once. ``trained``: only those that training
        changes.
        """
        if not isinstance(model, ExportsParams):
            return self.gathered(model, bucket_bytes)
        names = model.trained_names(merge) if trained else None
        return model.export_params(self.gathered(model, bucket_bytes, names), merge)

    def own_slice(self, param: nn.Parameter) -> ParamSlice:
        """The elements of ``param`` for which this rank is responsible; the first rank is for what is not divided."""
        if self.rank and not isinstance(param, DTensor):
            return ParamSlice([], param.shape)
        return own_slice(param, self.mesh.ranks[0])

    def own_slices(self, model: nn.Module) -> Iterator[tuple[str, ParamSlice]]:
        """This rank's part of every parameter, under the names and in the order of :meth:`full_params` (LoRA apart). No
        collective: nothing moves. One rank is responsible for each element, whoever else holds it."""
        found = ((name, self.own_slice(param)) for name, param in model.named_parameters())
        return model.export_params(found, False) if isinstance(model, ExportsParams) else found

    def free_full(self, model: nn.Module) -> None:
        """Free the full weights that a forward pass without a backward pass leaves behind; nothing by default."""

    def offload(self, prepared: Prepared) -> None:
        """Move parameters, gradients and optimizer state to host memory."""
        if prepared.optimizer is not None:
            trained(prepared).offload()
        if prepared.copy is not None:
            prepared.copy.free()
        self._move(prepared, torch.device("cpu"))
        self.host.wait()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # for engines that allocate outside of torch

    def reload(self, prepared: Prepared) -> None:
        """Undo :meth:`offload`; with ``--adam_offload`` the optimizer state stays in host memory."""
        self._move(prepared, self.device)
        if prepared.copy is not None:
            prepared.copy.make()
        if prepared.optimizer is not None:
            trained(prepared).reload()

    def _move(self, prepared: Prepared, device: torch.device) -> None:
        """Move the weights, with gradients and buffers, which are few or none between updates.

        Weights are in host memory before the modules get them: FSDP2 reads those of uneven shards there, to pad them.
        """
        self.free_full(prepared.model)
        if next(prepared.model.parameters()).device != device:
            held = self._stored(prepared) if device.type == "cpu" else {}

            def moved(tensor: Tensor) -> Tensor:
                return like(held[tensor] if tensor in held else load(local(tensor), device), tensor)

            prepared.model._apply(moved)  # Module.to is this as well; FSDP2 extends it
        if prepared.optimizer is not None:
            trained(prepared).bind()

    def _stored(self, prepared: Prepared) -> dict[Tensor, Tensor]:
        """Copy this rank's part of every parameter to host memory, and of a model without an optimizer only once."""
        model, frozen = prepared.model, prepared.optimizer is None
        held: dict[Tensor, Tensor] = {
            param: self.host.store((model, name), local(param), frozen) for name, param in model.named_parameters()
        }
        self.host.wait()
        return held

    # -- state --------------------------------------------------------------------------------------------------------
    def state_dict(self, prepared: Prepared) -> dict[str, Any]:
        """Return a flat state for ``torch.distributed.checkpoint``: ``model/<name>``, ``optim/<name>/<moment>`` and
        ``schedule/step``. Writing into the tensors of the first two writes into the model and the optimizer."""
        state: dict[str, Any] = {f"model/{name}": value.detach() for name, value in untied_state(prepared.model)}
        if prepared.optimizer is not None:
            state.update({f"optim/{key}": value for key, value in trained(prepared).named_state().items()})
            state["schedule/step"] = torch.tensor(prepared.scheduler.last_epoch)
        return state

    def load_state_dict(self, prepared: Prepared, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned and the checkpoint filled in; tensors that share storage
        with a target need no copy."""
        own = self.state_dict(prepared)
        with torch.no_grad():
            for key, target in own.items():
                if key != "schedule/step":
                    target.copy_(state[key])
        prepared.refresh()
        if prepared.optimizer is not None:
            set_schedule_step(prepared.scheduler, int(state["schedule/step"]))

    def save_model(self, prepared: Prepared, path: Path, dtype: torch.dtype | None = None) -> None:
        """Write HF safetensors and config on rank 0 (LoRA: adapter in ``path/adapter`` and merged weights in ``path``).
        A collective."""
        folder, model = Path(path) if self.is_main else None, prepared.model
        export.write_model(model, self.full_params(model), folder, dtype)
        adapter = self.gathered(model, ADAPTER_BUCKET_BYTES, export.adapter_names(model))
        export.write_adapter(model, adapter, folder)
        self.barrier()
