"""Strategies: distribution of models over ranks. The public names load their home module on first use."""
from lightrft.utils.registry import lazy_exports

_HOMES = {
    "StrategyConfig": "lightrft.config.schema",
    "StrategyBase": "lightrft.strategy.base",
    "get_strategy": "lightrft.strategy.strategy",
    "SingleProcessStrategy": "lightrft.strategy.strategy",
    "FakeStrategy": "lightrft.strategy.strategy",
    "FSDPV2Strategy": "lightrft.strategy.fsdp",
    "DeepspeedStrategy": "lightrft.strategy.deepspeed.deepspeed_strategy",
}
__all__ = sorted(_HOMES)
__getattr__ = lazy_exports(__name__, _HOMES)
