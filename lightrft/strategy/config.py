"""Public import path of the strategy layer's options."""
from lightrft.config.schema import StrategyConfig

__all__ = ["StrategyConfig"]
