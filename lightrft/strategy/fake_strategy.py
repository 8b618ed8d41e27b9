"""Strategy of one process without a process group: the semantics that every other strategy is tested against."""
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightrft.strategy.local import CommonStrategy, autocast
from lightrft.strategy.optimizer import create_optimizer, create_scheduler
from lightrft.strategy.base import OptimSpec, Prepared

REDUCE_OPS = ("sum", "max", "min")


class SingleProcessStrategy(CommonStrategy):
    """The whole model on one device. With ``bf16`` the forward pass runs under autocast; weights stay float32."""

    def setup(self) -> None:
        """Choose the device."""
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

    def teardown(self) -> None:
        """Free the device's cached memory; there is no group to leave."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def prepare(self, model: nn.Module, optim: OptimSpec | None = None, shard_size: int = 0) -> Prepared:
        """Implement :meth:`StrategyBase.prepare`; ``shard_size`` has no meaning on one rank."""
        model.to(self.device)
        if self.bf16:
            autocast(model, self.device.type)
        if optim is None:
            return Prepared(model.requires_grad_(False))
        optimizer = create_optimizer(model.named_parameters(), optim)
        return Prepared(model, optimizer, create_scheduler(optimizer, optim))

    def all_reduce(self, value: Tensor, op: str = "sum") -> Tensor:
        """Return a copy; sums of bool are int64."""
        if op not in REDUCE_OPS:
            raise ValueError(f"unknown reduction {op!r}; known: {', '.join(REDUCE_OPS)}")
        return value.long() if op == "sum" and value.dtype == torch.bool else value.clone()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return ``[value]``."""
        return [value]

    def exchange(self, outgoing: list[Any]) -> list[Any]:
        """Return ``outgoing``."""
        return outgoing

    def barrier(self) -> None:
        """Wait for the work queued on the device; there are no other ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gathered(self, model: nn.Module, bucket_bytes: int, of: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield the live parameters, detached; nothing is copied."""
        return ((name, param.detach()) for name, param in model.named_parameters() if of in name)


FakeStrategy = SingleProcessStrategy  # its name in LightRFT
