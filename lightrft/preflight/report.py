"""Readable forms of the option tree: the ``--dry_run`` report and the option tables of the docs."""
from textwrap import wrap
from typing import Any

from lightrft.config.layers import preset_values
from lightrft.config.options import in_words, show
from lightrft.config.presets import MEANINGS, RECIPES, SEMANTICS
from lightrft.config.schema import Config
from lightrft.config.shared_schema import Tree
from lightrft.config.tree import group_options, groups, options
from lightrft.preflight.base import preflight
from lightrft.preflight.hardware import Machine

WIDTH = 80  # of the lines of options at their default


def resolved(config: Any, provenance: dict[str, str]) -> str:
    """List every option of a tree by group: name, value and source of the value; those that nothing has set together.
    """
    lines = []
    for group, part in vars(config).items():
        values = {name: show(value) for name, value in vars(part).items()}
        chosen = [name for name in values if provenance.get(name, "default") != "default"]
        untouched = " ".join(f"{name}={value}" for name, value in values.items() if name not in chosen)
        lines += [f"{group}:", *(f"  {name:<32} {values[name]:<28} [{provenance[name]}]" for name in chosen)]
        lines += wrap(f"default: {untouched}", WIDTH, initial_indent="  ", subsequent_indent="    ",
                      break_long_words=False, break_on_hyphens=False) if untouched else []  # yapf: disable
    return "\n".join(lines)


def report(config: Tree, provenance: dict[str, str], machine: Machine) -> str:
    """Write the report of ``--dry_run``: every option with its provenance, estimates and warnings."""
    plan = preflight(config)
    texts = [*plan.estimates(machine), *(f"warning: {text}" for text in plan.warnings())]
    return "\n".join([resolved(config, provenance), *([""] if texts else []), *texts])


def recipe_table() -> str:
    """Render a Markdown table with one row per recipe."""
    lines = ["| `--recipe` | method | paper | sets |", "|---|---|---|---|"]
    for name, (paper, summary, values) in RECIPES.items():
        sets = " ".join(f"`--{option} {show(value)}`" for option, value in values.items())
        lines.append(f"| `{name}` | {summary} | [{paper.rpartition('/')[2]}]({paper}) | {sets} |")
    return "\n".join(lines) + "\n"


def semantics_table() -> str:
    """Render a Markdown table: a row per difference, a column per trainer; options that a preset does not set show the
    default."""
    known = options(Config)
    heads = [f"`{name}`" + f" ({preset.version})" * bool(preset.version) for name, preset in SEMANTICS.items()]
    lines = ["| meaning | option | " + " | ".join(heads) + " |",
             "|---" * (2 + len(SEMANTICS)) + "|"]  # yapf: disable
    for option, (meaning, given) in MEANINGS.items():
        found = [preset_values({"semantics": name, **given}).get(option, known[option].default) for name in SEMANTICS]
        cells = [meaning, f"`--{option}`", *(f"`{show(value)}`" for value in found)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def option_table(tree: type) -> str:
    """Render Markdown: per group of ``tree`` (such as ``Config``), a heading, its description and an option table."""
    parts, known = [], options(tree)
    for group, cls in groups(tree).items():
        rows = [
            f"### {group}", "", cls.__doc__ or "", "", "| flag | type | default | range | meaning |", "|" + "---|" * 5
        ]
        for option in group_options(cls, group).values():
            needed = [f"`--{name}{f' {value}' * bool(known[name].choices)}`" for name, value in option.needed.items()]
            needs = f"; needs {' or '.join(needed)}" if needed else ""
            flag = f"**`{option.flag}`**" if option.common else f"`{option.flag}`"
            cells = (flag, option.type_name, f"`{show(option.default)}`", in_words(option.within), option.help + needs)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"
