"""Strategies: how models are spread over ranks. The public names load their home module on first use."""
from importlib import import_module
from typing import Any

_HOMES = {
    "StrategyConfig": "lightrft.config.schema",
    "StrategyBase": "lightrft.strategy.base",
    "get_strategy": "lightrft.strategy.strategy",
    "SingleProcessStrategy": "lightrft.strategy.strategy",
    "FakeStrategy": "lightrft.strategy.strategy",
    "FSDPV2Strategy": "lightrft.strategy.fsdp.fsdpv2_strategy",
    "DeepspeedStrategy": "lightrft.strategy.deepspeed.deepspeed_strategy",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lightrft.strategy' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
