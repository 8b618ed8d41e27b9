"""Where the training state is while the engine generates."""
from collections.abc import Sequence

from lightrft.config.schema import Config
from lightrft.strategy.strategy_base import Prepared, StrategyBase
from lightrft.utils.timer import Timer


class Residence:
    """With ``--offload_during_rollout`` models, gradients and optimizer states leave the device for every generation.

    Both ways do nothing without the option, and nothing twice.
    """

    def __init__(self, config: Config, strategy: StrategyBase, prepared: Sequence[Prepared], timer: Timer) -> None:
        self.strategy, self.timer, self.away = strategy, timer, False
        self.prepared = prepared if config.rollout.offload_during_rollout else ()

    def leave(self) -> None:
        """Make room, before generation."""
        self._move(away=True)

    def come_back(self) -> None:
        """Before a pass through the models, and before their weights are read."""
        self._move(away=False)

    def _move(self, away: bool) -> None:
        if self.prepared and away != self.away:
            move = self.strategy.offload if away else self.strategy.reload
            with self.timer("offload"):
                for each in self.prepared:
                    move(each)
            self.away = away
