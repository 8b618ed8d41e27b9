"""Commands, a module each. A name of another trainer, such as ``python -m lightrft.cli.batch_inference``, runs ours."""
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType


class ForeignModules:
    """Finds ``lightrft.cli.NAME`` in ``foreign_module.py`` if no file has the name and a command here does its work."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the file of the module, or None. Python asks for modules that it has not found elsewhere."""
        if name.rpartition(".")[0] != __name__:
            return None
        from lightrft.cli.foreign_module import command_of, of_another_trainer  # the commands do not wait for this
        file = Path(__file__).with_name("foreign_module.py")
        return spec_from_file_location(name, file) if command_of(name) or of_another_trainer(name) else None


sys.meta_path.append(ForeignModules)
