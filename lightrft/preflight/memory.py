"""Estimated memory on the device of one rank, by purpose and by phase of a step. Plain arithmetic."""
import os
from dataclasses import dataclass
from pathlib import Path

from lightrft.config.engines import host_cache
from lightrft.config.schema import Config, StrategyConfig
from lightrft.preflight.cost import GIB, MIB, ModelSize, is_sharded
from lightrft.strategy.deepspeed import REDUCED_AT_ONCE

PHASES = ("generation", "log-probs", "update", "weight sync")
ByPhase = tuple[float, float, float, float]


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
    and are left out. Offloaded state counts as 0. Gradients exist only during an update.
    """
    held = _trainer(config, world_size, size, critic) | _engine(config, world_size, size, device)
    return {name: values for name, values in held.items() if any(values)}


def peak(held: dict[str, ByPhase]) -> tuple[str, float, str]:
    """Return the phase that takes most, its total in bytes, and the purpose that takes most of it."""
    sums = [sum(values) for values in zip(*held.values())]
    phase = sums.index(max(sums))
    return PHASES[phase], sums[phase], max(held, key=lambda name: held[name][phase])


def _trainer(config: Config, world_size: int, size: ModelSize, critic: bool) -> dict[str, ByPhase]:
    s, m, sharded = config.strategy, config.model, is_sharded(config, world_size)
    models, stays = 2 if critic else 1, 0 if config.rollout.offload_during_rollout else 1
    on_device, trained = 0 if s.fsdp_cpu_offload else 1, 0 if m.lora_rank else 1
    weights, gradients, moments = (4 * size.total * share * on_device * models for share in shares(s, world_size))
    adam, between = 2 * moments * trained, 0 if s.adam_offload else 1
    fsdp, chunk = s.resolved(world_size) == "fsdp", m.logprob_chunk_mib * MIB
    computing, updating = (models * copied for copied in _computing(config, size, sharded, fsdp))
    reference = 4 * size.total / ((m.initial_model_shard_size or world_size) if sharded else 1) * on_device
    reference *= config.algorithm.init_kl_coef > 0 and not m.lora_rank
    bucket = min(config.rollout.sync_bucket_mib * MIB, 4 * size.total) if sharded else 0
    return {
        "weights, float32": (weights * stays, weights, weights, weights),
        "gradients, float32": (0, 0, gradients * trained, 0),
        "gradients, unsharded until the last micro-batch": (0, 0, 4 * size.total * trained * models * fsdp, 0),
        "gradients on their way to other ranks": (0, 0, _reduced(s, world_size, size.total * trained), 0),
        "Adam state, float32": (adam * between * stays, adam * (between or not stays), adam, adam * between),
        "weights gathered or cast for computing": (0, computing, updating, 0),
        "reference, float32": (reference * stays, reference, reference, reference),
        "logits of one chunk": (0, chunk, chunk, 0),
        "bucket of full weights": (0, 0, 0, bucket),
    }  # yapf: disable


def shares(s: StrategyConfig, world_size: int) -> tuple[float, float, float]:
    """Shares of the weights, the gradients and each moment of Adam that a rank holds on its device."""
    chosen = s.resolved(world_size)
    if chosen == "deepspeed":
        weights, gradients, moments = (1 / world_size if s.zero_stage >= stage else 1 for stage in (3, 2, 1))
        return weights, gradients, 0 if s.adam_offload and s.zero_stage else moments
    share = 1 / (s.fsdp_shard_size or world_size) if chosen == "fsdp" else 1
    return share, share, share


def _reduced(s: StrategyConfig, world_size: int, trained: int) -> float:
    """Bytes of DeepSpeed's gradient buffers."""
    buffers = 2 if s.overlap_comm and s.zero_stage < 3 else 1
    zero = s.resolved(world_size) == "deepspeed" and s.zero_stage > 0
    return 4 * buffers * min(trained, REDUCED_AT_ONCE) * zero


def _computing(config: Config, size: ModelSize, sharded: bool, fsdp: bool) -> tuple[float, float]:
    """Bytes in a pass without gradients, and in an update. Sharded: two layers (one computes, one is fetched) and the
    weights outside the layers. ZeRO holds them in float32 and cast, and an update without gradient checkpointing needs
    all layers. Not sharded: only the cast copy."""
    bf16 = config.model.bf16
    if not sharded:
        return (2.0 * size.total * bf16, ) * 2
    gathered = min(size.total, size.outside + 2 * size.largest_layer)
    if fsdp:
        return ((2.0 if bf16 else 4.0) * gathered, ) * 2
    width = 6.0 if bf16 else 4.0
    return width * gathered, width * (gathered if config.model.gradient_checkpointing else size.total)


def _engine(config: Config, world_size: int, size: ModelSize, device: Device) -> dict[str, ByPhase]:
    """Bytes of the engine. Asleep, hf keeps its copy in host memory and no cache. Other engines keep nothing; on a CPU,
    they keep both.

    The engine sleeps from the end of generation to the weight sync, where canaries run a short generation. That takes
    little with hf, whose cache is only as large as needed.
    """
    passing, canary = config.rollout.overlap_passes, config.rollout.sync_proof in ("canary", "both")
    weights, cache = engine_weights(config, world_size, size), engine_cache(config, world_size, size, device)
    if config.rollout.engine_type == "hf":
        awake, cached, canary = not device.cuda, 0, False
    else:
        awake = cached = not (device.cuda and config.rollout.engine_sleep)
    return {
        "copy in the rollout engine": (weights, weights * (awake or passing), weights * awake, weights),
        "key-value cache": (cache, cache * (cached or passing), cache * cached, cache * (cached or canary)),
    }


def engine_weights(config: Config, world_size: int, size: ModelSize) -> float:
    """Bytes of an engine's own weights; 8-bit quantization leaves the embeddings and the head as they are."""
    r, width = config.rollout, 2 if config.model.bf16 else 4
    if r.engine_type == "hf":
        return width * size.total if is_sharded(config, world_size) else 0
    inside = size.total - size.outside
    return (width * size.outside + inside * (width if r.engine_quantization == "none" else 1)) / r.engine_tp_size


def engine_cache(config: Config, world_size: int, size: ModelSize, device: Device) -> float:
    """Bytes of the key-value cache that are allocated in advance; 0 for hf without ``--engine_kv_mib``."""
    r = config.rollout
    if r.engine_kv_mib or r.engine_type == "hf":
        return r.engine_kv_mib * MIB
    if not device.cuda:
        return host_cache(r.engine_mem_util, device.total)
    return max(0.0, r.engine_mem_util * device.total - engine_weights(config, world_size, size))


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
