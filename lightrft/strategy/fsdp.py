"""Fully sharded data parallelism (torch FSDP2): every rank holds a part of each weight, gradient and optimizer
moment."""
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightrft.config.schema import StrategyConfig
from lightrft.strategy import collectives
from lightrft.strategy.base import Prepared, named_in
from lightrft.strategy.distributed import DistributedStrategy, local_world_size, transformer_blocks
from lightrft.strategy.materialize import materialize
from lightrft.strategy.memory import keeps_whole_gradients
from lightrft.strategy.mesh import Axes
from lightrft.strategy.optimizer import LocalOptimizer, OptimSpec, create_scheduler
from lightrft.strategy.sharding import ParamSlice
from lightrft.utils.env import total_memory
from lightrft.utils.errors import UserError
from lightrft.utils.tensors import keeps_float32

MIB = 1 << 20


@dataclass(frozen=True)
class WrapPolicy:
    """Model sizes (bytes of float32 weights) up to which sharding prefers speed over memory.

    Up to ``one_unit`` the whole model is one unit: one all-gather and one reduce-scatter per step, where the latency of
    many small ones would dominate. Up to ``keep_full`` the full weights stay from the first forward pass of a step to
    its last backward pass, so gradient accumulation gathers once per step; larger models free each layer after its use.
    """
    one_unit: int = 32 * MIB
    keep_full: int = 2048 * MIB


@dataclass
class Placement:
    """Placement of one model: its units (the root first), whether full weights stay during a step, and whether every
    micro-batch, not only the last one, sums gradients over ranks."""
    units: list[FSDPModule]
    keep_full: bool
    every: bool
    at_last: bool = True  # whether the next backward pass is set up as the last one of a step

    def set_last(self, last: bool) -> None:
        """Prepare a backward pass. Only the last one sums gradients over ranks (with ``every``: over replicas, which
        then hold sums of their shards) and frees full weights that stayed."""
        if last == self.at_last:
            return
        self.at_last, root = last, self.units[0]
        if self.every:
            root.set_requires_all_reduce(last)
        else:
            root.set_requires_gradient_sync(last)
            root.set_is_last_backward(last)
            for unit in self._unread_units():  # FSDP2 cannot keep their gradients, and has none to sum
                unit.set_requires_gradient_sync(True, recurse=False)
        if self.keep_full:
            root.set_reshard_after_backward(last)

    def _unread_units(self) -> list[FSDPModule]:
        """Units whose weights no pass has gathered so far: those of a tower where the data hold no media."""
        groups = {unit: unit._get_fsdp_state()._fsdp_param_group for unit in self.units}
        return [
            unit for unit, group in groups.items()
            if group is not None and not all("_unsharded_param" in vars(param) for param in group.fsdp_params)
        ]

    def free_full(self) -> None:
        """Return to the shards: a forward pass without a backward pass leaves full weights behind, which would become
        stale."""
        for unit in self.units:
            unit.reshard()

    def drop_unreduced(self) -> None:
        """Drop gradients that wait for the last micro-batch (FSDP2 has no public API for it)."""
        for unit in self.units:
            group = unit._get_fsdp_state()._fsdp_param_group
            if group is None:
                continue
            group._partial_reduce_output = None
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                full = vars(param).get("_unsharded_param")
                if full is not None:
                    full.grad = None


def shard(model: nn.Module, mesh: DeviceMesh, policy: WrapPolicy, bf16: bool, cpu_offload: bool,
          every: bool = False) -> Placement:
    """Apply ``fully_shard`` to each Transformer block and to ``model``; gradients will be summed over ranks, not
    averaged, with ``every`` in every micro-batch."""
    nbytes = sum(param.numel() * param.element_size() for param in model.parameters())
    layers = _apart(transformer_blocks(model)) if nbytes > policy.one_unit else []
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    precision = replace(whole, param_dtype=torch.bfloat16) if bf16 else whole
    heads = [module for module in model.modules() if bf16 and keeps_float32(module)]
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
    for module in (*heads, *layers, model):
        free = nbytes > policy.keep_full and module is not model
        fully_shard(module, mesh=mesh, reshard_after_forward=free, mp_policy=whole if module in heads else precision,
                    offload_policy=offload)
    found = units(model)
    for unit in found:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # a plain SUM, which gloo has too
    return Placement(found, nbytes <= policy.keep_full, every)


