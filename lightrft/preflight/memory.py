"""Estimated memory on the device of one rank, by purpose and by phase of a step.

Strategies and engines report their memory; this module adds it up, for every tree of options: one that has no rollout
has neither its phases nor an engine and a reference.
"""
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import singledispatch
from math import ceil

from lightrft.config.preference_schema import DPOConfig, KTOConfig, ReferenceModelConfig
from lightrft.config.schema import Config, RewardConfig
from lightrft.config.sft_schema import KDConfig
from lightrft.config.shared_schema import Tree
from lightrft.models.activations import Activations, ModelShape
from lightrft.preflight.cost import GIB, known_kinds, known_model, MIB
from lightrft.preflight.hardware import Device
from lightrft.preflight.overhead import overhead
from lightrft.rewards.spec import parse_models
from lightrft.rollout.engines import ByPhase, engine_memory, PHASES
from lightrft.strategy.memory import (frozen_width, gathered_weights, ModelSize, moment_width, reduced_gradients,
                                      secondary_share, shares, STEP_BYTES, whole_gradients)

BACKWARD = PHASES.index("backward")
TrainingPhases = tuple[float, float, float, float]  # bytes between steps, and in log-probs, backward and optimizer


def memory(config: Tree, world_size: int, size: ModelSize, device: Device, critic: bool = False,
           shape: ModelShape | None = None) -> dict[str, ByPhase]:
    """Estimate the bytes by purpose and phase, of micro-batches at the length limits.

    Activations are counted where the ``shape`` of the model is known. Sharded state is divided by the ranks that share
    it. With LoRA, gradients and optimizer state belong to the adapters and are left out. What rests in host memory
    counts where it visits the device. Gradients exist only in an update.
    """
    held = {name: by_phase(config, row) for name, row in _trainer(config, world_size, size, device, critic).items()}
    held |= not_trained(config, world_size, size, device)
    if shape is not None:
        held |= _activations(config, world_size, shape, held)
        held |= _of_towers(config, world_size, shape)
    return {name: values for name, values in held.items() if any(values)}


def peak(held: dict[str, ByPhase]) -> tuple[str, float, str]:
    """Return the phase that takes most, its total in bytes, and the purpose that takes most of it."""
    sums = [sum(values) for values in zip(*held.values())]
    phase = sums.index(max(sums))
    return PHASES[phase], sums[phase], max(held, key=lambda name: held[name][phase])


def _trainer(config: Tree, world_size: int, size: ModelSize, device: Device, critic: bool) -> dict[str, TrainingPhases]:
    s, m, copied_once = config.strategy, config.model, not config.strategy.divides_weights(world_size)
    models, on_device, trained = 2 if critic else 1, 0 if s.fsdp_cpu_offload else 1, 0 if m.lora_rank else 1
    weights, gradients, moments = (4 * size.total * share * on_device for share in shares(s, world_size))
    weights, moments = models * weights, models * moments  # gradients: policy and critic step one after the other
    weights += 4 * secondary_share(s, world_size) * size.total * models
    weights *= frozen_width(s, world_size, bool(m.bf16)) / 4 if m.lora_rank and copied_once else 1
    in_parts, width = s.adam_offload or config.train.eight_bit, "8 bits" if config.train.eight_bit else "float32"
    adam, stepping = 2 * moments * trained, 2 * min(moments, STEP_BYTES) * trained * in_parts
    adam *= not s.adam_offload and moment_width(config.train.eight_bit) / 4
    chunk = m.chunk_mib(device.total if device.cuda else 0) * MIB
    copies = gathered_weights(s, world_size, size, bool(m.bf16), bool(m.gradient_checkpointing))
    computing, updating = (copied * (models * trained if copied_once else 1) for copied in copies)  # one model gathers
    resting = computing * copied_once
    several = update_tokens(config, world_size)[1]  # a single one reduces gradients layer by layer
    whole = several * whole_gradients(s, world_size, size.total * trained, device.total)
    reduced = reduced_gradients(s, world_size, size, size.total * trained, whole > 0)
    return {
        "weights": (weights, ) * 4,
        "gradients, float32": (0, 0, *(gradients * trained, ) * 2),
        "gradients, unsharded until the last micro-batch": (0, 0, whole, 0),
        "gradients on their way to other ranks": (0, 0, reduced, 0),
        f"Adam state, {width}": (adam, adam, adam, adam + stepping),
        "weights gathered or cast for computing": (resting, computing, updating, resting),
        "logits of one chunk": (0, chunk, chunk, 0),
    }  # yapf: disable


