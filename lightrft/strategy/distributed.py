"""Base of the strategies on a process group: joining it, leaving it and its collectives."""
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.local import CommonStrategy
from lightrft.strategy import collectives, process_group
from lightrft.utils.env import set_threads


class DistributedStrategy(CommonStrategy):
    """A strategy on the process group of torchrun, or on a group of a single rank."""

    def __init__(self, cfg: StrategyConfig, bf16: bool = False) -> None:
        super().__init__(cfg, bf16)
        self._owns_group, self._gather_object = False, collectives.ObjectGather()

    # -- life ---------------------------------------------------------------------------------------------------------
    def setup(self) -> None:
        """Join the group; one CUDA device per rank where there is CUDA."""
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
            self.device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(self.device)
        else:
            set_threads(process_group.local_world_size())
        self._owns_group = process_group.join(self.cfg.dist_timeout_s)
        self.rank, self.world_size, self.distributed = dist.get_rank(), dist.get_world_size(), True

    def teardown(self) -> None:
        """Leave the group, if :meth:`setup` joined it."""
        if self._owns_group and dist.is_initialized():
            process_group.leave()
        self._owns_group = self.distributed = False

    # -- collectives --------------------------------------------------------------------------------------------------
    def all_reduce(self, value: Tensor, op: str = "sum") -> Tensor:
        """Implement :meth:`StrategyBase.all_reduce`; sums of bool are int64."""
        return collectives.all_reduce(value, op)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Implement :meth:`StrategyBase.all_gather_object`."""
        return self._gather_object(value)

    def exchange(self, outgoing: list[Any]) -> list[Any]:
        """Implement :meth:`StrategyBase.exchange`."""
        return collectives.exchange(outgoing)

    def barrier(self) -> None:
        """Implement :meth:`StrategyBase.barrier`."""
        dist.all_reduce(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
