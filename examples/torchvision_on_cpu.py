"""Make a torchvision that was built for CUDA importable beside a torch for CPUs, in every process of an environment.

The registry's wheel of torchvision needs a CUDA build of torch: beside another one its operators are not loaded, and
the import fails because two of them are not declared. The Makefile installs the wheel into a folder of its own, with
this file beside it, and a ``.pth`` file that appends the folder to ``sys.path`` and imports this module. A torchvision
in site-packages comes first and is left alone. A process that never imports torchvision does not import torch here.
"""
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parent / "torchvision" / "__init__.py"
_LIBRARIES = []  # the declarations last as long as their library


def declare_operators() -> None:
    """Declare the two operators that the import looks up and that processors never call, where torch has no CUDA."""
    import torch
    if torch.version.cuda is None and "+cu" in PACKAGE.with_name("version.py").read_text(encoding="utf-8"):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)


class Loader(SourceFileLoader):
    """Loads torchvision with its operators declared."""

    def exec_module(self, module: ModuleType) -> None:
        """Declare the operators, then run the module."""
        declare_operators()
        super().exec_module(module)


class Finder:
    """Finds the torchvision beside this file, if no other one comes first on ``sys.path``."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of torchvision with :class:`Loader`, or None for everything else."""
        spec = PathFinder.find_spec(name) if name == "torchvision" else None
        if spec is None or spec.origin != str(PACKAGE):
            return None
        spec.loader = Loader(name, spec.origin)
        return spec


sys.meta_path.insert(0, Finder())
