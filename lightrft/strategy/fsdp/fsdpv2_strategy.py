"""Fully sharded data parallelism (torch FSDP2): every rank holds a part of each weight, gradient and optimizer
moment."""
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightrft.config.schema import StrategyConfig
from lightrft.strategy import collectives
from lightrft.strategy.base import Prepared
from lightrft.strategy.distributed import DistributedStrategy, shard_mesh
from lightrft.strategy.optimizer import OptimSpec, ParamSlice, create_optimizer, create_scheduler

MIB = 1 << 20


@runtime_checkable
class HasDecoderLayers(Protocol):
    """A model that names its decoder layers."""
    decoder_layers: Sequence[nn.Module]


@runtime_checkable
class HasNoSplitModules(Protocol):
    """An HF model: class names of the modules that stay whole."""
    _no_split_modules: Sequence[str] | None


@dataclass(frozen=True)
class WrapPolicy:
    """Sizes (bytes of float32 weights) at which sharding changes its trade of memory for speed.

    Up to ``one_unit`` the whole model is one unit: one all-gather and one reduce-scatter per step, where the latency of
    many small ones would dominate. Up to ``keep_full`` the full weights stay from the first forward pass of a step to
    its last backward pass, so gradient accumulation gathers once per step; larger models free each layer after its use.
    """
    one_unit: int = 32 * MIB
    keep_full: int = 2048 * MIB


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """``model.decoder_layers``, else the modules whose class the HF model inside lists in ``_no_split_modules``."""
    if isinstance(model, HasDecoderLayers):
        return list(model.decoder_layers)
    names: set[str] = set()
    for module in model.modules():
        if isinstance(module, HasNoSplitModules):
            names.update(module._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


@dataclass
class Placement:
    """Placement of one model: its units (the root first), whether full weights stay during a step, and how many ranks
    hold the same part."""
    units: list[FSDPModule]
    keep_full: bool
    replicas: int
    sync: bool = True  # whether the next backward pass sums gradients over ranks

    def set_sync(self, last: bool) -> None:
        """Prepare a backward pass: sum gradients over ranks, and free full weights that stayed, only after the last
        one."""
        if last != self.sync:
            self.sync = last
            self.units[0].set_requires_gradient_sync(last)
            self.units[0].set_is_last_backward(last)
            if self.keep_full:
                self.units[0].set_reshard_after_backward(last)

    def free_full(self) -> None:
        """Return to the shards: a forward pass without a backward pass leaves full weights behind, which would become
        stale."""
        for unit in self.units:
            unit.reshard()

    def drop_unreduced(self) -> None:
        """Drop gradients of full weights that wait for the last micro-batch (FSDP2 has no public API for it)."""
        for unit in self.units:
            group = unit._get_fsdp_state()._fsdp_param_group
            for param in group.fsdp_params if group else ():
                param.unsharded_accumulated_grad = None
                full = vars(param).get("_unsharded_param")
                if full is not None:
                    full.grad = None


def shard(model: nn.Module, mesh: DeviceMesh, policy: WrapPolicy, bf16: bool, cpu_offload: bool) -> Placement:
    """Apply ``fully_shard`` to each decoder layer and to ``model``; gradients will be summed over ranks, not
    averaged."""
    nbytes = sum(param.numel() * param.element_size() for param in model.parameters())
    layers = decoder_layers(model) if nbytes > policy.one_unit else []
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32,
                                     cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
    for module in (*layers, model):
        free = nbytes > policy.keep_full and module is not model
        fully_shard(module, mesh=mesh, reshard_after_forward=free, mp_policy=precision, offload_policy=offload)
    found = units(model)
    for unit in found:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # a plain SUM, which gloo has too
    return Placement(found, nbytes <= policy.keep_full, mesh.size(0) if mesh.ndim == 2 else 1)


def units(model: nn.Module) -> list[FSDPModule]:
    """The modules of ``model`` that were sharded, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class FSDPV2Strategy(DistributedStrategy):
    """``fully_shard`` over all ranks, or over groups of them that replicate each other (HSDP).

    All ranks must run the same number of forward passes of a sharded model, and the same number of backward passes per
    optimizer step; :meth:`optimizer_step` refuses anything else. Micro-batches before the last one add up full
    gradients on each rank and communicate nothing.
    """

    def __init__(self, cfg: StrategyConfig, bf16: bool = False, wrap: WrapPolicy | None = None) -> None:
        super().__init__(cfg, bf16)
        self.wrap = wrap or WrapPolicy()
        self._placements: WeakKeyDictionary[nn.Module, Placement] = WeakKeyDictionary()

    def prepare(self, model: nn.Module, optim: OptimSpec | None = None, shard_size: int = 0) -> Prepared:
        """Shard ``model`` over ``shard_size`` ranks (0: --fsdp_shard_size; without ``optim`` all ranks)."""
        size = shard_size or (self.cfg.fsdp_shard_size if optim else 0)
        mesh = shard_mesh(self.device.type, self.world_size, size)
        if optim is None:
            model.requires_grad_(False)
        self._placements[model] = shard(model, mesh, self.wrap, self.bf16, self.cfg.fsdp_cpu_offload)
        if optim is None:
            return Prepared(model)
        optimizer = create_optimizer(model.named_parameters(), optim, self.cfg.adam_offload)
        return Prepared(model, optimizer, create_scheduler(optimizer, optim))

    # -- gradients ----------------------------------------------------------------------------------------------------
    def _backward(self, loss: Tensor, model: nn.Module, last: bool) -> None:
        self._placements[model].set_sync(last)
        super()._backward(loss, model, last)

    def _replicas(self, model: nn.Module) -> int:
        return self._placements[model].replicas

    def discard_gradients(self, prepared: Prepared) -> None:
        """Override :meth:`StrategyBase.discard_gradients`: gradients not yet reduced are dropped too."""
        super().discard_gradients(prepared)
        self._placements[prepared.model].drop_unreduced()

    def gradients(self, prepared: Prepared) -> dict[str, Tensor]:
        """Override :meth:`StrategyBase.gradients`: full weights are freed first."""
        self.free_full(prepared.model)
        return super().gradients(prepared)

    def optimizer_step(self, prepared: Prepared, max_norm: float = 0.0) -> float:
        """Override :meth:`StrategyBase.optimizer_step`: full weights are freed first."""
        self.free_full(prepared.model)
        return super().optimizer_step(prepared, max_norm)

    # -- weights and state --------------------------------------------------------------------------------------------
    def free_full(self, model: nn.Module) -> None:
        """Implement :meth:`StrategyBase.free_full`."""
        self._placements[model].free_full()

    def gathered(self, model: nn.Module, bucket_bytes: int, of: str = "") -> Iterator[tuple[str, Tensor]]:
        """Implement :meth:`StrategyBase.gathered`; one all-gather per bucket."""
        self.free_full(model)
        named = ((name, param) for name, param in model.named_parameters() if of in name)
        for bucket in collectives.buckets(named, bucket_bytes):
            yield from collectives.gather_bucket(bucket, self.device)

    def own_slices(self, model: nn.Module) -> Iterator[tuple[str, ParamSlice]]:
        """Override :meth:`StrategyBase.own_slices`: full weights are freed first."""
        self.free_full(model)
        return super().own_slices(model)

    def state_dict(self, prepared: Prepared) -> dict[str, Any]:
        """Override :meth:`StrategyBase.state_dict`: full weights are freed first."""
        self.free_full(prepared.model)
        return super().state_dict(prepared)

    def _move(self, prepared: Prepared, device: torch.device) -> None:
        if not self.cfg.fsdp_cpu_offload:  # there the weights never leave host memory
            super()._move(prepared, device)
