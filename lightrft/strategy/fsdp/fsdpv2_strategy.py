"""Fully sharded data parallelism (torch FSDP2): every rank holds a part of each weight, gradient and optimizer
moment."""
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.distributed import DistributedStrategy
from lightrft.strategy import collectives
from lightrft.strategy.fsdp.wrap import Placement, WrapPolicy, shard
from lightrft.strategy.mesh import shard_mesh
from lightrft.strategy.optimizer import create_optimizer, create_scheduler
from lightrft.strategy.base import OptimSpec, Part, Prepared


class FSDPV2Strategy(DistributedStrategy):
    """``fully_shard`` over all ranks, or over groups of them that replicate each other (HSDP).

    All ranks must run the same number of forward passes of a sharded model, and the same number of backward passes per
    optimizer step (:meth:`sync_count` returns it); :meth:`optimizer_step` refuses anything else. Micro-batches
    before the last one add up full gradients on each rank and communicate nothing.
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
        optimizer = create_optimizer(model.named_parameters(), optim)
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
        """Implement :meth:`CommonStrategy.gathered`; one all-gather per bucket."""
        self.free_full(model)
        named = ((name, param) for name, param in model.named_parameters() if of in name)
        for bucket in collectives.buckets(named, bucket_bytes):
            yield from collectives.gather_bucket(bucket, self.device)

    def parts(self, model: nn.Module) -> Iterator[tuple[str, Part]]:
        """Override :meth:`StrategyBase.parts`: full weights are freed first."""
        self.free_full(model)
        return super().parts(model)

    def state_dict(self, prepared: Prepared) -> dict[str, Any]:
        """Override :meth:`StrategyBase.state_dict`: full weights are freed first."""
        self.free_full(prepared.model)
        return super().state_dict(prepared)

    def _move(self, prepared: Prepared, device: torch.device) -> None:
        if not self.cfg.fsdp_cpu_offload:  # there the weights never leave host memory
            super()._move(prepared, device)
