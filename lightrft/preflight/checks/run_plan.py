"""Checks that the model, the batch and the files of a run fit, by the estimates that ``--dry_run`` prints."""
import json
import shutil
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

from lightrft.config.options import show
from lightrft.config.schema import Config
from lightrft.config.shared_schema import Tree
from lightrft.config.tree import build, flatten
from lightrft.models.activations import ModelShape
from lightrft.preflight.base import preflight
from lightrft.preflight.checks import Finding
from lightrft.preflight.checks.machine import existing
from lightrft.preflight.cost import GIB, batch_summary, model_size
from lightrft.preflight.hardware import Device
from lightrft.preflight.memory import BACKWARD, memory, peak, uncounted
from lightrft.preflight.overhead import overhead
from lightrft.rollout.engines import PHASES
from lightrft.strategy.optimizers import OPTIMIZERS
from lightrft.strategy.memory import ModelSize

REDUCED_EARLY: tuple[dict[str, Any], ...] = ({"grad_sync": "every"}, )
MARGIN = 0.1  # share of the plan, for what is not counted, as fragmentation, and for what is estimated
SMALL = {"gradient_checkpointing": True, "max_tokens_per_micro_batch": 4096}
LESS: tuple[dict[str, Any], ...] = ({"gradient_checkpointing": "selective"}, {"gradient_checkpointing": True}, SMALL)
ON_HOST = {"strategy": "fsdp", "fsdp_cpu_offload": True, "adam_offload": False}
OFFLOADS: tuple[dict[str, Any], ...] = ({"adam_offload":
                                         True}, {"adam_offload": True} | SMALL, ON_HOST, ON_HOST | SMALL)
ZERO_OFFLOADS: tuple[dict[str, Any],
                     ...] = ({"adam_offload":
                              True}, {"zero_stage": 3, "gradient_checkpointing":
                                      True}, {"zero_stage": 3, "gradient_checkpointing": True, "adam_offload": True})
SMALLER: tuple[dict[str, Any], ...] = ({"engine_kv_mib": 1024}, {"logprob_chunk_mib": 64})
ADAPTERS: tuple[dict[str, Any], ...] = ({"lora_rank": 16}, {"lora_rank": 16} | SMALL)


def check_model(config: Config, size: ModelSize) -> Iterator[Finding]:
    """Check that the model has positions for the lengths and that, in a local folder, no file of weights is missing."""
    from lightrft.models.config_json import check_context
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


def check_memory(config: Config, ranks: int, size: ModelSize, devices: list[Device],
                 shape: ModelShape | None = None) -> Iterator[Finding]:
    """Report the batch, and one verdict per device."""
    yield Finding("ok", "batch", batch_summary(config, ranks))
    for device in devices:
        yield memory_verdict(config, ranks, size, device, shape)


def memory_verdict(config: Tree, ranks: int, size: ModelSize, device: Device, shape: ModelShape | None) -> Finding:
    """Compare the plan with a device: fail if what is counted exceeds what is free; warn if it does together with the
    :func:`~lightrft.preflight.overhead.overhead`, or if that comes near."""
    name, plan = f"memory {device.name}", preflight(config)
    for text in plan.no_cache(ranks, size, device):
        return Finding("fail", name, text, _remedy(config, ranks, size, device, shape))
    counted = memory(config, ranks, size, device, shape)
    held = counted | overhead(config, ranks, device, shape)
    verdict, words = ("fail", "does") if device.free < peak(counted)[1] else ("warn", "by what is estimated does")
    phase, together, largest = peak(counted if verdict == "fail" else held)
    text = (f"it takes {together / GIB:.2f} GiB per rank in the phase {phase}{uncounted(shape)}, and "
            f"{device.free / GIB:.2f} are free; largest: {largest} {held[largest][PHASES.index(phase)] / GIB:.2f} GiB")
    if device.free < together:
        return Finding(verdict, name, f"{words} not fit: {text}", _remedy(config, ranks, size, device, shape))
    for lacking, remedy in plan.short_cache(ranks, shape, device, held):
        return Finding("warn", name, f"fits, but not with {lacking}: {text}", remedy)
    if shape and device.free - together < MARGIN * together:
        return Finding("warn", name, f"fits by less than {MARGIN:.0%}: {text}",
                       "fragmentation takes additional memory: lower --max_tokens_per_micro_batch")
    return Finding("ok", name, f"fits: {text}")


def backward(config: Tree, ranks: int, size: ModelSize, device: Device, shape: ModelShape | None) -> float:
    """Return the bytes of a rank in the backward pass, estimated ones included."""
    held = memory(config, ranks, size, device, shape) | overhead(config, ranks, device, shape)
    return sum(values[BACKWARD] for values in held.values())


def _remedy(config: Tree, ranks: int, size: ModelSize, device: Device, shape: ModelShape | None) -> str:
    """Name the first change with which the run fits and, if that keeps all weights in host memory, adapters as well; if
    there is none, the one that saves most."""

    def needed_by(plan: Tree) -> float:
        if any(preflight(plan).no_cache(ranks, size, device)):
            return inf
        return peak(memory(plan, ranks, size, device, shape) | overhead(plan, ranks, device, shape))[1]

    slow, least, best = "", needed_by(config), ""
    for words, changed in _changes(config, ranks, device):
        if slow and not changed.model.lora_rank:
            continue
        needed = needed_by(changed)
        if needed <= device.free:
            found = f"{slow}{words} brings it to {needed / GIB:.2f} GiB"
            if slow or changed.model.lora_rank or not changed.strategy.fsdp_cpu_offload:
                return found
            slow = f"{found}, with the weights in host memory, which is slow; "
        elif needed < least:
            least, best = needed, words
    if slow:
        return slow.removesuffix("; ")
    too_much = f"{best} brings it to {least / GIB:.2f} GiB, which is still too much: " if best else ""
    return f"{too_much}take a smaller model, more GPUs or larger ones"


def _changes(config: Tree, ranks: int, device: Device) -> Iterator[tuple[str, Tree]]:
    """Yield changes that save memory, the least intrusive first: of training, of the engine, of both, then adapters in
    place of the whole model. On a CPU, offloading saves nothing."""
    before = flatten(config)
    offloads = ZERO_OFFLOADS if config.strategy.strategy == "deepspeed" else OFFLOADS
    sums = REDUCED_EARLY if config.strategy.resolved(ranks) == "fsdp" else ()
    training = (*LESS, *sums, *(offloads if device.cuda else ()))
    engine = [*preflight(config).engine_changes(ranks)] if device.cuda else []
    both, adapters = ([one | other for other in options for one in engine] for options in (training, ADAPTERS))
    for change in (*training, *engine, *SMALLER, *both, *ADAPTERS, *adapters):
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
    """Bytes of the checkpoints there (float32 weights and, without LoRA, the optimizer state; one more while the oldest
    is replaced) and of the final model."""
    c = config.checkpoint
    elsewhere, several = c.disable_ckpt or c.ckpt_path is not None, c.save_steps > 0
    copies = 0 if elsewhere else 1 + several * (c.max_ckpt_num + (c.best_metric is not None))
    moments = 0 if config.model.lora_rank else OPTIMIZERS.get(config.train.optim).state_bytes(config.train)
    one = size.total * ((4 + moments) * (2 if critic else 1) + 4 * c.save_hf_ckpt)
    return min(copies * one, c.max_ckpt_mem * GIB + one) + 4 * size.total
