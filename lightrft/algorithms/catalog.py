"""Table of algorithms, made from the registries and the docstrings of the registered modules."""
import inspect
import re
from collections.abc import Callable, Iterator

from lightrft.algorithms.base import REGISTRIES, Advantage, Correction, Surrogate
from lightrft.config.schema import Config
from lightrft.config.tree import options

Entry = Advantage | Surrogate | Correction

COLUMNS = ("name", "flags", "what it does", "equation", "paper", "needs", "degenerate case", "deviation")
_FIELD = re.compile(r"^(Paper|Equation|Degenerate|Deviation):(.*?)(?=^\w+:|\Z)", re.MULTILINE | re.DOTALL)


def fields_of(fn: Callable) -> dict[str, str]:
    """Return the first line (``summary``) and the fields (lower case) of the docstring that describes ``fn``.

    It is the docstring of ``fn`` if that has fields (several algorithms in one file), else that of its module.
    """
    own = inspect.getdoc(fn) or ""
    text = own if _FIELD.search(own) else inspect.getdoc(inspect.getmodule(fn)) or ""
    found = {name.lower(): " ".join(value.split()) for name, value in _FIELD.findall(text)}
    return {"summary": text.partition("\n")[0], **found}


def table() -> str:
    """Return a Markdown table: one row per registered algorithm with its aliases, plug-ins included."""
    lines = [_row(COLUMNS), _row(["---"] * len(COLUMNS))]
    rows = [_row(cells_of(option, names, entry)) for option, names, entry in _entries()]
    return "\n".join(lines + rows) + "\n"


def tuned_by(entry: Entry) -> list[str]:
    """Return the options that an algorithm depends on: those it reads, and those that decide its inputs."""
    read = [*(entry.reads or ()), *entry.own]
    if isinstance(entry, Correction):
        return read
    if isinstance(entry, Surrogate):
        return [*read, "loss_agg_mode"]
    more = {
        "n_samples_per_prompt": entry.needs_group, "zero_spread": entry.needs_group, "whiten_unbiased": entry.whitens,
        "reward": entry.needs_parts
    }
    critic = [name for name, option in options(Config).items() if entry.needs_critic and "critic" in option.read_by]
    return [*read, *(name for name, is_set in more.items() if is_set), *critic, "gamma"]


def _entries() -> Iterator[tuple[str, list[str], Entry]]:
    for option, registry in REGISTRIES.items():
        names: dict[int, list[str]] = {}
        for name in registry:
            names.setdefault(id(registry.get(name)), []).append(name)
        for aliases in names.values():
            yield option, aliases, registry.get(aliases[0])


def cells_of(option: str, aliases: list[str], entry: Entry) -> list[str]:
    """Return a row of :data:`COLUMNS`; the first flag chooses the algorithm, the others tune it."""
    doc = fields_of(entry.fn)
    equation = f"`{doc['equation']}`" if "equation" in doc else ""
    flags = " ".join(f"`--{name}`" for name in tuned_by(entry))
    return [
        ", ".join(f"`{alias}`" for alias in aliases), f"`--{option}`" + (f", {flags}" if flags else ""), doc["summary"],
        equation,
        doc.get("paper", ""),
        _needs(entry),
        doc.get("degenerate", ""),
        doc.get("deviation", "")
    ]


def _needs(entry: Entry) -> str:
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
