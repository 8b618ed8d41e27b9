"""Estimated memory on the device of one rank, by purpose and by phase of a step.

Strategies and engines report their memory; this module adds it up, for every tree of options: one that has no rollout
has neither its phases nor an engine and a reference.
"""
from collections.abc import Callable
from dataclasses import replace
from math import ceil

from lightrft.config.schema import Config, RewardConfig
from lightrft.config.shared_schema import Tree
from lightrft.models.activations import Activations, ModelShape
from lightrft.preflight.base import Preflight, preflight, TrainingPhases
from lightrft.preflight.cost import GIB, known_kinds, known_model, MIB
from lightrft.preflight.hardware import Device
from lightrft.preflight.overhead import overhead
from lightrft.rewards.spec import parse_models
from lightrft.rollout.engines import ByPhase, PHASES
from lightrft.strategy.optimizers import OPTIMIZERS
from lightrft.strategy.memory import (frozen_width, gathered_weights, ModelSize, reduced_gradients, secondary_share,
                                      shares, STEP_BYTES, whole_gradients)

BACKWARD = PHASES.index("backward")
SENT = "gradients sent to other ranks"
HEADS = [name.split()[-1] for name in PHASES]  # of the columns of the table


def memory(config: Tree, world_size: int, size: ModelSize, device: Device,
           shape: ModelShape | None = None) -> dict[str, ByPhase]:
    """Estimate the bytes by purpose and phase, of micro-batches at the length limits.

    Activations are counted where the ``shape`` of the model is known. Sharded state is divided by the ranks that share
    it. With LoRA, gradients and optimizer state of the policy belong to the adapters and are left out. What rests in
    host memory counts where it visits the device. Gradients exist only in an update.
    """
    plan = preflight(config)
    held = {name: plan.by_phase(row) for name, row in _trainer(plan, world_size, size, device).items()}
    held |= plan.not_trained(world_size, size, device)
    if shape is not None:
        held |= _activations(config, world_size, size, shape, device, held)
        held |= _of_towers(config, world_size, shape)
    return {name: values for name, values in held.items() if any(values)}


def peak(held: dict[str, ByPhase]) -> tuple[str, float, str]:
    """Return the phase that takes most, its total in bytes, and the purpose that takes most of it."""
    sums = [sum(values) for values in zip(*held.values())]
    phase = sums.index(max(sums))
    return PHASES[phase], sums[phase], max(held, key=lambda name: held[name][phase])


def _trainer(plan: Preflight, world_size: int, size: ModelSize, device: Device) -> dict[str, TrainingPhases]:
    config, s, m = plan.config, plan.config.strategy, plan.config.model
    copied_once, models = not s.divides_weights(world_size), 2 if plan.trains_critic else 1
    actor = 0 if m.lora_rank else size.trained  # LoRA and --freeze_prefix are the policy's
    trained, most = actor + (models - 1), max(actor, models - 1)  # shares of one model: of both, of one at a time
    on_device = 0 if s.fsdp_cpu_offload else 1
    weights, gradients, moments = (4 * size.total * share * on_device for share in shares(s, world_size))
    frozen = frozen_width(s, world_size, bool(m.bf16)) / 4 if copied_once else 1
    weights *= trained + (models - trained) * frozen
    weights += 4 * secondary_share(s, world_size) * size.total * models
    optimizer, moments = OPTIMIZERS.get(config.train.optim), moments * trained
    state = moments / 4 * optimizer.state_bytes(config.train) * (not s.adam_offload)
    in_parts = len(optimizer.moments(config.train)) * (s.adam_offload or bool(optimizer.coded))
    stepping = min(moments, STEP_BYTES) * in_parts
    chunk = m.chunk_mib(device.total if device.cuda else 0) * MIB * plan.has_logits
    copies = gathered_weights(s, world_size, size, bool(m.bf16), bool(m.gradient_checkpointing))
    computing, updating = (copied * (trained if copied_once else 1) for copied in copies)  # one model gathers
    resting = computing * copied_once
    several = update_tokens(config, world_size)[1]  # a single one reduces gradients layer by layer
    whole = several * whole_gradients(s, world_size, int(size.total * most), device.total)
    reduced = reduced_gradients(s, world_size, size, int(size.total * most), whole > 0)
    return {
        "weights": (weights, ) * 4,
        "gradients, float32": (0, 0, *(gradients * most, ) * 2),  # the two models step one after the other
        "gradients not yet sharded": (0, 0, whole, 0),
        SENT: (0, 0, reduced, 0),
        f"optimizer state, {'8 bits' if optimizer.coded else 'float32'}": (state, state, state, state + stepping),
        "weights gathered or cast": (resting, computing, updating, resting),
        "logits of one chunk": (0, chunk, chunk, 0),
    }  # yapf: disable


