"""A second model that is never trained: on the device throughout, or only while it computes."""
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lightrft.strategy.base import StrategyBase
from lightrft.strategy.materialize import Builder


class FrozenModel:
    """A model without an optimizer.

    Args:
        build: loads it.
        shard_size: ranks that share one copy, where the strategy shards.
        offloads: it rests in host memory between passes.
    """

    def __init__(self, build: Builder, strategy: StrategyBase, shard_size: int, offloads: bool) -> None:
        self.strategy, self.offloads = strategy, offloads
        self.prepared = strategy.prepare(build, shard_size=shard_size)
        if offloads:
            strategy.offload(self.prepared)

    @contextmanager
    def here(self) -> Iterator[nn.Module]:
        """Context in which the model is on the device."""
        if self.offloads:
            self.strategy.reload(self.prepared)
        yield self.prepared.model
        if self.offloads:
            self.strategy.offload(self.prepared)
