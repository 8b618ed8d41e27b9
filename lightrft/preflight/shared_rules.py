"""Rules that hold for every trainer: of single options, and of the option groups that all trees have."""
import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightrft.config.foreign_values import nearest_value
from lightrft.config.layers import changed
from lightrft.config.options import Option, show
from lightrft.config.offline_schema import OfflineConfig, OfflineDataConfig
from lightrft.config.prompt_schema import PromptConfig
from lightrft.config.schema import Config, DataConfig
from lightrft.config.shared_schema import (OptimConfig, PolicyModelConfig, SinkConfig, StrategyConfig, Tree)
from lightrft.config.tree import flatten, options
from lightrft.preflight.batches import nearest_divisors
from lightrft.preflight.written import written_problems
from lightrft.strategy.deepspeed import NO_DEEPSPEED
from lightrft.strategy.optimizers import OPTIMIZERS
from lightrft.utils.errors import did_you_mean, install_command
from lightrft.utils.registry import Registry
from lightrft.utils.trackers import tracker_refusal, wandb_problem

# what commands of other trainers always set, whether it is read or not
HELD_OUT = ("max_eval_samples", "eval_temperature", "eval_top_p", "eval_n_samples", "eval_pass_k", "accuracy_part")
OF_ZERO = ("zero_stage", )  # written beside --fsdp
UNMET = ("normalize_reward", )  # written by other trainers' commands whatever scores
CHECKPOINTS = ("save_steps", "max_ckpt_num", "max_ckpt_mem", "async_save")


def common_problems(c: Tree) -> Iterator[str]:
    """Yield one sentence per problem that does not depend on the command."""
    yield from written_problems(c)
    yield from unmet_needs(c)
    yield from _pixels(flatten(c))


def known_without_torch(c: Tree, world_size: int) -> Iterator[str]:
    """Yield the problems of a run on ``world_size`` ranks whose rules ask neither the machine nor torch."""
    yield from common_problems(c)
    if isinstance(c, (Config, OfflineConfig)):
        yield from training_problems(c, world_size, cuda=True)


def training_problems(c: Tree, world_size: int, cuda: bool) -> Iterator[str]:
    """Yield one sentence per problem that does not depend on the trainer."""
    yield from _head(flatten(c))
    yield from _policy(c.model, cuda)
    yield from _strategy(c, world_size)
    yield from _optimizer(c, world_size)
    yield from _checkpoint(c)
    yield from _best_metric(c)
    yield from _packages(c.log)


def _pixels(values: Mapping[str, Any]) -> Iterator[str]:
    """Check the limits on the size of pictures."""
    least, most = values.get("min_pixels", 0), values.get("max_pixels", 0)
    if 0 < most < least:
        yield f"--min_pixels {least}: more than --max_pixels {most}; nearest valid value: {most}"


def _head(values: Mapping[str, Any]) -> Iterator[str]:
    """Check the name of the head of a critic or reward model in its checkpoint."""
    prefix = values.get("value_head_prefix")
    if prefix is not None and not re.fullmatch(r"(?!(model|lm_head)$)[A-Za-z_]\w*(\.\w+)*(?<!\.weight)(?<!\.bias)",
                                               prefix):
        yield (f"--value_head_prefix {prefix!r}: must be the name of a module other than the decoder, without .weight; "
               "give e.g. score or value_head")


def unused(c: Tree) -> Iterator[str]:
    """Yield a warning per option that nothing reads, of those that other trainers' commands always set."""
    values = flatten(c)
    if not any(values.get(name) for name in ("use_wandb", "use_trackio", "trackers")):
        yield from if_set(c, [name for name in values if name.startswith("wandb_")],
                          "has no effect, because no tracker is selected; add --use_wandb, --use_trackio or "
                          "--trackers mlflow, or drop it")  # yapf: disable
    if {"eval_data", "eval_suite"} & values.keys() and not c.held_out:
        names = [*HELD_OUT, *(["eval_steps"] if values["eval_steps"] > 0 else [])]
        yield from if_set(c, names, f"has no effect {without_held_out(c)} or drop it")
    else:
        yield from _greedy(c, values)
    yield from (text for name, text in _unmet(c) if name in UNMET)
    if values.get("strategy") == "fsdp":
        yield from if_set(c, OF_ZERO, "has no effect with --strategy fsdp, which shards weights, gradients and "
                          "optimizer state, as stage 3 does")  # yapf: disable
    if values.get("disable_ckpt"):
        yield from if_set(c, CHECKPOINTS, "has no effect with --disable_ckpt; drop one of them")


