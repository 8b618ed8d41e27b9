"""One advantage estimator per file; importing this package imports, and so registers, all of them."""
from importlib import import_module
from pkgutil import iter_modules

__all__ = sorted(info.name for info in iter_modules(__path__))

for _name in __all__:
    import_module(f"{__name__}.{_name}")
