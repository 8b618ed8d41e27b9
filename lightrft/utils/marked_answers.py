r"""Answers that a text marks: ``\boxed{..}``, ``#### n``, ``<answer>..</answer>``."""
import re

_MARKS = re.compile(r"\\(?:f?boxed|fbox)\s*\{|\\f?boxed\s+(?=[^\s{])|####(?= *[-+$\\.\d])(?! *\d+[.)] )|<answer>")
_BRACES = re.compile(r"\\.|[{}]")


def extract_answer(response: str) -> str | None:
    r"""Return the last complete ``\boxed{..}``, ``#### n`` or ``<answer>..</answer>`` of ``response``, or None."""
    marks = list(_MARKS.finditer(response))
    closes = _closing_braces(response, [mark.end() for mark in marks if mark.group().endswith("{")])
    for mark in reversed(marks):
        kind, start = mark.group(), mark.end()
        if kind.endswith("{"):
            body = response[start:closes[start]] if start in closes else None
        else:
            body = _unbraced(response, kind, start)
        if body is not None:
            inner = extract_answer(body) if kind == "<answer>" else None
            return inner if inner is not None else body.strip()
    return None


def boxed_answers(text: str) -> list[str]:
    r"""Return every complete ``\boxed{..}`` of ``text``, in order, without surrounding blanks."""
    starts = [mark.end() for mark in re.finditer(r"\\boxed\s*\{", text)]
    closes = _closing_braces(text, starts)
    return [text[start:closes[start]].strip() for start in starts if start in closes]


def _unbraced(text: str, kind: str, start: int) -> str | None:
    end = text.find("</answer>", start)
    if kind == "<answer>":
        return text[start:end] if end >= 0 else None
    stop = re.compile(r"\n|$" if kind == "####" else r"[\s$]|$").search(text, start)
    return (text[start:stop.start()] if stop else "").strip() or None


def _closing_braces(text: str, starts: list[int]) -> dict[int, int]:
    """Map the position after an opening brace to that of its partner, from the first of ``starts`` to the end.

    One pass, because a broken response may open thousands.
    """
    pairs: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACES.finditer(text, starts[0] - 1) if starts else ():
        if brace.group() == "{":
            opened.append(brace.end())
        elif brace.group() == "}" and opened:
            pairs[opened.pop()] = brace.start()
    return pairs
