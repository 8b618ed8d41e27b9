"""Checks that the model, the batch and the files of a run fit, by the estimates that ``--dry_run`` prints."""
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightrft.config.engines import HF_CACHE_PART
from lightrft.config.options import show
from lightrft.config.schema import Config
from lightrft.config.tree import build, flatten
from lightrft.models.activations import ModelShape
from lightrft.preflight.checks import Finding
from lightrft.preflight.checks.machine import existing
from lightrft.preflight.cost import GIB, batch_summary, model_size
from lightrft.preflight.hardware import Device
from lightrft.preflight.memory import memory, peak
from lightrft.rollout.engines import engine_cache, engine_weights, PHASES
from lightrft.strategy.memory import ModelSize

REDUCED_EARLY: tuple[dict[str, Any], ...] = ({"grad_sync": "every"}, )
MARGIN = 0.1  # share of the plan, for what is not counted: contexts, communication, fragmentation
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


def memory_verdict(config: Config, ranks: int, size: ModelSize, device: Device, critic: bool,
                   shape: ModelShape | None) -> Finding:
    """Compare the estimate with a device: fail if it exceeds what is free, warn if it comes near."""
    name = f"memory {device.name}"
    if config.rollout.engine_type != "hf" and not engine_cache(config, ranks, size, device.total, device.cuda):
        return _no_cache(config, engine_weights(config, ranks, size), name, device)
    held = memory(config, ranks, size, device, critic, shape)
    phase, together, largest = peak(held)
    room = device.free - together
    text = (f"{together / GIB:.2f} of {device.free / GIB:.2f} GiB free per rank in the phase {phase}"
            f"{'' if shape else ', activations not counted'}; largest: {largest} "
            f"{held[largest][PHASES.index(phase)] / GIB:.2f} GiB")
    if room < 0:
        return Finding("fail", name, f"does not fit: {text}", _remedy(config, ranks, size, device, critic, shape))
    cache = device.total / HF_CACHE_PART if "key-value cache" not in held else 0
    fullest = PHASES.index("log-probs" if config.rollout.overlap_passes else "generation")  # with the engine awake
    room = device.free - sum(values[fullest] for values in held.values())
    if room < cache:
        return Finding("warn", name, f"fits, but not with the key-value cache of up to {cache / GIB:.2f} GiB: {text}",
                       f"--engine_kv_mib {max(1, int(room / 2) >> 20)} leaves as much for activations")
    if shape and device.free - together < MARGIN * together:
        return Finding("warn", name, f"fits by less than {MARGIN:.0%}: {text}",
                       "CUDA's context, communication and fragmentation take more: lower --max_tokens_per_micro_batch")
    return Finding("ok", name, f"fits: {text}")


def _no_cache(config: Config, weights: float, name: str, device: Device) -> Finding:
    share = config.rollout.engine_mem_util * device.total
    return Finding("fail", name, f"--engine_mem_util {config.rollout.engine_mem_util:g}: of its {share / GIB:.2f} GiB "
                   f"the engine's weights take {weights / GIB:.2f} GiB, which leaves no key-value cache",
                   "raise it, or spread the engine over more ranks (--engine_tp_size)")  # yapf: disable


def _remedy(config: Config, ranks: int, size: ModelSize, device: Device, critic: bool, shape: ModelShape | None) -> str:
    """Name the first change with which the run fits; if there is none, the one that saves most."""
    together = peak(memory(config, ranks, size, device, critic, shape))[1]
    plans = [(words, peak(memory(changed, ranks, size, device, critic, shape))[1])
             for words, changed in _changes(config, ranks, device)]
    for words, needed in plans:
        if needed <= device.free:
            return f"{words} brings it to {needed / GIB:.2f} GiB"
    words, needed = min(plans, key=lambda plan: plan[1])
    if needed >= together:
        return "take a smaller model, more GPUs or larger ones"
    return (f"{words} brings it to {needed / GIB:.2f} GiB, which is still too much: take a smaller model, more GPUs or "
            "larger ones")


def _changes(config: Config, ranks: int, device: Device) -> Iterator[tuple[str, Config]]:
    """Yield changes that save memory, the least intrusive first. On a CPU, offloading saves nothing."""
    before = flatten(config)
    offloads = ZERO_OFFLOADS if config.strategy.strategy == "deepspeed" else OFFLOADS
    sums = REDUCED_EARLY if config.strategy.resolved(ranks) == "fsdp" else ()
    for change in (*LESS, *sums, *(offloads if device.cuda else ()), *SMALLER):
        new = {name: value for name, value in change.items() if (before[name] or False) != value}
        words = " ".join(f"--{name}" if value is True else f"--{name} {show(value)}" for name, value in new.items())
        if new:
            yield words, build(Config, before | new)


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
    one = size.total * ((4 if config.model.lora_rank else 12) * (2 if critic else 1) + 4 * c.save_hf_ckpt)
    return min(copies * one, c.max_ckpt_mem * GIB + one) + 4 * size.total
