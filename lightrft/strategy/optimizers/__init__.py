"""Optimizers; importing this package registers those of all its files, none of which imports torch before it builds."""
from importlib import import_module
from pkgutil import iter_modules

from lightrft.strategy.optimizers.base import OPTIMIZERS, Optimizer, optimizer

__all__ = ["OPTIMIZERS", "Optimizer", "optimizer"]

for _name in sorted(info.name for info in iter_modules(__path__)):
    import_module(f"{__name__}.{_name}")