@singledispatch
def by_phase(config: Tree, held: TrainingPhases) -> ByPhase:
    """Return the bytes by phase of what the trainer holds; each tree with a rollout registers its own."""
    return (0, *held[1:], 0)


@by_phase.register
def _(config: Config, held: TrainingPhases) -> ByPhase:
    return (held[0] * (not config.rollout.offload_during_rollout), *held[1:], held[0])


@singledispatch
def not_trained(config: Tree, world_size: int, size: ModelSize, device: Device) -> dict[str, ByPhase]:
    """Return the bytes of all but the trained models, by purpose and phase; each tree registers its own."""
    return {}


@not_trained.register
def _(config: Config, world_size: int, size: ModelSize, device: Device) -> dict[str, ByPhase]:
    m, sharded = config.model, config.strategy.divides_weights(world_size)
    reference = _frozen(config, world_size, size, m.initial_model_shard_size)
    reference *= config.algorithm.init_kl_coef > 0 and not m.lora_rank
    taught = _teacher(config, m.teacher_model, world_size, device)
    passes = by_phase(config, (taught, ) * 4) if not m.teacher_offload else (0, taught, 0, 0, 0)
    bucket = min(config.rollout.sync_bucket_mib * MIB, 4 * size.total) if sharded else 0
    rows: dict[str, ByPhase] = {"reference": by_phase(config, (reference, ) * 4), "teacher": passes,
                                "reward models": _reward_models(config, world_size),
                                "bucket of full weights": (0, 0, 0, 0, bucket)}  # yapf: disable
    return rows | engine_memory(config, world_size, size, device.total, device.cuda)


@not_trained.register
def _(config: DPOConfig, world_size: int, size: ModelSize, device: Device) -> dict[str, ByPhase]:
    return _reference(config, config.model, world_size, size) if config.preference.needs_reference else {}


@not_trained.register
def _(config: KTOConfig, world_size: int, size: ModelSize, device: Device) -> dict[str, ByPhase]:
    return _reference(config, config.model, world_size, size)


@not_trained.register
def _(config: KDConfig, world_size: int, size: ModelSize, device: Device) -> dict[str, ByPhase]:
    cfg = config.teacher
    held = _teacher(config, cfg.teacher_model, world_size, device)
    resident = held * (not cfg.teacher_offload and cfg.teacher_cache_dir is None)
    return {"teacher": (0, held, resident, resident, 0)}


def _teacher(config: Tree, path: str | None, world_size: int, device: Device) -> float:
    """Return the bytes of the teacher at ``path``; 0 without one, or if its size is not known here."""
    size = known_model(path, device.cuda)[0] if path else None
    return 0.0 if size is None else _frozen(config, world_size, size, config.strategy.fsdp_shard_size)


def _frozen(config: Tree, world_size: int, size: ModelSize, shard_size: int) -> float:
    """Return the bytes of a model that is not trained; ``shard_size`` ranks share one copy, 0: all."""
    s = config.strategy
    share = (1 / (shard_size or world_size) if s.divides_weights(world_size) else 1) * (not s.fsdp_cpu_offload)
    return frozen_width(s, world_size, bool(config.model.bf16)) * size.total * (share + secondary_share(s, world_size))


