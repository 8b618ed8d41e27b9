"""Reads the reference of a row, in the forms that data sets write it, as the answers that built-in rewards accept."""
import ast
import json
import re
from collections.abc import Mapping
from typing import Any

FIELDS = ("target", "targets", "ground_truth", "answer", "answers", "solution", "reference", "value", "text")
"""Keys of an object that hold the accepted answers; the first that it has counts."""
_MORE = "aliases"  # further answers beside them, as in TriviaQA
_CLOSING = {"[": "]", "{": "}", '"': '"'}
_JOINED = re.compile(r"""(['"])\s+\1""")  # texts without a comma between them: a printed numpy array
REFERENCE_FORM = "reference_form"  # cause of responses that are unscored for such a reference


class ReferenceFormError(ValueError):
    """A reference has a form in which no answer can be found; the message says which."""


def accepted_answers(reference: Any) -> list[str]:
    """Return the accepted answers as texts, the likeliest first; none for null and blanks.

    A list holds several, an object (Search-R1's ``{"target": [...]}``) one or several under one of ``FIELDS``. A text
    that is JSON, or Python, of such a list or object stands for it, and for itself: ``'["Oslo", "oslo"]'``. A list of
    several numbers, ``'[1, 2]'``, stays a text, since it may be an interval or a vector.

    Raises:
        ReferenceFormError: an object has none of ``FIELDS``, bytes are no UTF-8, or a text is a list without commas.
    """
    return [*dict.fromkeys(text for text in map(str.strip, _texts(_plain(reference))) if text)]


def _plain(reference: Any) -> Any:
    """Return a value of numpy, or bytes, as one of Python."""
    if isinstance(reference, (bytes, bytearray)):
        try:
            return reference.decode()
        except UnicodeDecodeError:
            raise ReferenceFormError("it is bytes that are no UTF-8") from None
    return reference.tolist() if hasattr(reference, "tolist") else reference


def _texts(reference: Any) -> list[str]:
    if reference is None or isinstance(reference, float) and reference != reference:
        return []
    if isinstance(reference, (list, tuple)):
        return [text for each in reference for text in _texts(_plain(each))]
    if isinstance(reference, Mapping):
        return _texts_of_object(reference)
    if isinstance(reference, str):
        return [*_texts_in(reference.strip()), reference]
    whole = isinstance(reference, float) and reference.is_integer()  # an integer that went through a table with NaN
    return [str(int(reference)), str(reference)] if whole else [str(reference)]


def _texts_of_object(reference: Mapping[str, Any]) -> list[str]:
    field = next((name for name in FIELDS if reference.get(name) is not None), None)
    if field is None:
        raise ReferenceFormError(f"it is an object of {', '.join(map(str, reference)) or 'nothing'}, and its answer is "
                                 f"looked for in {', '.join(FIELDS)}")
    return [text for name in (field, _MORE) for text in _texts(_plain(reference.get(name)))]


def _texts_in(text: str) -> list[str]:
    """Return the answers that a text of JSON or Python holds; none for another text."""
    value = written_value(text)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and (len(value) == 1 or any(isinstance(each, str) for each in value)):
        return _texts(value)
    if isinstance(value, dict) and any(value.get(name) is not None for name in FIELDS):
        return _texts(value)
    return []


def written_value(text: str) -> Any:
    """Return the text, list or object that a text holds as JSON or Python; None for any other text.

    Raises:
        ReferenceFormError: its texts have no commas between them.
    """
    if len(text) < 2 or _CLOSING.get(text[0]) != text[-1]:
        return None
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    if isinstance(value, list) and _JOINED.search(text):
        raise ReferenceFormError("it is a printed array without commas between its texts")
    return value if isinstance(value, (list, dict)) else None
