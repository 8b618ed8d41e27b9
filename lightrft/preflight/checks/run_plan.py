"""Checks that the model, the batch and the files of a run fit, by the estimates that ``--dry_run`` prints."""
import json
import shutil
from collections.abc import Iterator
from functools import singledispatch
from pathlib import Path
from typing import Any

from lightrft.config.options import show
from lightrft.config.schema import Config
from lightrft.config.shared_schema import Tree
from lightrft.config.tree import build, flatten
from lightrft.models.activations import ModelShape
from lightrft.preflight.checks import Finding
from lightrft.preflight.checks.machine import existing
from lightrft.preflight.cost import GIB, batch_summary, model_size
from lightrft.preflight.hardware import Device
from lightrft.preflight.memory import memory, peak, uncounted
from lightrft.preflight.overhead import overhead
from lightrft.rollout.engines import ByPhase, engine_cache, engine_weights, largest_hf_cache, PHASES
from lightrft.strategy.memory import ModelSize, moment_width

REDUCED_EARLY: tuple[dict[str, Any], ...] = ({"grad_sync": "every"}, )
MARGIN = 0.1  # share of the plan, for what is not counted, as fragmentation, and for what is estimated
LESS: tuple[dict[str, Any], ...] = ({"gradient_checkpointing":
                                     True}, {"gradient_checkpointing": True, "max_tokens_per_micro_batch": 4096})
ON_HOST = {"strategy": "fsdp", "fsdp_cpu_offload": True, "adam_offload": False}
OFFLOADS: tuple[dict[str, Any], ...] = ({"adam_offload":
                                         True}, {"adam_offload": True} | LESS[1], ON_HOST, ON_HOST | LESS[1])
ZERO_OFFLOADS: tuple[dict[str, Any],
                     ...] = ({"adam_offload":
                              True}, {"zero_stage": 3, "gradient_checkpointing":
                                      True}, {"zero_stage": 3, "gradient_checkpointing": True, "adam_offload": True})
SMALLER: tuple[dict[str, Any], ...] = ({"engine_kv_mib": 1024}, {"logprob_chunk_mib":
                                                                 64}, {"lora_rank": 16}, {"lora_rank": 16} | LESS[1])


def check_model(config: Config, size: ModelSize) -> Iterator[Finding]:
    """Check that the model has positions for the lengths and that, in a local folder, no file of weights is missing."""
    from lightrft.models.loader import check_context
    path, rollout = str(config.model.pretrain), config.rollout
    check_context(path, prompt_max_len=rollout.prompt_max_len, generate_max_len=rollout.generate_max_len)
    folder, text = Path(path).expanduser(), f"{path}: {size.total:,} parameters"
    if lacking := _lacking(folder):
        yield Finding("fail", "model", f"{text}, {len(lacking)} files are missing, first {lacking[0]}",
                      "download it again")
    elif folder.is_dir() and not model_size(folder):  # this also reads every file
        yield Finding("warn", "model", f"{text}, no *.safetensors files", "download or convert its weights")
    else:
        yield Finding("ok", "model", text)


def _lacking(folder: Path) -> list[str]:
    """List the missing files that the index of a checkpoint in several files names."""
    index = folder / "model.safetensors.index.json"
    named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if index.is_file() else ()
    return sorted(name for name in set(named) if not (folder / name).is_file())


def check_memory(config: Config, ranks: int, size: ModelSize, devices: list[Device], critic: bool = False,
                 shape: ModelShape | None = None) -> Iterator[Finding]:
    """Report the batch, and one verdict per device."""
    yield Finding("ok", "batch", batch_summary(config, ranks))
    for device in devices:
        yield memory_verdict(config, ranks, size, device, critic, shape)


def memory_verdict(config: Tree, ranks: int, size: ModelSize, device: Device, critic: bool,
                   shape: ModelShape | None) -> Finding:
    """Compare the plan with a device: fail if what is counted exceeds what is free; warn if it does together with the
    :func:`~lightrft.preflight.overhead.overhead`, or if that comes near."""
    name = f"memory {device.name}"
    for text, remedy in no_cache(config, ranks, size, device):
        return Finding("fail", name, text, remedy)
    counted = memory(config, ranks, size, device, critic, shape)
    held = counted | overhead(config, ranks, device, shape)
    verdict, words = ("fail", "does") if device.free < peak(counted)[1] else ("warn", "by what is estimated does")
    phase, together, largest = peak(counted if verdict == "fail" else held)
    text = (f"it takes {together / GIB:.2f} GiB per rank in the phase {phase}{uncounted(shape)}, and "
            f"{device.free / GIB:.2f} are free; largest: {largest} {held[largest][PHASES.index(phase)] / GIB:.2f} GiB")
    if device.free < together:
        return Finding(verdict, name, f"{words} not fit: {text}", _remedy(config, ranks, size, device, critic, shape))
    for lacking, remedy in short_cache(config, ranks, shape, device, held):
        return Finding("warn", name, f"fits, but not with {lacking}: {text}", remedy)
    if shape and device.free - together < MARGIN * together:
        return Finding("warn", name, f"fits by less than {MARGIN:.0%}: {text}",
                       "fragmentation takes additional memory: lower --max_tokens_per_micro_batch")
    return Finding("ok", name, f"fits: {text}")


