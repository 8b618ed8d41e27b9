"""Readable forms of the option tree: the ``--dry_run`` report and the option tables of the docs."""
from functools import singledispatch
from typing import Any

from lightrft.config.engines import ENGINES
from lightrft.config.inference_schema import InferenceTree
from lightrft.config.layers import preset_values
from lightrft.config.options import in_words, show
from lightrft.config.presets import MEANINGS, RECIPES, SEMANTICS
from lightrft.config.schema import Config
from lightrft.config.offline_schema import OfflineConfig
from lightrft.config.serve_schema import ServeConfig
from lightrft.config.shared_schema import Tree
from lightrft.config.tree import group_options, groups, options
from lightrft.preflight.algorithm_rules import trains_critic
from lightrft.models.activations import ModelShape
from lightrft.preflight.cost import batch_summary, known_kinds, known_model, time_line
from lightrft.preflight.engine_rules import missing_engine
from lightrft.preflight.hardware import Machine
from lightrft.preflight.memory import memory_lines, micro_batch_tokens, reward_sizes
from lightrft.preflight.planned import verdict
from lightrft.preflight.validate import warnings
from lightrft.rewards.spec import parse_models
from lightrft.strategy.memory import ModelSize


def resolved(config: Any, provenance: dict[str, str]) -> str:
    """List every option of a tree by group: name, value and source of the value."""
    lines = []
    for group, part in vars(config).items():
        lines.append(f"{group}:")
        for name, value in vars(part).items():
            lines.append(f"  {name:<32} {show(value):<28} [{provenance.get(name, 'default')}]")
    return "\n".join(lines)


def report(config: Tree, provenance: dict[str, str], machine: Machine) -> str:
    """Write the report of ``--dry_run``: every option with its provenance, estimates and warnings."""
    texts = [*estimates(config, machine), *(f"warning: {text}" for text in warnings(config))]
    return "\n".join([resolved(config, provenance), *([""] if texts else []), *texts])


@singledispatch
def summary(config: Tree, world_size: int) -> list[str]:
    """Describe a step of the run, in one line; each tree registers its own."""
    return []


@singledispatch
def estimates(config: Tree, machine: Machine) -> list[str]:
    """List what the run takes on ``machine``; a tree may register more than the memory."""
    return _memory(config, machine, *known_model(config.model.pretrain, machine.device.cuda))


def _memory(config: Tree, machine: Machine, size: ModelSize | None, shape: ModelShape | None) -> list[str]:
    return [
        *summary(config, machine.ranks),
        *memory_lines(config, machine.ranks, size, machine.device, trains_critic(config), shape),
        *_verdict(config, machine)
    ]


@summary.register
def _(config: Config, world_size: int) -> list[str]:
    return [batch_summary(config, world_size)]


@summary.register
def _(config: OfflineConfig, world_size: int) -> list[str]:
    tokens, several = micro_batch_tokens(config, world_size)
    return [f"each step: {config.train.train_batch_size} {config.ROWS} of at most {config.sequence_len:,} tokens, in "
            f"{'micro-batches' if several else 'one micro-batch'} of at most {tokens:,} tokens per rank; {world_size} "
            f"rank{'s' if world_size > 1 else ''}"]  # yapf: disable


@estimates.register(ServeConfig)
@estimates.register(InferenceTree)
def _(config: InferenceTree | ServeConfig, machine: Machine) -> list[str]:
    return []


@estimates.register
def _(config: Config, machine: Machine) -> list[str]:
    size, shape = known_model(config.model.pretrain, machine.device.cuda)
    return [
        *_memory(config, machine, size, shape),
        time_line(config, machine.ranks, size, machine.gpu, trains_critic(config)),
        *_reward_models(config, machine.ranks), *_unchecked(config)
    ]


def _reward_models(config: Config, ranks: int) -> list[str]:
    """Say of every reward model what it does, how large it is and where it rests."""
    r, paths = config.reward, parse_models(config.reward.reward_pretrain)
    if not paths:
        return []
    from lightrft.rewards.reward_models import description
    kinds, sizes = known_kinds(paths.values()), reward_sizes(r)
    place = f"divided over {config.strategy.fsdp_shard_size or ranks} ranks" if r.reward_shard else "whole on each rank"
    place += ", in host memory except while it scores" if r.reward_offload else ""
    lines = []
    for name, path in paths.items():
        does = description(kinds[path], r) if path in kinds else "is read when the run starts"
        held = f", {sizes[name].total:,} parameters" if name in sizes else ""
        lines.append(f"reward model {name}: {path} {does}{held}, {place}")
    return lines


def _verdict(config: Tree, machine: Machine) -> list[str]:
    """Say that a plan fits on a GPU, and warn if it leaves little; one that does not fit is an error."""
    found = verdict(config, machine)
    if found is None or found.verdict == "fail":
        return []
    return [found.text if found.verdict == "ok" else f"warning: {found.text}; {found.remedy}"]


def _unchecked(config: Config) -> list[str]:
    """List what a plan for another machine leaves open, and what only the start of the engine can check."""
    absent = [f"warning: {text}" for text in missing_engine(config)]
    if not config.rollout.engine_args:
        return absent
    return [
        *absent,
        f"--engine_args: {ENGINES[config.rollout.engine_type].title} checks names and values when it starts, not here"
    ]


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
