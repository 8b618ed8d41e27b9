"""Values and signatures of classes that are written for other trainers."""
import asyncio
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import is_dataclass
from functools import partial
from numbers import Real
from typing import Any, get_args, get_type_hints

from lightrft.environments.base import Task

OWN_THREAD: ContextVar[Executor | None] = ContextVar("OWN_THREAD", default=None)
"""Thread of the session whose call is under way."""


async def called(function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
    """Call a function of an environment, and wait for it without holding up other sessions: in the thread of its
    session, after what was called there before, unless it is ``async``."""
    return await _called(OWN_THREAD.get(), function, *arguments, **keywords)


async def called_at_once(function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
    """Call a function that has no state: while others of the session run."""
    return await _called(None, function, *arguments, **keywords)


async def _called(threads: Executor | None, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **keywords)
    call = partial(without_stop, function, *arguments, **keywords)
    value = await asyncio.get_running_loop().run_in_executor(threads, call)
    return await value if inspect.isawaitable(value) else value


def without_stop(function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
    """Call a function in a thread. A ``StopIteration``, which no future takes, is a ``RuntimeError``, as it is in a
    coroutine: who waits for it would wait for ever."""
    try:
        return function(*arguments, **keywords)
    except StopIteration as error:
        raise RuntimeError("the environment raised StopIteration") from error


async def closed(inner: Any) -> None:
    """Close an object, if it has such a method."""
    if hasattr(inner, "close"):
        await called(inner.close)


class MadePerRow:
    """An environment whose inner one, which may have ``close()``, is made of a row by its class."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self.inner: Any = None

    async def close(self) -> None:
        """Close the inner environment."""
        await closed(self.inner)


def number(value: Any) -> float | None:
    """Return a number as :func:`scalar` does; None is none."""
    return None if value is None else scalar(value)


def scalar(value: Any) -> float:
    """Return a number, also of a tensor with one value or of a list of one. Anything else is a ``TypeError``."""
    try:
        value = value.item() if hasattr(value, "item") else value
        return float(value[0] if isinstance(value, (list, tuple)) else value)
    except (TypeError, ValueError, LookupError, RuntimeError):
        raise TypeError(f"a reward or metric of an environment is {value!r:.200}, and must be a number") from None


def numbers(values: Any) -> dict[str, float]:
    """Return the numbers of a dict, those of numpy and tensors with one value too, as metrics."""
    return {str(key): float(value) for key, value in (values or {}).items()
            if isinstance(value, Real) or getattr(value, "ndim", None) == 0}  # yapf: disable


def parameters(cls: type, method: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a method without the object itself."""
    found = dict(inspect.signature(getattr(cls, method)).parameters)
    found.pop("self", None)
    return found


def taken(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``values`` that a function takes as keywords."""
    known = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in known.values())
    return {name: value for name, value in values.items() if takes_all or name in known}


def dataclass_in_hint(cls: type, parameter: str) -> Callable[[], Any]:
    """Return the dataclass that the hint of a constructor's parameter names, alone or among others; else ``dict``."""
    with suppress(NameError, AttributeError, TypeError):  # a hint that names what is imported for type checkers alone
        hint = get_type_hints(cls.__init__).get(parameter)  # type: ignore[misc]
        return next((each for each in (hint, *get_args(hint)) if isinstance(each, type) and is_dataclass(each)), dict)
    return dict


def extra_info(prompt: Task) -> dict[str, Any]:
    """Return the object in verl's column ``extra_info`` of a row."""
    return prompt.columns.get("extra_info") or {}


def row_of(prompt: Task) -> dict[str, Any]:
    """Return the columns of a row with its prompt, as TRL passes them."""
    return prompt.columns | {"prompt": prompt.messages or prompt.text, "reference": prompt.reference,
                             "data_source": prompt.data_source, "label": prompt.label}  # yapf: disable