def _reference(config: Tree, m: ReferenceModelConfig, world_size: int, size: ModelSize) -> dict[str, ByPhase]:
    """Return the row of a reference that is a second model: resident, or only in passes that come before training."""
    if m.lora_rank:
        return {}
    held = _frozen(config, world_size, size, config.strategy.fsdp_shard_size)
    resident = held * (not m.ref_offload and m.ref_cache_dir is None)
    return {"reference": (0, held, resident, resident, 0)}


def reward_sizes(cfg: RewardConfig) -> dict[str, ModelSize]:
    """Return the sizes of the reward models, by name, of those that are known here."""
    sizes = {name: known_model(path)[0] for name, path in parse_models(cfg.reward_pretrain).items()}
    return {name: size for name, size in sizes.items() if size}


def _reward_models(config: Config, world_size: int) -> ByPhase:
    """Return the bytes of the reward models; those in host memory visit the device one at a time, when generation and
    log-probs are over. A judge that generates needs a divided model whole meanwhile."""
    r, sizes, paths = config.reward, reward_sizes(config.reward), parse_models(config.reward.reward_pretrain)
    width, shard_size = config.model.itemsize, config.strategy.fsdp_shard_size
    held = {name: _frozen(config, world_size, size, shard_size) if r.reward_shard else width * size.total
            for name, size in sizes.items()}  # yapf: disable
    kinds = known_kinds(paths.values()) if r.reward_shard else {}
    generating = {name for name, path in paths.items() if path in kinds and kinds[path].generates}
    visit = max((held[name] * r.reward_offload + width * size.total * (name in generating)
                 for name, size in sizes.items()), default=0.0)  # yapf: disable
    resting = sum(held.values()) * (not r.reward_offload)
    return (resting, resting + visit, resting, resting, resting)


def micro_batch_tokens(config: Tree, world_size: int) -> tuple[int, bool]:
    """Count the tokens of a micro-batch of samples at the length limits; return also whether a step has several.

    A longer single sample goes alone. It is not counted, because it need not come.
    """
    return _micro_batch(config, ceil(config.train.train_batch_size / world_size), config.pass_tokens)


def _micro_batch(config: Tree, rows: int, tokens_of: Callable[[int], int]) -> tuple[int, bool]:
    """Return what :func:`micro_batch_tokens` does, for ``rows`` of which any number has ``tokens_of(number)``."""
    t, step = config.train, tokens_of(rows)
    tokens = min(t.max_tokens_per_micro_batch, step, tokens_of(t.micro_train_batch_size) or step)
    return tokens, step > tokens


@singledispatch
def pretraining_tokens(config: Tree, world_size: int) -> int:
    """Count the tokens of a micro-batch of other rows in the steps of a policy; each tree with such registers its own.
    """
    return 0


@pretraining_tokens.register
def _(config: Config, world_size: int) -> int:
    rows = ceil((config.ptx.ptx_batch_size or config.train.train_batch_size) / world_size)
    held = _micro_batch(config, rows, lambda count: count * config.pretrain_len)
    return held[0] if config.ptx.pretrain_data else 0


def update_tokens(config: Tree, world_size: int) -> tuple[int, bool]:
    """Count as :func:`micro_batch_tokens`, over the samples and the pretraining rows of a step."""
    (tokens, several), other = micro_batch_tokens(config, world_size), pretraining_tokens(config, world_size)
    return max(tokens, other), several or other > 0


def _activations(config: Tree, world_size: int, shape: ModelShape, held: dict[str, ByPhase]) -> dict[str, ByPhase]:
    """Return the rows of activations and gradients.

    The temporaries of layers and the chunk of logits never exist together, so what exceeds the chunk is counted. A
    single micro-batch frees its activations while gradients come into being: gradients count by what exceeds them.
    """
    m, (tokens, several) = config.model, update_tokens(config, world_size)
    one = Activations(shape, tokens, m.itemsize, bool(m.gradient_checkpointing), m.lora_rank > 0, bool(m.use_liger))
    before = replace(one, tokens=micro_batch_tokens(config, world_size)[0])  # passes have no pretraining rows
    chunk = held["logits of one chunk"][BACKWARD]
    kept = one.kept + max(0.0, one.backward - one.kept - chunk)
    rows: dict[str, ByPhase] = {"activations": (0, max(0.0, before.forward - chunk), kept, 0, 0)}
    for name, (generation, passes, backward, optimizer, sync) in held.items():
        if name.startswith("gradients, ") and not several:
            rows[name] = (generation, passes, max(0.0, backward - kept), optimizer, sync)
    return rows


