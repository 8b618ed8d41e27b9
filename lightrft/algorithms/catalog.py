"""The table of algorithms, made from the registries and the docstrings of the registered modules."""
import inspect
import re
from collections.abc import Callable, Iterator

from lightrft.algorithms.base import ADVANTAGES, CORRECTIONS, POLICY_LOSSES, Advantage, Correction, Surrogate

COLUMNS = ("name", "kind", "what it does", "equation", "paper", "needs", "degenerate case", "deviation")
_FIELD = re.compile(r"^(Paper|Equation|Degenerate|Deviation):(.*?)(?=^\w+:|\Z)", re.MULTILINE | re.DOTALL)


def fields_of(fn: Callable) -> dict[str, str]:
    """The first line (``summary``) and the structured fields (lower case) of the docstring of ``fn``'s module."""
    text = inspect.getdoc(inspect.getmodule(fn)) or ""
    found = {name.lower(): " ".join(value.split()) for name, value in _FIELD.findall(text)}
    return {"summary": text.partition("\n")[0], **found}


def table() -> str:
    """Markdown: one row per registered algorithm, whose aliases share a row; plug-ins included."""
    lines = [_row(COLUMNS), _row(["---"] * len(COLUMNS))]
    return "\n".join(lines + [_row(cells) for cells in _entries()]) + "\n"


def _entries() -> Iterator[list[str]]:
    for registry in (ADVANTAGES, POLICY_LOSSES, CORRECTIONS):
        names: dict[int, list[str]] = {}
        for name in registry:
            names.setdefault(id(registry.get(name)), []).append(name)
        for aliases in names.values():
            yield _cells(registry.kind, aliases, registry.get(aliases[0]))


def _cells(kind: str, aliases: list[str], entry: Advantage | Surrogate | Correction) -> list[str]:
    doc = fields_of(entry.fn)
    equation = f"`{doc['equation']}`" if "equation" in doc else ""
    named = ", ".join(f"`{alias}`" for alias in aliases)
    return [
        named, kind, doc["summary"], equation,
        doc.get("paper", ""),
        _needs(entry),
        doc.get("degenerate", ""),
        doc.get("deviation", "")
    ]


def _needs(entry: Advantage | Surrogate | Correction) -> str:
    if isinstance(entry, Correction):
        return ""
    if isinstance(entry, Surrogate):
        return "current log-probs of the whole mini-batch (one more forward pass)" if entry.selects else ""
    flags = {
        "a group": entry.needs_group, "a critic": entry.needs_critic, "no other whitening (it whitens itself)":
        entry.whitens, "one greedy response per prompt": entry.needs_greedy, "the parts of the reward":
        entry.needs_parts, "rewards that are not negative": entry.needs_positive
    }
    return ", ".join(text for text, is_set in flags.items() if is_set)


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