@singledispatch
def no_cache(config: Tree, ranks: int, size: ModelSize, device: Device) -> Iterator[tuple[str, str]]:
    """Yield the error, and its remedy, of an engine without room for a key-value cache; each tree registers its own."""
    yield from ()


@no_cache.register
def _(config: Config, ranks: int, size: ModelSize, device: Device) -> Iterator[tuple[str, str]]:
    r, weights = config.rollout, engine_weights(config, ranks, size)
    if r.engine_type != "hf" and not engine_cache(config, ranks, size, device.total, device.cuda):
        yield (f"has no room for a key-value cache: the engine's weights take {weights / GIB:.2f} of the "
               f"{r.engine_mem_util * device.total / GIB:.2f} GiB of --engine_mem_util {r.engine_mem_util:g}",
               "raise it, or spread the engine over more ranks with --engine_tp_size")  # yapf: disable


@singledispatch
def short_cache(config: Tree, ranks: int, shape: ModelShape | None, device: Device,
                held: dict[str, ByPhase]) -> Iterator[tuple[str, str]]:
    """Yield the cache for which what is ``held`` may leave no room, and the remedy; each tree registers its own."""
    yield from ()


@short_cache.register
def _(config: Config, ranks: int, shape: ModelShape | None, device: Device,
      held: dict[str, ByPhase]) -> Iterator[tuple[str, str]]:
    cache = largest_hf_cache(config, ranks, shape, device.total) if "key-value cache" not in held else 0
    fullest = PHASES.index("log-probs" if config.rollout.overlap_passes else "generation")  # with the engine awake
    room = device.free - sum(values[fullest] for values in held.values())
    if room < cache:
        yield (f"the key-value cache of up to {cache / GIB:.2f} GiB",
               f"--engine_kv_mib {max(1, int(room / 2) >> 20)} leaves as much for activations")


def _remedy(config: Tree, ranks: int, size: ModelSize, device: Device, critic: bool, shape: ModelShape | None) -> str:
    """Name the first change with which the run fits; if there is none, the one that saves most."""

    def needed_by(plan: Tree) -> float:
        return peak(memory(plan, ranks, size, device, critic, shape) | overhead(plan, ranks, device, shape))[1]

    together = needed_by(config)
    plans = [(words, needed_by(changed)) for words, changed in _changes(config, ranks, device)]
    for words, needed in plans:
        if needed <= device.free:
            return f"{words} brings it to {needed / GIB:.2f} GiB"
    words, needed = min(plans, key=lambda plan: plan[1])
    if needed >= together:
        return "take a smaller model, more GPUs or larger ones"
    return (f"{words} brings it to {needed / GIB:.2f} GiB, which is still too much: take a smaller model, more GPUs or "
            "larger ones")


def _changes(config: Tree, ranks: int, device: Device) -> Iterator[tuple[str, Tree]]:
    """Yield changes that save memory, the least intrusive first. On a CPU, offloading saves nothing."""
    before = flatten(config)
    offloads = ZERO_OFFLOADS if config.strategy.strategy == "deepspeed" else OFFLOADS
    sums = REDUCED_EARLY if config.strategy.resolved(ranks) == "fsdp" else ()
    for change in (*LESS, *sums, *(offloads if device.cuda else ()), *SMALLER):
        new = {name: value for name, value in change.items() if (before.get(name, value) or False) != value}
        words = " ".join(f"--{name}" if value is True else f"--{name} {show(value)}" for name, value in new.items())
        if new:
            yield words, build(type(config), before | new)


def check_disk(config: Config, size: ModelSize, critic: bool) -> Iterator[Finding]:
    """Check that ``--save_path`` has room for the files that the run will leave."""
    free = shutil.disk_usage(existing(Path(config.checkpoint.save_path).expanduser().absolute())).free
    needed = run_bytes(config, size, critic)
    text = (f"checkpoints and the final model take at most {needed / GIB:.2f} of {free / GIB:.1f} GiB free (rollouts "
            "and logs not counted)")
    if needed > free:
        yield Finding("fail", "disk", text, "make room, lower --max_ckpt_num, or set --disable_ckpt")
    else:
        yield Finding("ok", "disk", text)


def run_bytes(config: Config, size: ModelSize, critic: bool) -> float:
    """Bytes of the checkpoints there (float32 weights and, without LoRA, Adam's two moments; one more while the oldest
    is replaced) and of the final model."""
    c = config.checkpoint
    elsewhere, several = c.disable_ckpt or c.ckpt_path is not None, c.save_steps > 0
    copies = 0 if elsewhere else 1 + several * (c.max_ckpt_num + (c.best_metric is not None))
    moments = 0 if config.model.lora_rank else 2 * moment_width(config.train.eight_bit)
    one = size.total * ((4 + moments) * (2 if critic else 1) + 4 * c.save_hf_ckpt)
    return min(copies * one, c.max_ckpt_mem * GIB + one) + 4 * size.total
