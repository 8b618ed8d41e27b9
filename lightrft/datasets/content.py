"""Content of the values of a row; its hash identifies rows in memory."""
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

_PLAIN = {str, int, float, bool, type(None)}


def content(value: Any) -> Any:
    """Return ``value`` with hashes in place of bytes, arrays and pictures, whose ``repr`` leaves content out.

    The ``repr`` of the result is the same in every process for equal values.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {name: content(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return value if {*map(type, value)} <= _PLAIN else [content(one) for one in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "bytes", _hash(value)
    if isinstance(value, Image.Image):
        return _picture(value)
    if hasattr(value, "__array__"):
        return _array(np.asarray(value))
    return value


def _hash(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _array(array: np.ndarray) -> Any:
    if array.dtype.hasobject:
        return "objects", array.shape, content(array.tolist())
    return str(array.dtype), array.shape, _hash(array.tobytes())


def _picture(picture: Image.Image) -> Any:
    """Describe pixels, and what else decides how they are shown: colours, transparency, how the camera was held."""
    about = [picture.mode, picture.size, content(picture.info)]
    try:
        return [*about, _hash(picture.tobytes()), picture.getpalette(None)]
    except (OSError, ValueError, SyntaxError, EOFError):  # a file that is broken, which is told where it is read
        return about