def _greedy(c: Tree, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning per limit on the tokens that are sampled, where none is sampled."""
    for name in ("temperature", "eval_temperature"):
        prefix = name.removesuffix("temperature")
        limits = [f"{prefix}{limit}" for limit in ("top_p", "top_k", "min_p")]
        if values.get(name) == 0:
            yield from if_set(c, [limit for limit in limits if limit in values],
                              f"has no effect with --{name} 0, which is greedy; set --{name} above 0 or drop it")


def if_set(c: Tree, names: Iterable[str], text: str) -> Iterator[str]:
    """Yield ``--name value: text`` for each of these options that was set."""
    return (f"--{name} {show(value)}: {text}" for name, value in changed(c, names))


def unmet_needs(c: Tree) -> Iterator[str]:
    """Yield one sentence per option that was set and has no effect without another one, which was not."""
    return (text for name, text in _unmet(c) if name not in UNMET)


def _unmet(c: Tree) -> Iterator[tuple[str, str]]:
    values, known = flatten(c), options(c)
    for name, value in changed(c, known):
        option = known[name]
        if not option.is_read(values, known):
            yield name, f"--{name} {show(value)}: has no effect {_without(option, values, known)} or drop --{name}"


def _without(option: Option, values: Mapping[str, Any], known: Mapping[str, Option]) -> str:
    """Name the options that ``option`` needs and lacks, and what would do."""
    other = [f"with --{name} {show(values[name])}" for name in option.needed if known[name].choices and values[name]]
    unset = " or ".join(f"--{name}" for name in option.needed)
    examples = " or ".join(f"--{name} {example.replace('|', ' or ')}".strip()
                           for name, example in option.needed.items())  # yapf: disable
    return f"{other[0] if other else f'without {unset}'}; add {examples}"


def unread(c: Tree, chosen: str, rivals: Iterable[str]) -> Iterator[tuple[Option, Any]]:
    """Select the options that were set and that others of ``rivals`` (such as the engines) read, but not ``chosen``."""
    known, rivals = options(c), set(rivals)
    names = [name for name, one in known.items() if rivals.issuperset(one.read_by) and one.read_by]
    return ((known[name], value) for name, value in changed(c, names) if chosen not in known[name].read_by)


def _policy(m: PolicyModelConfig, cuda: bool) -> Iterator[str]:
    if m.lora_rank > 0 and not m.target_modules:
        yield f"--target_modules none: --lora_rank {m.lora_rank} needs modules; nearest valid value: all-linear"
    if m.lora_rank > 0 and m.freeze_prefix:
        yield f"--freeze_prefix {','.join(m.freeze_prefix)}: has no effect with --lora_rank; drop one"
    if m.use_liger:
        yield from _liger(cuda)


def _liger(cuda: bool) -> Iterator[str]:
    if not cuda:
        yield "--use_liger true: Liger's kernels need CUDA, and this machine has none; drop --use_liger"
    yield from _package("use_liger true", "liger_kernel", "liger")


def triton_kernels(name: str, cuda: bool) -> Iterator[str]:
    """Check that the kernels that the option ``name`` asks for can run."""
    if not cuda:
        yield f"--{name} true: its kernels need CUDA, and this machine has none; drop --{name}"
    yield from _package(f"{name} true", "triton")


def prompts(d: DataConfig) -> Iterator[str]:
    """Check the sources of prompts and their rendering."""
    yield from rendering(d)
    yield from probabilities("prompt_data", d.prompt_data_probs, len(d.prompt_data))


def rendering(d: PromptConfig | OfflineDataConfig) -> Iterator[str]:
    """Check the templates of a row."""
    if d.input_template is not None and d.input_template.count("{}") != 1:
        yield f"--input_template {d.input_template!r}: must hold {{}} exactly once, e.g. 'Question: {{}}'"


def probabilities(name: str, probs: list[float], sources: int) -> Iterator[str]:
    """Yield the problem of the mixing probabilities of the ``sources`` entries of an option."""
    if not probs or not sources:
        return
    if len(probs) != sources:
        yield f"--{name}_probs {probs}: {len(probs)} values for {sources} --{name} entries; give {sources}"
    elif abs(sum(probs) - 1) > 1e-6:
        nearest = ",".join(f"{p / sum(probs):.6g}" for p in probs) if sum(probs) > 0 else "positive values"
        yield f"--{name}_probs {probs}: must add up to 1, not {sum(probs):.6g}; nearest valid value: {nearest}"


def chosen_problems(c: Tree, flag: str, registry: Registry[Any]) -> Iterator[str]:
    """Yield the problem of an unknown entry of a registry, or options that others of its kind read and it does not."""
    chosen, entries = flatten(c)[flag], {name: registry.get(name) for name in registry}
    if chosen not in entries:
        yield (f"--{flag} {chosen}: unknown{nearest_value(flag, chosen, entries)}; known: "
               f"{', '.join(sorted(entries))}; the file of another one is named by --plugin")
        return
    readers: dict[str, list[str]] = {}
    for entry, facts in sorted(entries.items()):
        for name in (*(facts.reads or ()), *facts.own):
            readers.setdefault(name, []).append(entry)
    for name, value in changed(c, readers):
        if entries[chosen].ignores(name):
            yield (f"--{name} {show(value)}: {chosen} does not use it; drop it, or use --{flag} "
                   f"{' or '.join(readers[name])}")


def _optimizer(c: Tree, world_size: int) -> Iterator[str]:
    t, strategy = c.train, c.strategy.resolved(world_size)
    if len(t.adam_betas) != 2:
        yield f"--adam_betas {t.adam_betas}: needs two values; nearest valid value: 0.9 0.95"
    yield from chosen_problems(c, "optim", OPTIMIZERS)
    if t.optim in OPTIMIZERS:
        refusal = OPTIMIZERS.get(t.optim).refusal(t.optim, strategy, c.strategy.zero_stage)
        yield from [refusal] if refusal else []


def missing_optimizer(t: OptimConfig) -> Iterator[str]:
    """Yield the problem of an optimizer whose package is not installed here."""
    if t.optim in OPTIMIZERS and OPTIMIZERS.get(t.optim).coded:
        yield from _package(f"optim {t.optim}", "bitsandbytes", "bitsandbytes")


def without_held_out(c: Tree) -> str:
    """Name the options that bring held-out data, for a problem that they solve."""
    known = {
        name: example for name, example in (("eval_data", "PATH"), ("eval_suite", "math500")) if name in options(c)
    }
    return (f"without {' or '.join(f'--{name}' for name in known)}; add "
            f"{' or '.join(f'--{name} {example}' for name, example in known.items())}")


def _checkpoint(c: Tree) -> Iterator[str]:
    p = c.checkpoint
    if p.save_steps == 0:
        yield "--save_steps 0: not a number of steps; nearest valid value: -1 (only at the end), or --disable_ckpt"
    if p.disable_ckpt:
        for name in ("load_checkpoint", "save_hf_ckpt", "best_metric", "ckpt_path"):
            if vars(p)[name]:
                yield f"--{name} {show(vars(p)[name])}: contradicts --disable_ckpt; drop one of them"
    if p.best_metric and p.best_metric.startswith("eval/") and not c.held_out:
        yield f"--best_metric {p.best_metric}: is never measured {without_held_out(c)}"
    for name in ("save_path", "ckpt_path"):
        path = vars(p)[name]
        if path:
            yield from writable(name, path)


def writable(name: str, path: str) -> Iterator[str]:
    """Yield the problem of a future folder: the nearest of it and its parents that exists must be a writable folder,
    and the names below it short enough."""
    parents = (Path(path), *Path(path).absolute().parents)
    there = next(parent for parent in parents if os.path.exists(parent))
    which = "" if there == Path(path) else f"{there} "
    if not there.is_dir():
        yield f"--{name} {path}: {which}is a file; give a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"--{name} {path}: {which}cannot be written to; give a writable folder, or change its permissions"
    elif there != Path(path) and (reason := _unmakeable(there, Path(path).absolute())):
        yield f"--{name} {path}: cannot be created ({reason}); give a folder that can be written to"


def _unmakeable(there: Path, folder: Path) -> str:
    """Return why ``folder`` cannot be made below ``there``, a folder; empty if nothing is known against it."""
    if any(len(os.fsencode(part)) > os.pathconf(there, "PC_NAME_MAX") for part in folder.parts):
        return os.strerror(errno.ENAMETOOLONG)
    mounts = Path("/proc/self/mounts")
    kinds = dict(line.split()[1:3] for line in mounts.read_text().splitlines()) if mounts.exists() else {}
    mounted = next((kinds[str(parent)] for parent in (there.resolve(), *there.resolve().parents)
                    if str(parent) in kinds), "")  # yapf: disable
    return f"{there} takes no new folders" if mounted in ("proc", "sysfs") else ""


def _best_metric(c: Tree) -> Iterator[str]:
    """Yield problems of a metric that no checkpoint of this run has."""
    name = c.checkpoint.best_metric
    if not name or (name.startswith("eval/") and not c.held_out):
        return  # the missing data is reported above
    first, slash, _ = name.partition("/")
    if first not in c.METRICS or not slash:
        yield (f"--best_metric {name}: no checkpoint has it{did_you_mean(first, c.METRICS)}; metrics begin with "
               f"{', '.join(f'{one}/' for one in c.METRICS)}")
    elif first == "eval" and flatten(c)["eval_steps"] == 0:
        yield (f"--best_metric {name}: is never measured with --eval_steps 0; set --eval_steps -1 or a number of "
               "steps")


def _package(flag: str, name: str, extra: str = "") -> Iterator[str]:
    """Yield the problem of a package that is not installed, with the command that installs it: that of its extra, which
    has the range of versions that work."""
    if find_spec(name) is None:
        install = install_command(extra) if extra else f"pip install {name}"
        yield f"--{flag}: the package {name} is not installed; run: {install}"


def _packages(log: SinkConfig) -> Iterator[str]:
    if log.use_wandb:
        yield from _package("use_wandb true", "wandb", "wandb")
        if problem := wandb_problem(os.environ):
            yield tracker_refusal("use_wandb", problem)
    if log.use_trackio:
        yield from _package("use_trackio true", "trackio", "trackio")
    if log.use_tensorboard:
        yield from _package("use_tensorboard true", "tensorboard")
    for name in log.trackers:
        yield from _package(f"trackers {name}", name)


def _strategy(c: Tree, world_size: int) -> Iterator[str]:
    s, chosen = c.strategy, c.strategy.resolved(world_size)
    if s.strategy == "single" and world_size > 1:
        yield f"--strategy single: there are {world_size} ranks; nearest valid value: fsdp (or start one process)"
    if chosen == "deepspeed" and find_spec("deepspeed") is None:
        yield NO_DEEPSPEED
    yield from _of_another(c, chosen)
    yield from (_fsdp if chosen == "fsdp" else _zero)(s) if chosen != "single" else ()
    if chosen == "deepspeed":
        yield from if_set(
            c, ["initial_model_shard_size"], "has no effect with --strategy deepspeed, which shards the reference "
            "model over all ranks with --zero_stage 3, and otherwise not at all; drop it")
    yield from divides("fsdp_shard_size", s.fsdp_shard_size, world_size)
    yield from divides("zpg", s.zpg, world_size)


def _of_another(c: Tree, chosen: str) -> Iterator[str]:
    where = "on a single process" if chosen == "single" else f"with --strategy {chosen}"
    for option, value in unread(c, chosen, options(c)["strategy"].choices or ()):
        beside_fsdp = option.name in OF_ZERO and c.strategy.strategy == "fsdp"  # a notice says so
        if (option.name, chosen) != ("fsdp_shard_size", "single") and not beside_fsdp:  # valid on one rank
            yield (f"{option.flag} {show(value)}: has no effect {where}; add --strategy {option.read_by[0]} or drop it")


def _fsdp(s: StrategyConfig) -> Iterator[str]:
    if s.fsdp_cpu_offload and s.adam_offload:
        yield ("--adam_offload true: has no effect with --fsdp_cpu_offload, which already offloads the optimizer "
               "state; drop it")


def _zero(s: StrategyConfig) -> Iterator[str]:
    if s.zpg > 1 and s.zero_stage < 3:
        yield f"--zpg {s.zpg}: has no effect with --zero_stage {s.zero_stage}, where every rank holds all weights; " \
              "nearest valid value: --zero_stage 3"
    if s.overlap_comm and not s.zero_stage:
        yield ("--overlap_comm true: has no effect with --zero_stage 0, which reduces after the backward pass; "
               "nearest valid value: --zero_stage 1")


def divides(name: str, size: int, world_size: int) -> Iterator[str]:
    """Yield a problem of a number of ranks that share something and does not divide all ranks; 0 is all."""
    if size > 0 and world_size % size:
        yield (f"--{name} {size}: must divide the {world_size} ranks; "
               f"nearest valid value: {nearest_divisors(world_size, size)}")


def evaluations(c: Tree) -> Iterator[str]:
    """Yield problems of evaluations that have no data."""
    for name, split in changed(c, ["eval_split"]):
        if not flatten(c)["eval_data"]:
            yield f"--{name} {split}: has no effect without --eval_data; name the data of that split, or drop it"
