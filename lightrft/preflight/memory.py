"""Estimated memory on the device of one rank, by purpose and by phase of a step.

Strategies and engines say what they take; this module adds it up.
"""
import os
from dataclasses import dataclass
from pathlib import Path

from lightrft.config.schema import Config
from lightrft.preflight.cost import GIB, MIB
from lightrft.rollout.engines import ByPhase, engine_memory, PHASES
from lightrft.strategy.memory import (frozen_width, gathered_weights, ModelSize, reduced_gradients, shares, STEP_BYTES,
                                      whole_gradients)


@dataclass(frozen=True)
class Device:
    """A device that ranks compute on; ``free`` and ``total`` are the bytes of memory of one rank."""
    name: str
    free: int
    total: int

    @property
    def cuda(self) -> bool:
        """Return True for a GPU."""
        return self.name != "cpu"


UNKNOWN = Device("cpu", 0, 0)


def devices(ranks: int) -> list[Device]:
    """List the GPUs of this machine; without a GPU, its CPU, whose memory ``ranks`` processes share."""
    import torch

    from lightrft.utils.env import total_memory
    if torch.cuda.is_available():
        found = [(f"cuda:{i}", *torch.cuda.mem_get_info(i)) for i in range(torch.cuda.device_count())]
        return [Device(name, free, total) for name, free, total in found]
    total = total_memory(torch.device("cpu"))
    return [Device("cpu", min(_available(), total) // ranks, total // ranks)]


def _available() -> int:
    """Bytes of host memory that a new process can use."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory(config: Config, world_size: int, size: ModelSize, device: Device,
           critic: bool = False) -> dict[str, ByPhase]:
    """Estimate the bytes by purpose and phase, at most. Activations are not counted: they depend on the model.

    Sharded state is divided by the ranks that share it. With LoRA, gradients and optimizer state belong to the adapters
    and are left out. What rests in host memory counts where it visits the device. Gradients exist only in an update.
    """
    held = _trainer(config, world_size, size, device, critic)
    held |= engine_memory(config, world_size, size, device.total, device.cuda)
    return {name: values for name, values in held.items() if any(values)}


def peak(held: dict[str, ByPhase]) -> tuple[str, float, str]:
    """Return the phase that takes most, its total in bytes, and the purpose that takes most of it."""
    sums = [sum(values) for values in zip(*held.values())]
    phase = sums.index(max(sums))
    return PHASES[phase], sums[phase], max(held, key=lambda name: held[name][phase])


def _trainer(config: Config, world_size: int, size: ModelSize, device: Device, critic: bool) -> dict[str, ByPhase]:
    s, m, sharded = config.strategy, config.model, config.strategy.divides_weights(world_size)
    models, stays = 2 if critic else 1, 0 if config.rollout.offload_during_rollout else 1
    on_device, trained = 0 if s.fsdp_cpu_offload else 1, 0 if m.lora_rank else 1
    weights, gradients, moments = (4 * size.total * share * on_device * models for share in shares(s, world_size))
    frozen, copied_once = frozen_width(s, world_size, m.bf16), not sharded
    weights *= frozen / 4 if m.lora_rank and copied_once else 1
    adam, stepping = 2 * moments * trained, 2 * min(moments, STEP_BYTES) * trained if s.adam_offload else 0
    adam *= not s.adam_offload
    chunk = m.chunk_mib(device.total if device.cuda else 0) * MIB
    copies = gathered_weights(s, world_size, size, m.bf16, m.gradient_checkpointing)
    computing, updating = (models * copied * (trained if copied_once else 1) for copied in copies)
    resting = computing * copied_once
    whole = whole_gradients(s, world_size, size.total * trained, device.total)
    reduced = reduced_gradients(s, world_size, size, size.total * trained, whole > 0)
    reference = frozen * size.total / ((m.initial_model_shard_size or world_size) if sharded else 1) * on_device
    reference *= config.algorithm.init_kl_coef > 0 and not m.lora_rank
    bucket = min(config.rollout.sync_bucket_mib * MIB, 4 * size.total) if sharded else 0
    return {
        "weights": (weights * stays, *(weights, ) * 4),
        "gradients, float32": (0, 0, *(gradients * trained, ) * 2, 0),
        "gradients, unsharded until the last micro-batch": (0, 0, models * whole, 0, 0),
        "gradients on their way to other ranks": (0, 0, reduced, 0, 0),
        "Adam state, float32": (adam * stays, adam, adam, adam + stepping, adam),
        "weights gathered or cast for computing": (resting * stays, computing, updating, resting, resting),
        "reference": (reference * stays, *(reference, ) * 4),
        "logits of one chunk": (0, chunk, chunk, 0, 0),
        "bucket of full weights": (0, 0, 0, 0, bucket),
    }  # yapf: disable


def memory_lines(config: Config, world_size: int, size: ModelSize | None, device: Device,
                 critic: bool = False) -> list[str]:
    """Format the estimate as lines of text."""
    if size is None:
        return ["memory per rank: unknown, --pretrain is not a local folder with safetensors files"]
    held = memory(config, world_size, size, device, critic)
    together = tuple(map(sum, zip(*held.values())))
    lines = [f"GiB per rank, activations not counted ({size.total:,} parameters):",
             f"  {'':<48}" + "".join(f"{name:>12}" for name in PHASES)]  # yapf: disable
    lines += [f"  {name:<48}" + "".join(f"{value / GIB:>12.2f}" for value in values)
              for name, values in [*held.items(), ("together", together)]]  # yapf: disable
    if config.rollout.engine_type == "hf" and not config.rollout.engine_kv_mib:
        lines.append("  and a key-value cache of up to a quarter of the memory of the device (--engine_kv_mib 0)")
    elif config.rollout.offload_during_rollout and config.rollout.sync_proof in ("canary", "both"):
        lines.append("  canaries need models and cache together in the weight sync; --sync_proof fingerprint spares it")
    return lines
