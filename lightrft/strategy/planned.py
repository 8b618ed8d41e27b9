"""Strategy of a plan: models are built by the code of the run, as names and shapes without values."""
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lightrft.strategy.base import Prepared
from lightrft.strategy.optimizer import LocalOptimizer, OptimSpec, create_scheduler
from lightrft.strategy.strategy import SingleProcessStrategy


class PlannedStrategy(SingleProcessStrategy):
    """One process that holds models on the meta device, read from the headers of their files: whatever would refuse to
    load, to train or to resume them does so here too. Nothing computes."""
    device = torch.device("meta")
    plans = True

    def setup(self) -> None:
        """Choose nothing."""

    def init_model_context(self, meta_init: bool = False) -> AbstractContextManager[Any]:
        """Context that builds models on the meta device."""
        return self.device

    def _prepare(self, model: nn.Module, optim: OptimSpec | None, shard_size: int) -> Prepared:
        """Build the optimizer of a trained model."""
        if optim is None:
            return Prepared(model.requires_grad_(False))
        optimizer = LocalOptimizer(model.named_parameters(), optim, self.cfg.adam_offload)
        return Prepared(model, optimizer, create_scheduler(optimizer, optim))

    def offload(self, prepared: Prepared) -> None:
        """Move nothing: there are no values."""

    def reload(self, prepared: Prepared) -> None:
        """Undo :meth:`offload`."""
