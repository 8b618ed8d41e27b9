"""Where users of the strategy layer look for its options."""
from lightrft.config.schema import StrategyConfig

__all__ = ["StrategyConfig"]
