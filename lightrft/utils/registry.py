"""Registry of named components that users select on the command line and third parties can add."""
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Generic, TypeVar

from lightrft.utils.errors import UserError

T = TypeVar("T")


class Registry(Generic[T]):
    """A decorator registry whose error names the known entries and the nearest one.

    Example::

        ADVANTAGES: Registry[AdvantageFn] = Registry("advantage estimator")

        @ADVANTAGES.register("rloo")
        def rloo(exp, cfg): ...
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Register the decorated object under every name. A name of another object raises ``ValueError``."""

        def add(entry: T) -> T:
            for name in names:
                if self._entries.setdefault(name, entry) is not entry:
                    raise ValueError(f"{self.kind} {name!r} is registered twice")
            return entry

        return add

    def get(self, name: str) -> T:
        """Return the entry ``name``, or raise a :class:`UserError` that lists the known names."""
        if name not in self._entries:
            near = get_close_matches(name, self._entries, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"unknown {self.kind} {name!r}{hint} Known: {', '.join(sorted(self._entries))}")
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
