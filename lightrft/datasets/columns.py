"""Finds the columns of rows, and the keys of their turns and objects, that a reader uses: it reads a row without each.

So no list of columns is kept beside the readers, which could differ from what they do.
"""
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lightrft.datasets.prompt_rows import missing
from lightrft.datasets.rows import Row, Rows
from lightrft.utils.logging import get_logger, silent_logger

Reader = Callable[[Rows], Any]
_ANOTHER = 7919  # a value in place of a neutral one, such as a weight of 1, which a reader of the column would notice
# raised by a reader, a template or a decoder for a row that lacks something or has another kind of value
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, OSError, RuntimeError)
_FIRST = 256  # rows in which columns are looked for


@dataclass
class Columns:
    """Names of columns, and of the keys of turns or of an object by their column: those that a reader uses, and the
    rest."""
    used: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    used_keys: dict[str, list[str]] = field(default_factory=dict)
    left_keys: dict[str, list[str]] = field(default_factory=dict)

    def lines(self, name: str, others: str) -> Iterator[str]:
        """Yield a line on what is read of the source ``name``, and one on the rest, if any, which ``others`` describes;
        keys are in brackets behind their column."""
        yield f"data: {name}: reads {_listed(self.used, self.used_keys)}"
        if self.left or any(self.left_keys.values()):
            left = [name for name in self.left_keys if name in self.used] + self.left
            yield f"data: {name}: {others} {_listed(left, self.left_keys)}"


def _listed(columns: list[str], keys: Mapping[str, list[str]]) -> str:
    return ", ".join(f"{name} ({', '.join(keys[name])})" if keys.get(name) else name for name in columns) or "no column"


def columns_of(rows: Rows, read: Reader) -> Columns:
    """Return the columns of ``rows`` that ``read`` uses, with the keys of turns in those that hold chats, and those of
    objects.

    Each is tried in the first row that has a value in it: without it, and with another value, what is read changes,
    or cannot be read. Columns without any value are in neither list, and an object of which no key is used is not used.
    """
    found, base = Columns(), _Reading(rows, read)
    for name, index in _first_with(rows.rows[:_FIRST], lambda i: base.of(i) not in ([], None)):
        value = rows.rows[index][name]
        used = base.depends(index, lambda row, value, name=name: _set(row, name, value))  # type: ignore[misc]
        of_key = {key: base.depends(index, lambda row, value, name=name, key=key: row | {  # type: ignore[misc]
            name: _set_key(row[name], key, value)}) for key in (_keys(value) if used else ())}  # yapf: disable
        used &= not isinstance(value, dict) or any(of_key.values())
        (found.used if used else found.left).append(name)
        for key, of in of_key.items():
            (found.used_keys if of else found.left_keys).setdefault(name, []).append(key)
    return found


def _first_with(rows: list[Row], readable: Callable[[int], bool]) -> list[tuple[str, int]]:
    """Return the columns, each with the first readable row that has a value in it."""
    first: dict[str, int] = {}
    for index, row in enumerate(rows):
        for name, value in row.items():
            if name not in first and not missing(value) and readable(index):
                first[name] = index
    return [*first.items()]


def _keys(value: Any) -> list[str]:
    """Return the keys with a value of an object, or of the turns of a chat."""
    chat = isinstance(value, list) and all(isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in value)
    objects = value if chat else [value] * isinstance(value, dict)
    return [*dict.fromkeys(key for each in objects for key in each if not missing(each[key]))]


def _set_key(value: Any, key: str, to: Any) -> Any:
    """Return an object, or the turns of a chat, with another value of a key where they have it."""
    if isinstance(value, dict):
        return _set(value, key, to)
    return [_set(turn, key, to) if key in turn else turn for turn in value]


def _set(values: Row, name: str, value: Any) -> Row:
    """Return a copy with another value under a name, or without the name if the value is None."""
    return {key: each for key, each in values.items() if key != name} | ({} if value is None else {name: value})


def report_columns(rows: Rows, read: Reader, others: str) -> None:
    """Log the :meth:`Columns.lines` of the rows of one entry."""
    first, *more = rows.files
    name = Path(first[0]).name + f" and {len(more)} more files" * bool(more)
    columns = columns_of(rows, read)
    for line in columns.lines(name, others) if columns.used else ():  # else no row can be read
        get_logger().info(line)


class _Reading:
    """Readings of single rows, the unchanged ones cached."""

    def __init__(self, rows: Rows, read: Reader) -> None:
        self.rows, self.read, self._base = rows, read, dict[int, Any]()

    def depends(self, index: int, change: Callable[[Row, Any], Row]) -> bool:
        """Return True if the reading of a row changes with ``change(row, value)``; None as value: it is removed."""
        row = self.rows.rows[index]
        return any(self._changed(index, change(row, value)) != self.of(index) for value in (None, _ANOTHER))

    def of(self, index: int) -> Any:
        """Return the reading of a row as it is, empty if it is left out; None for one that cannot be read alone."""
        if index not in self._base:
            self._base[index] = self._changed(index, self.rows.rows[index])
        return self._base[index]

    def _changed(self, index: int, row: Row) -> Any:
        try:
            with silent_logger():
                return _comparable(self.read(replace(self.rows.pick([index]), rows=[row])))
        except _UNREADABLE:
            return None


def _comparable(value: Any) -> Any:
    """Return data classes and arrays in ``value`` as lists, which compare by content."""
    if is_dataclass(value) and not isinstance(value, type):
        return [_comparable(getattr(value, each.name)) for each in fields(value)]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_comparable(each) for each in value]
    return value
