"""The option tree for people: the ``--dry_run`` report and the option tables of the docs."""
from typing import Any

from lightrft.config.estimate import ModelSize, batch_summary, memory_lines, time_line
from lightrft.config.flags import show
from lightrft.config.options import group_options, groups
from lightrft.config.schema import Config


def resolved(config: Any, provenance: dict[str, str]) -> str:
    """Every option of a tree by group: name, value and where the value is from."""
    lines = []
    for group, cls in groups(type(config)).items():
        values = vars(vars(config)[group])
        lines.append(f"{group}:")
        for name in group_options(cls, group):
            source = provenance.get(name, "default")
            lines.append(f"  {name:<32} {show(values[name]):<28} [{source}]")
    return "\n".join(lines)


def describe(config: Config, provenance: dict[str, str], world_size: int, size: ModelSize | None = None,
             device: str = "", critic: bool = False) -> str:
    """The report of ``--dry_run``: every option with its provenance, batch sizes, estimates.

    Args:
        size: parameter counts, from :func:`lightrft.config.estimate.model_size`; None when they are not known.
        device: name of the GPU, from :func:`lightrft.config.estimate.gpu_name`; empty for a CPU.
        critic: whether a critic of the same size is trained as well.
    """
    estimates = [
        batch_summary(config, world_size), *memory_lines(config, world_size, size, critic),
        time_line(config, world_size, size, device, critic)
    ]
    return "\n".join([resolved(config, provenance), "", *estimates])


def option_table(tree: type) -> str:
    """Markdown: per group of ``tree`` (such as ``Config``) a heading, its description and a table of its options."""
    parts = []
    for group, cls in groups(tree).items():
        rows = [f"### {group}", "", cls.__doc__ or "", "", "| flag | type | default | meaning |", "|---|---|---|---|"]
        for option in group_options(cls, group).values():
            cells = (f"`{option.flag}`", option.type_name, f"`{show(option.default)}`", option.help)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"
