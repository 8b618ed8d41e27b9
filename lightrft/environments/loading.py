"""Loading of an environment in a worker: from a file or a pickled object to what makes one for each response."""
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from lightrft.environments.adapters import adapter_of, interface_of, is_verl_tool, of_methods, verl_tools
from lightrft.environments.base import EnvironmentSpec, Info
from lightrft.environments.tools import ToolBox, ToolEnvironment
from lightrft.utils.errors import CaptureException, first_line, UserError

EXPECTED = ("a class with reset(prompt, seed) and step(turn), a class with turn(prompt, response), a list of functions "
            "that are tools, or a class of another trainer (docs/environments.md)")
Factory = Callable[[], Any]


def check_file(path: Path) -> None:
    """Raise a :class:`UserError` with file and line if ``path`` is missing, not text or not Python."""
    try:
        compile(path.read_bytes(), str(path), "exec")
    except FileNotFoundError as error:
        raise UserError(f"--environment {path}: no such file. Give the path of a Python file") from error
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UserError(f"--environment {path}{line}: {error}. Correct the file") from error
    except OSError as error:
        raise UserError(f"--environment {path} cannot be read: {error}") from error


def load(spec: EnvironmentSpec) -> tuple[Factory, Info]:
    """Return what makes the environment of a response, and its description.

    Raises:
        UserError: the file cannot be imported, has no such name, or this has no known interface.
    """
    made = _made_class(_unpickled(spec) if spec.pickled else _in_file(Path(spec.path), spec.name))
    if inspect.isclass(made):
        adapter = adapter_of(made)
        if adapter is not None:
            return adapter.factory, adapter.info
    if isinstance(made, (list, tuple)) and made and all(is_verl_tool(type(tool)) for tool in made):
        return verl_tools(made)
    tools = [made] if inspect.isfunction(made) else list(made) if isinstance(made, (list, tuple)) else []
    if tools and all(map(callable, tools)):
        box = ToolBox(tools)
        return lambda: ToolEnvironment(box), Info("tools", tuple(box.schemas))
    raise UserError(f"--environment {spec.title}: {made!r} is no environment. Give {EXPECTED}")


def _made_class(made: Any) -> Any:
    """Return a class that has the objects of a factory: of a ``functools.partial``, or of a function without arguments
    and without the docstring that every tool needs. What is no factory is returned as it is.

    Raises:
        UserError: the factory raises an error.
    """
    if not isinstance(made, (FunctionType, partial)) or inspect.isfunction(made) and made.__doc__:
        return made
    with CaptureException() as captured:
        inspect.signature(made).bind()
    if captured.cause is not None:
        return made
    with CaptureException() as captured:
        cls = type(made())
    if captured.cause is not None:
        raise UserError(f"{made!r} makes environments, and raises:\n{captured.text_below(__file__)}")
    if interface_of(cls) is None:
        return made
    return type(cls.__name__, (cls, ), {"__new__": lambda _: made(), "__init__": lambda _: None})


def _unpickled(spec: EnvironmentSpec) -> Any:
    with CaptureException() as captured:
        return pickle.loads(spec.pickled)
    raise UserError(
        f"--environment {spec.title} cannot be loaded in a worker process: "
        f"{first_line(captured.cause or ValueError())}. What the program itself defines behind a decorator, "
        "such as functools.cache, is not found there: write it in a file that the program imports")


def _in_file(path: Path, name: str) -> Any:
    """Return the object ``name`` of a file, or else its only environment."""
    module = _imported(path)
    values = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    if name:
        if name not in values:
            raise UserError(f"--environment {path}: the file has no {name!r}; it has {', '.join(_own(module))}")
        return values[name]
    fitting = [value for value in _own(module).values() if inspect.isclass(value) and interface_of(value) is not None]
    sure = [value for value in fitting if interface_of(value) is not of_methods]
    has_tools = isinstance(values.get("tools"), (list, tuple))
    if has_tools and all(map(is_verl_tool, fitting)):
        return values["tools"]
    if len(sure or fitting) != 1 or has_tools and not sure:
        raise UserError(f"--environment {path}: {len(sure or fitting)} of its classes are environments "
                        f"({', '.join(value.__name__ for value in sure or fitting) or _without(module)})"
                        f"{', beside the list tools' * has_tools}. Give FILE:NAME, where NAME is {EXPECTED}")
    return (sure or fitting)[0]


def _without(module: ModuleType) -> str:
    """Say what the classes of a file without an environment have, so that a method of another name is seen."""
    classes = [value for value in _own(module).values() if inspect.isclass(value)]
    return "; ".join(["none", *(f"{made.__name__} has {', '.join(_methods(made)) or 'no method'}" for made in classes)])


def _methods(made: type) -> list[str]:
    return [f"{name}{inspect.signature(method)}" for name, method in vars(made).items()
            if inspect.isfunction(method) and not name.startswith("_")]  # yapf: disable


def _own(module: ModuleType) -> dict[str, Any]:
    """Return the classes and functions that a file defines."""
    return {key: value for key, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and not key.startswith("_")}  # yapf: disable


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"lightrft_environment_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--environment {path}: no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    with CaptureException() as captured:
        spec.loader.exec_module(module)
    if captured.cause is not None:
        raise UserError(f"--environment {path} raises while it is imported. Correct the file\n"
                        f"{captured.text_below(__file__)}")
    return module
