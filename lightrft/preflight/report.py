"""Readable forms of the option tree: the ``--dry_run`` report and the option tables of the docs."""
from typing import Any

from lightrft.config.engines import NAMES
from lightrft.preflight.cost import ModelSize, batch_summary, time_line
from lightrft.preflight.memory import UNKNOWN, Room, memory_lines
from lightrft.config.flags import show
from lightrft.config.layers import preset_values
from lightrft.config.options import group_options, groups, options
from lightrft.config.presets import MEANINGS, RECIPES, SEMANTICS
from lightrft.config.schema import Config


def resolved(config: Any, provenance: dict[str, str]) -> str:
    """List every option of a tree by group: name, value and source of the value."""
    lines = []
    for group, cls in groups(type(config)).items():
        values = vars(vars(config)[group])
        lines.append(f"{group}:")
        for name in group_options(cls, group):
            source = provenance.get(name, "default")
            lines.append(f"  {name:<32} {show(values[name]):<28} [{source}]")
    return "\n".join(lines)


def describe(config: Config, provenance: dict[str, str], world_size: int, size: ModelSize | None = None,
             device: str = "", room: Room = UNKNOWN, critic: bool = False) -> str:
    """Write the report of ``--dry_run``: every option with its provenance, batch sizes, estimates.

    Args:
        size: parameter counts, from :func:`lightrft.preflight.cost.model_size`; None when they are not known.
        device: name of the GPU, from :func:`lightrft.preflight.cost.gpu_name`; empty for a CPU.
        room: memory of that GPU, or of a CPU.
        critic: a critic of the same size is trained as well.
    """
    estimates = [
        batch_summary(config, world_size), *memory_lines(config, world_size, size, room, critic),
        time_line(config, world_size, size, device, critic), *_unchecked(config)
    ]
    return "\n".join([resolved(config, provenance), "", *estimates])


def _unchecked(config: Config) -> list[str]:
    """List what only the start of the engine can check."""
    if not config.rollout.engine_args:
        return []
    return [f"--engine_args: {NAMES[config.rollout.engine_type]} checks names and values when it starts, not here"]


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
    for option, (meaning, beside) in MEANINGS.items():
        found = [preset_values({"semantics": name, **beside}).get(option, known[option].default) for name in SEMANTICS]
        cells = [meaning, f"`--{option}`", *(f"`{show(value)}`" for value in found)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def option_table(tree: type) -> str:
    """Render Markdown: per group of ``tree`` (such as ``Config``), a heading, its description and an option table."""
    parts = []
    for group, cls in groups(tree).items():
        rows = [f"### {group}", "", cls.__doc__ or "", "", "| flag | type | default | meaning |", "|---|---|---|---|"]
        for option in group_options(cls, group).values():
            cells = (f"`{option.flag}`", option.type_name, f"`{show(option.default)}`", option.help)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"