def _apart(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the layers that share no weight with another one (as some of Zamba 2 do). FSDP2 would divide a shared
    weight once for each of its layers, and train as many."""
    owners = Counter(parameter for layer in layers for parameter in layer.parameters())
    return [layer for layer in layers if all(owners[parameter] == 1 for parameter in layer.parameters())]


def units(model: nn.Module) -> list[FSDPModule]:
    """The modules of ``model`` that were sharded, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class FSDPV2Strategy(DistributedStrategy):
    """``fully_shard`` over all ranks, or over groups of them that replicate each other (HSDP).

    All ranks must run the same number of forward passes of a sharded model, and the same number of backward passes per
    optimizer step; :meth:`optimizer_step` refuses anything else. Gradients are summed over ranks after every
    micro-batch or after the last one (--grad_sync).
    """
    name = "fsdp"

    def __init__(self, cfg: StrategyConfig | None = None, bf16: bool = False, wrap: WrapPolicy | None = None,
                 ranks: Sequence[int] | None = None, axes: Axes = Axes()) -> None:
        super().__init__(cfg, bf16, ranks, axes)
        self.wrap = wrap or WrapPolicy()
        self._placements: WeakKeyDictionary[nn.Module, Placement] = WeakKeyDictionary()

    def _prepare(self, model: nn.Module, optim: OptimSpec | None, shard_size: int) -> Prepared:
        """Shard ``model`` over ``shard_size`` ranks (0: --fsdp_shard_size; without ``optim`` all ranks).

        Raises:
            UserError: the ranks are to divide more than samples and weights, which no model can do.
        """
        if self.axes.divided:
            raise UserError(f"the mesh of this strategy has {', '.join(self.axes.divided)}, and no model divides its "
                            "sequences, layers or experts among ranks; make the strategy without axes")
        size = shard_size or (self.cfg.fsdp_shard_size if optim else 0)
        if optim is None:
            model.requires_grad_(False)
        every = not self._keeps_whole_gradients(model)
        self._placements[model] = shard(model, self.mesh.dense(size), self.wrap, self.bf16, self.cfg.fsdp_cpu_offload,
                                        every)
        materialize(model, torch.device("cpu") if self.cfg.fsdp_cpu_offload else self.device)
        for buffer in model.buffers():  # of which FSDP2 offloads none
            buffer.data = buffer.to(self.device)
        if optim is None:
            return Prepared(model)
        optimizer = LocalOptimizer(model.named_parameters(), optim, self.cfg.adam_offload)
        return Prepared(model, optimizer, create_scheduler(optimizer, optim))

    def _keeps_whole_gradients(self, model: nn.Module) -> bool:
        """Decide alike on all ranks, by the smallest device; a collective."""
        trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
        sharing = local_world_size() if self.device.type == "cpu" else 1
        room = self.all_reduce(torch.tensor(total_memory(self.device) // sharing), "min")
        return keeps_whole_gradients(self.cfg, trained, int(room))

    # -- gradients ----------------------------------------------------------------------------------------------------
    def _backward(self, loss: Tensor, model: nn.Module, last: bool) -> None:
        self._placements[model].set_last(last)
        super()._backward(loss, model, last)

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
        """Free the whole weights that FSDP2 has gathered."""
        self._placements[model].free_full()

    def gathered(self, model: nn.Module, bucket_bytes: int,
                 names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Implement :meth:`StrategyBase.gathered`; one all-gather per bucket."""
        self.free_full(model)
        for bucket in collectives.buckets(named_in(model, names), bucket_bytes):
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
