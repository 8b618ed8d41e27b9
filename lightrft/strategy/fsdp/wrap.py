"""Choice of the modules that become units of sharding, and of how long their full weights stay."""
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

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
