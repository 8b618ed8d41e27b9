"""Names of components: registries that third parties can add to, and exports of a package that load at first use."""
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches, SequenceMatcher
from importlib import import_module
from typing import Any, Generic, TypeVar

from lightrft.utils.errors import UserError, did_you_mean
from lightrft.utils.lightrft_names import refuse_name

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Entry of a registry that an option chooses from, with the other options that it depends on."""
    reads: tuple[str, ...] | None = None  # options that it shares with others of its kind; None: not declared
    own: tuple[str, ...] = ()  # options that its file declares

    def ignores(self, option: str) -> bool:
        """Return True if it declares its options and this is none of them."""
        return self.reads is not None and option not in self.reads and option not in self.own


class Registry(Generic[T]):
    """A decorator registry whose error names the known entries and the nearest one.

    Example::

        ENVIRONMENTS: Registry[Callable[[], Any]] = Registry("environment")

        @ENVIRONMENTS.register("guess")
        class Guess: ...
    """

    def __init__(self, kind: str, elsewhere: Mapping[str, str] | None = None, synonyms: Mapping[str, str] | None = None,
                 decorator: str = "") -> None:
        """Begin without entries.

        Args:
            elsewhere: names of other trainers, and what does the same here.
            synonyms: those that are read as an entry; no entry may have such a name.
            decorator: what registers a function, because an entry says more than the function: a :class:`Chosen`.
        """
        self.kind, self.elsewhere, self.synonyms, self.decorator = kind, elsewhere or {}, synonyms or {}, decorator
        self._entries: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Register the decorated object under every name. A name of another object raises ``ValueError``, a function
        that has a decorator of its own ``TypeError``."""

        def add(entry: T) -> T:
            if self.decorator and not isinstance(entry, Chosen):
                raise TypeError(f"{self.kind} {names[0]!r}: register the function with @{self.decorator} instead")
            for name in names:
                if name in self.synonyms:
                    raise ValueError(f"{self.kind} {name!r} means {self.synonyms[name]!r}; register another name")
                if self._entries.setdefault(name, entry) is not entry:
                    raise ValueError(f"{self.kind} {name!r} is registered twice")
            return entry

        return add

    def get(self, name: str) -> T:
        """Return the entry ``name``, or raise a :class:`UserError` that lists the known names."""
        name = self.synonyms.get(name, name)
        if name not in self._entries:
            theirs = foreign_name(name, self.elsewhere, self._entries)
            near = f" (here: {self.elsewhere[theirs]})" if theirs else did_you_mean(name, self._entries)
            raise UserError(f"unknown {self.kind} {name!r}{near}; known: {', '.join(sorted(self._entries))}")
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)


def foreign_name(name: str, elsewhere: Iterable[str], known: Iterable[str]) -> str | None:
    """Return the name of ``elsewhere`` that ``name`` is, or is more like than any of ``known``; None if there is none.
    """

    def likeness(other: str) -> float:
        return SequenceMatcher(None, other, name).ratio()

    theirs = get_close_matches(name, set(elsewhere) - set(known), n=1)
    ours = get_close_matches(name, list(known), n=1)
    return theirs[0] if theirs and not (ours and likeness(ours[0]) >= likeness(theirs[0])) else None


def lazy_exports(package: str, homes: dict[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``package`` (PEP 562), which loads the home module of a name at its first use. A
    name of LightRFT that is another one here is an ``ImportError`` that says so."""

    def load(name: str) -> Any:
        if name not in homes:
            refuse_name(package, name)
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return load
