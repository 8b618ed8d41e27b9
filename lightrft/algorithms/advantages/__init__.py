"""Advantage estimators; importing this package imports every file that it has, and so registers them."""
from importlib import import_module
from pkgutil import iter_modules

FIRST = ("group_relative", "returns")  # one family per file, in the order of the table of algorithms

__all__ = [*FIRST, *sorted({info.name for info in iter_modules(__path__)} - {*FIRST})]

for _name in __all__:
    import_module(f"{__name__}.{_name}")
