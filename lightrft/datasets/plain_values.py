"""Turns values of numpy, pandas and torch in rows of a Python program into those that a file would give."""
from collections.abc import Mapping
from typing import Any

import numpy as np

PLAIN = {str, int, float, bool, type(None)}
_NULLS = ("NAType", "NaTType")  # of pandas, which is not imported for them


def plain_row(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row with plain values under texts as names; NaN, with which tables mark what is missing, becomes
    None."""
    values = {str(name): plain(value) for name, value in row.items()}
    return {name: None if isinstance(value, float) and value != value else value for name, value in values.items()}


def plain(value: Any) -> Any:
    """Return ``value`` with numbers, texts, dates and lists of Python in place of other libraries' at every depth.

    Bytes, pictures, and arrays of pictures or sounds (numbers of two or more axes, and what an object has under
    ``array``) stay as they are.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, Mapping):
        return {name: each if name == "array" else plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [*value] if {*map(type, value)} <= PLAIN else [plain(each) for each in value]
    if type(value).__name__ in _NULLS:
        return None
    return _scalar(value) if not hasattr(value, "tolist") else _of_array(value)


def _of_array(value: Any) -> Any:
    """Return an array, a tensor or a scalar of numpy as plain values, or as an array of numpy if it may be a medium."""
    array = np.asarray(value)
    if array.dtype.kind in "mM":  # dates in nanoseconds would become integers
        array = array.astype(f"{array.dtype.kind}8[us]")
    if array.ndim >= 2 and not array.dtype.hasobject and array.dtype.kind not in "SUmM":
        return array
    return plain(array.tolist())


def _scalar(value: Any) -> Any:
    if hasattr(value, "to_pydatetime"):
        return value.to_pydatetime(warn=False)
    return value.to_pytimedelta() if hasattr(value, "to_pytimedelta") else value