def _of_towers(config: Tree, world_size: int, shape: ModelShape) -> dict[str, ByPhase]:
    """Return the row of the tower that takes most, with prompts full of pictures or sounds; none for a frozen one.

    Towers that are not trained keep nothing, and their passes are smaller than those of the decoder.
    """
    m, width = config.model, config.model.itemsize
    frozen = set(m.freeze_prefix) if not m.lora_rank else {"visual", "audio"} - set(m.target_modules)
    tokens, most = media_tokens(config, world_size), (0.0, 0)
    for tower in shape.towers:
        patches = tokens * tower.per_token
        again = tower.layer(patches, width) * bool(m.gradient_checkpointing)
        if tower.part not in frozen:
            most = max(most, (tower.kept(patches, width, bool(m.gradient_checkpointing)) + again, patches))
    return {f"activations of a tower, {most[1]:,} patches": (0, 0, most[0], 0, 0)} if most[1] else {}


@singledispatch
def media_tokens(config: Tree, world_size: int) -> int:
    """Count the most tokens of unique media in a micro-batch; each tree with prompts that repeat registers its own."""
    return micro_batch_tokens(config, world_size)[0]


@media_tokens.register
def _(config: Config, world_size: int) -> int:
    group = config.pass_tokens(config.rollout.n_samples_per_prompt)
    prompts = ceil(micro_batch_tokens(config, world_size)[0] / group) * config.rollout.prompt_max_len
    return max(prompts, pretraining_tokens(config, world_size))


def uncounted(shape: ModelShape | None) -> str:
    """Return words for the activations that an estimate leaves out, after a comma; empty for none."""
    return ", activations not counted" if shape is None else ""


def memory_lines(config: Tree, world_size: int, size: ModelSize | None, device: Device, critic: bool = False,
                 shape: ModelShape | None = None) -> list[str]:
    """Format the estimate as lines of text; the phases of a rollout are shown where there is one."""
    if size is None:
        return [
            "memory per rank: unknown, because --pretrain is neither a model folder nor a model that the hub "
            "could provide"
        ]
    held = memory(config, world_size, size, device, critic, shape) | overhead(config, world_size, device, shape)
    together = tuple(map(sum, zip(*held.values())))
    tokens = f", activations of {update_tokens(config, world_size)[0]:,} tokens" if shape else ""
    shown = slice(None) if together[0] or together[-1] else slice(1, -1)
    lines = [f"GiB per rank{tokens}{uncounted(shape)} ({size.total:,} parameters):",
             f"  {'':<48}" + "".join(f"{name:>12}" for name in PHASES[shown])]  # yapf: disable
    lines += [f"  {name:<48}" + "".join(f"{value / GIB:>12.2f}" for value in values[shown])
              for name, values in [*held.items(), ("together", together)]]  # yapf: disable
    return [*lines, *cache_notes(config)]


@singledispatch
def cache_notes(config: Tree) -> Iterator[str]:
    """Yield what the table leaves out of the engine's memory; each tree registers its own."""
    yield from ()


@cache_notes.register
def _(config: Config) -> Iterator[str]:
    if config.rollout.engine_type == "hf" and not config.rollout.engine_kv_mib:
        yield "  and a key-value cache of up to a quarter of the memory of the device (--engine_kv_mib 0)"
    elif config.rollout.offload_during_rollout and config.rollout.sync_proof in ("canary", "both"):
        yield "  canaries need models and cache together in the weight sync; --sync_proof fingerprint avoids this"
