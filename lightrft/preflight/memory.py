"""Estimated memory on the device of one rank, by purpose and by phase of a step.

Strategies and engines say what they take; this module adds it up.
"""
from math import ceil

from lightrft.config.schema import Config
from lightrft.models.activations import Activations, ModelShape
from lightrft.preflight.cost import GIB, MIB
from lightrft.preflight.hardware import Device
from lightrft.rollout.engines import ByPhase, engine_memory, PHASES
from lightrft.strategy.memory import (frozen_width, gathered_weights, ModelSize, reduced_gradients, secondary_share,
                                      shares, STEP_BYTES, whole_gradients)

BACKWARD = PHASES.index("backward")


def memory(config: Config, world_size: int, size: ModelSize, device: Device, critic: bool = False,
           shape: ModelShape | None = None) -> dict[str, ByPhase]:
    """Estimate the bytes by purpose and phase, of micro-batches at the length limits.

    Activations are counted where the ``shape`` of the model is known. Sharded state is divided by the ranks that share
    it. With LoRA, gradients and optimizer state belong to the adapters and are left out. What rests in host memory
    counts where it visits the device. Gradients exist only in an update.
    """
    held = _trainer(config, world_size, size, device, critic)
    held |= engine_memory(config, world_size, size, device.total, device.cuda)
    if shape is not None:
        held |= _activations(config, world_size, shape, held)
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
    weights, gradients, moments = (4 * size.total * share * on_device for share in shares(s, world_size))
    weights, moments = models * weights, models * moments  # gradients: policy and critic step one after the other
    secondary = secondary_share(s, world_size) * size.total
    weights += 4 * secondary * models
    frozen, copied_once = frozen_width(s, world_size, bool(m.bf16)), not sharded
    weights *= frozen / 4 if m.lora_rank and copied_once else 1
    adam, stepping = 2 * moments * trained, 2 * min(moments, STEP_BYTES) * trained if s.adam_offload else 0
    adam *= not s.adam_offload
    chunk = m.chunk_mib(device.total if device.cuda else 0) * MIB
    copies = gathered_weights(s, world_size, size, bool(m.bf16), bool(m.gradient_checkpointing))
    computing, updating = (copied * (models * trained if copied_once else 1) for copied in copies)  # one model gathers
    resting = computing * copied_once
    several = micro_batch_tokens(config, world_size)[1]  # a single one reduces gradients layer by layer
    whole = several * whole_gradients(s, world_size, size.total * trained, device.total)
    reduced = reduced_gradients(s, world_size, size, size.total * trained, whole > 0)
    reference = frozen * size.total / ((m.initial_model_shard_size or world_size) if sharded else 1) * on_device
    reference += frozen * secondary
    reference *= config.algorithm.init_kl_coef > 0 and not m.lora_rank
    bucket = min(config.rollout.sync_bucket_mib * MIB, 4 * size.total) if sharded else 0
    return {
        "weights": (weights * stays, *(weights, ) * 4),
        "gradients, float32": (0, 0, *(gradients * trained, ) * 2, 0),
        "gradients, unsharded until the last micro-batch": (0, 0, whole, 0, 0),
        "gradients on their way to other ranks": (0, 0, reduced, 0, 0),
        "Adam state, float32": (adam * stays, adam, adam, adam + stepping, adam),
        "weights gathered or cast for computing": (resting * stays, computing, updating, resting, resting),
        "reference": (reference * stays, *(reference, ) * 4),
        "logits of one chunk": (0, chunk, chunk, 0, 0),
        "bucket of full weights": (0, 0, 0, 0, bucket),
    }  # yapf: disable


def micro_batch_tokens(config: Config, world_size: int) -> tuple[int, bool]:
    """Count the tokens of a micro-batch of the update at the length limits; return also whether a step has several.

    A longer single sample goes alone. It is not counted, because it need not come.
    """
    t, length = config.train, config.rollout.prompt_max_len + config.rollout.generate_max_len
    step = ceil(t.train_batch_size / world_size) * length
    tokens = min(t.max_tokens_per_micro_batch, step, t.micro_train_batch_size * length or step)
    return tokens, step > tokens


def _activations(config: Config, world_size: int, shape: ModelShape, held: dict[str, ByPhase]) -> dict[str, ByPhase]:
    """Return the rows of activations and gradients.

    The temporaries of layers and the chunk of logits never exist together, so what exceeds the chunk is counted. A
    single micro-batch frees its activations while gradients come into being: gradients count by what exceeds them.
    """
    m, (tokens, several) = config.model, micro_batch_tokens(config, world_size)
    one = Activations(shape, tokens, 2 if m.bf16 else 4, bool(m.gradient_checkpointing), m.lora_rank > 0,
                      bool(m.use_liger))
    chunk = held["logits of one chunk"][BACKWARD]
    kept = one.kept + max(0.0, one.backward - one.kept - chunk)
    rows: dict[str, ByPhase] = {"activations": (0, max(0.0, one.forward - chunk), kept, 0, 0)}
    for name, (generation, passes, backward, optimizer, sync) in held.items():
        if name.startswith("gradients, ") and not several:
            rows[name] = (generation, passes, max(0.0, backward - kept), optimizer, sync)
    return rows


def memory_lines(config: Config, world_size: int, size: ModelSize | None, device: Device, critic: bool = False,
                 shape: ModelShape | None = None) -> list[str]:
    """Format the estimate as lines of text."""
    if size is None:
        return ["memory per rank: unknown, --pretrain is not a local folder with a model"]
    held = memory(config, world_size, size, device, critic, shape)
    together = tuple(map(sum, zip(*held.values())))
    tokens = f"activations of {micro_batch_tokens(config, world_size)[0]:,} tokens" if shape else "without activations"
    lines = [f"GiB per rank, {tokens} ({size.total:,} parameters):",
             f"  {'':<48}" + "".join(f"{name:>12}" for name in PHASES)]  # yapf: disable
    lines += [f"  {name:<48}" + "".join(f"{value / GIB:>12.2f}" for value in values)
              for name, values in [*held.items(), ("together", together)]]  # yapf: disable
    if config.rollout.engine_type == "hf" and not config.rollout.engine_kv_mib:
        lines.append("  and a key-value cache of up to a quarter of the memory of the device (--engine_kv_mib 0)")
    elif config.rollout.offload_during_rollout and config.rollout.sync_proof in ("canary", "both"):
        lines.append("  canaries need models and cache together in the weight sync; --sync_proof fingerprint spares it")
    return lines
