"""Plugins: Python files and modules that are imported before the options are read, because they may declare some."""
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module, invalidate_caches
from pathlib import Path
from traceback import walk_tb
from typing import Any

from lightrft.config.options import ConfigError, split_commas
from lightrft.config.tree import options
from lightrft.utils.errors import CaptureException, first_line, meant_path, UserError

Plugins = str | Path | Sequence[str | Path]


def listed(given: Any) -> list[str]:
    """Return the entries of ``--plugin`` in a value of the command line, of a YAML file or of Python: a text with
    commas, a path, or a list of them.

    Raises:
        ConfigError: an entry is empty, or is neither a text nor a path.
    """
    entries: list[str] = []
    for value in given if isinstance(given, (list, tuple)) else [given]:
        names = split_commas(str(value)) if isinstance(value, (str, os.PathLike)) else []
        if not names:
            raise ConfigError(f"--plugin {value!r}: expected a Python file or the name of a module")
        entries += names
    return entries


def import_plugins(plugins: Iterable[str], tree: type) -> None:
    """Import each plugin; modules in the current folder are found, as with ``python -m``.

    Raises:
        ConfigError: in one line, for whatever is wrong with a plugin, the options that it adds to ``tree`` included.
    """
    for name in plugins:
        module, path = _module(name)
        with CaptureException() as captured:
            _import(module, path)
            options(tree)
        if isinstance(captured.cause, Exception):
            raise ConfigError(f"--plugin {name}: {_problem(module, path, captured.cause)}") from None
        if captured.cause is not None:  # an interrupt or an exit
            raise captured.cause


def _module(name: str) -> tuple[str, Path | None]:
    """Return the name of the module that an entry means, and its file or package if the entry is a path."""
    if not name.endswith(".py") and os.sep not in name and not name.startswith("~"):
        if name.startswith("."):
            raise ConfigError(f"--plugin {name}: no name of a module; give --plugin {name.lstrip('.') or 'MODULE'}")
        return name, None
    path = Path(name).expanduser().resolve()
    path = path if path.exists() else path.with_suffix(".py")  # as modules are written
    if not path.exists():
        raise ConfigError(f"--plugin {name}: no such file{meant_path(path)}")
    path = path.parent if path.name == "__init__.py" else path
    parts = [path.stem if path.is_file() else path.name]
    while (path.parents[len(parts) - 1] / "__init__.py").is_file():
        parts.append(path.parents[len(parts) - 1].name)
    return ".".join(reversed(parts)), path


def _import(module: str, path: Path | None) -> None:
    """Import a module; for one with a path, its folder, or that of its package, comes first where modules are found.

    Workers of rewards find it there too.
    """
    root = os.getcwd() if path is None else str(path.parents[module.count(".")])
    if root not in sys.path:
        sys.path.insert(0, root)
    invalidate_caches()
    origin = import_module(module).__file__
    if origin is None:
        raise UserError(f"a folder without __init__.py, of which nothing is imported; name a file in it, such as "
                        f"{module.replace('.', os.sep)}{os.sep}my_file.py")
    if path is not None and Path(origin).resolve() not in (path, path / "__init__.py"):
        raise UserError(f"the module {module} is {origin} already; give the file another name")


def _problem(module: str, path: Path | None, error: Exception) -> str:
    """Explain why the import of a plugin failed, with the innermost line of the plugin."""
    if isinstance(error, UserError):  # also of an option that it declares
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return f"no such module (looked in {os.getcwd()} and PYTHONPATH)"
    lines = [
        f"{frame.f_code.co_filename}:{line}: " for frame, line in walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] == module.partition(".")[0]
    ]
    reason = first_line(error)
    if isinstance(error, SyntaxError) and error.filename:
        lines, reason = [f"{error.filename}:{error.lineno}: "], error.msg
    shows = f"python -c 'import {module}'" if path is None else f"python {path}"
    return f"{''.join(lines[-1:])}{type(error).__name__}: {reason}; {shows} shows the traceback"