def teacher_bytes(config: Tree, path: str | None, world_size: int, device: Device) -> float:
    """Return the bytes of the teacher at ``path``; 0 without one, or if its size is not known here."""
    size = known_model(path, device.cuda)[0] if path else None
    return 0.0 if size is None else frozen_bytes(config, world_size, size, config.strategy.fsdp_shard_size)


def frozen_bytes(config: Tree, world_size: int, size: ModelSize, shard_size: int) -> float:
    """Return the bytes of a model that is not trained; ``shard_size`` ranks share one copy, 0: all."""
    s = config.strategy
    share = (1 / (shard_size or world_size) if s.divides_weights(world_size) else 1) * (not s.fsdp_cpu_offload)
    return frozen_width(s, world_size, bool(config.model.bf16)) * size.total * (share + secondary_share(s, world_size))


def reward_sizes(cfg: RewardConfig) -> dict[str, ModelSize]:
    """Return the sizes of the reward models, by name, of those that are known here."""
    sizes = {name: known_model(path)[0] for name, path in parse_models(cfg.reward_pretrain).items()}
    return {name: size for name, size in sizes.items() if size}


def reward_bytes(config: Config, world_size: int) -> ByPhase:
    """Return the bytes of the reward models; those in host memory visit the device one at a time, when generation and
    log-probs are over. A judge that generates needs a divided model whole meanwhile."""
    r, sizes, paths = config.reward, reward_sizes(config.reward), parse_models(config.reward.reward_pretrain)
    width, shard_size = config.model.itemsize, config.strategy.fsdp_shard_size
    held = {name: frozen_bytes(config, world_size, size, shard_size) if r.reward_shard else width * size.total
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
    return cut_rows(config, ceil(config.train.train_batch_size / world_size), config.pass_tokens)


def cut_rows(config: Tree, rows: int, tokens_of: Callable[[int], int]) -> tuple[int, bool]:
    """Return what :func:`micro_batch_tokens` does, for ``rows`` of which any number has ``tokens_of(number)``."""
    t, step = config.train, tokens_of(rows)
    tokens = min(t.max_tokens_per_micro_batch, step, tokens_of(t.micro_train_batch_size) or step)
    return tokens, step > tokens


def update_tokens(config: Tree, world_size: int) -> tuple[int, bool]:
    """Count as :func:`micro_batch_tokens`, over the samples and the pretraining rows of a step."""
    (tokens, several), other = micro_batch_tokens(config, world_size), preflight(config).pretraining_tokens(world_size)
    return max(tokens, other), several or other > 0


def _repeats(config: Tree, device: Device) -> bool:
    """Return True if attention is known to repeat grouped heads: of a GPU of this machine, which is asked."""
    if not (config.model.bf16 and device.here):
        return False
    from lightrft.models.attention_kernels import repeats_heads  # loads torch
    return repeats_heads()


def _activations(config: Tree, world_size: int, size: ModelSize, shape: ModelShape, device: Device,
                 held: dict[str, ByPhase]) -> dict[str, ByPhase]:
    """Return the rows of activations and gradients.

    The temporaries of layers never exist together with those of the head, the chunk of logits and its gradient, so the
    larger ones are counted. A single micro-batch frees its activations while gradients come into being: gradients count
    by what exceeds them.
    """
    m, (tokens, several) = config.model, update_tokens(config, world_size)
    recompute = m.gradient_checkpointing or False
    one = Activations(shape, tokens, m.itemsize, recompute, m.lora_rank > 0, bool(m.use_liger),
                      _repeats(config, device))
    before = replace(one, tokens=micro_batch_tokens(config, world_size)[0])  # passes have no pretraining rows
    chunk, layer = held["logits of one chunk"][BACKWARD], one.backward - one.kept
    kept, head = one.kept + max(0.0, layer - chunk), 0.0
    if preflight(config).has_logits and not m.lora_rank and size.trains_head:
        sent = held[SENT][BACKWARD] * (config.strategy.resolved(world_size) == "fsdp")  # by layers, which come later
        head = max(0.0, shape.head_gradient(m.itemsize) + chunk - max(layer, chunk) - sent)
    rows: dict[str, ByPhase] = {"activations": (0, max(0.0, before.forward - chunk), kept, 0, 0),
                                "gradient of the head on its way": (0, 0, head, 0, 0)}  # yapf: disable
    for name, (generation, passes, backward, optimizer, sync) in held.items():
        if name.startswith("gradients, ") and not several:
            rows[name] = (generation, passes, max(0.0, backward - kept - head), optimizer, sync)
    return rows


def _of_towers(config: Tree, world_size: int, shape: ModelShape) -> dict[str, ByPhase]:
    """Return the row of the tower that takes most, with prompts full of pictures or sounds; none for a frozen one.

    Towers that are not trained keep nothing, and their passes are smaller than those of the decoder.
    """
    m, width = config.model, config.model.itemsize
    words = {word.removesuffix("?") for word in m.freeze_prefix}
    frozen = words if not m.lora_rank else {"visual", "audio"} - set(m.target_modules)
    tokens = preflight(config).media_tokens(world_size, micro_batch_tokens(config, world_size)[0])
    most = (0.0, 0)
    for tower in shape.towers:
        patches = tokens * tower.per_token
        if tower.part not in frozen:
            most = max(most, (tower.backward(patches, width, m.gradient_checkpointing or False), patches))
    return {f"tower, {most[1]:,} patches": (0, 0, most[0], 0, 0)} if most[1] else {}


def uncounted(shape: ModelShape | None) -> str:
    """Return words for the activations that an estimate leaves out, after a comma; empty for none."""
    return ", activations not counted" if shape is None else ""


def memory_lines(config: Tree, world_size: int, size: ModelSize | None, device: Device,
                 shape: ModelShape | None = None) -> list[str]:
    """Format the estimate as lines of text; the phases of a rollout are shown where there is one."""
    if size is None:
        return [
            "memory per rank: unknown, because --pretrain is neither a model folder nor a model that the hub "
            "could provide"
        ]
    held = memory(config, world_size, size, device, shape) | overhead(config, world_size, device, shape)
    together = tuple(map(sum, zip(*held.values())))
    tokens = f", activations of {update_tokens(config, world_size)[0]:,} tokens" if shape else ""
    shown = slice(None) if together[0] or together[-1] else slice(1, -1)
    lines = [("", HEADS), *((name, [f"{value / GIB:.2f}" for value in values])
                            for name, values in [*held.items(), ("together", together)])]  # yapf: disable
    first, widths = max(map(len, held)), [max(len(head), 7) + 1 for head in HEADS]
    table = (f"  {name:<{first}}" + "".join(map(str.rjust, cells[shown], widths[shown])) for name, cells in lines)
    return [f"GiB per rank{tokens}{uncounted(shape)} ({size.total:,} parameters):", *table,
            *preflight(config).cache_notes()]  # yapf: disable
