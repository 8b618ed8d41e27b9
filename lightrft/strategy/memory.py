"""Estimate of the memory that a strategy takes on the device of one rank, for a trained model. Nothing is loaded."""
from dataclasses import dataclass

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.deepspeed import LIVE_AT_ONCE, REDUCED_AT_ONCE

STEP_BYTES = 256 << 20  # of weights updated at once, where moments rest in host memory or in 8 bits
BLOCKS = (256, 128, 64)  # elements that share a scale, of moments in 8 bits; CUDA kernels know no smaller ones
# Share of a device's memory up to which FSDP2 keeps full gradients until the last micro-batch. An eighth of 80 GB holds
# those of 2.5 billion parameters. Larger models leave less room for activations, and gather their weights for every
# micro-batch as it is, so that a sum per micro-batch, which runs during the backward pass, changes little.
WHOLE_GRADIENTS_SHARE = 1 / 8


@dataclass(frozen=True)
class ModelSize:
    """Parameter counts of a model."""
    total: int
    largest_layer: int  # decoder layer
    outside: int  # embeddings, head, final norm
    largest: int = 0  # tensor
    trained: float = 1.0  # share of them that --freeze_prefix leaves to train
    trains_head: bool = True


def secondary_share(s: StrategyConfig, world_size: int) -> float:
    """Return the share of every model's weights that a rank holds once more, divided within its group of ``--zpg``
    ranks (the secondary partition of ZeRO-3)."""
    divided = s.resolved(world_size) == "deepspeed" and s.zero_stage == 3 and s.zpg > 1
    return 1 / s.zpg if divided else 0.0


def shares(s: StrategyConfig, world_size: int) -> tuple[float, float, float]:
    """Return the shares of the weights, the gradients and the optimizer state that a rank holds on its device."""
    chosen = s.resolved(world_size)
    if chosen == "deepspeed":
        weights, gradients, moments = (1 / world_size if s.zero_stage >= stage else 1 for stage in (3, 2, 1))
        return weights, gradients, 0 if s.adam_offload and s.zero_stage else moments
    share = 1 / (s.fsdp_shard_size or world_size) if chosen == "fsdp" else 1
    return share, share, share


def keeps_whole_gradients(s: StrategyConfig, trained: int, device_bytes: int) -> bool:
    """Return True if FSDP2 adds up full gradients of ``trained`` parameters until the last micro-batch, on devices of
    ``device_bytes``."""
    return s.grad_sync == "last" or s.grad_sync == "auto" and 4 * trained <= WHOLE_GRADIENTS_SHARE * device_bytes


def whole_gradients(s: StrategyConfig, world_size: int, trained: int, device_bytes: int) -> float:
    """Return the bytes of full gradients of ``trained`` parameters, which FSDP2 holds until the last micro-batch."""
    return 4.0 * trained * (s.resolved(world_size) == "fsdp" and keeps_whole_gradients(s, trained, device_bytes))


def reduced_gradients(s: StrategyConfig, world_size: int, size: ModelSize, trained: int, whole: bool) -> float:
    """Return the bytes of gradients on their way to other ranks: DeepSpeed's buffers; of the largest unit of FSDP2 a
    copy and, if they are not counted as ``whole``, the gradients."""
    chosen = s.resolved(world_size)
    if chosen == "fsdp":
        return 4 * min(trained, max(size.largest_layer, size.outside)) * (1 if whole else 2)
    buffers = 2 if s.overlap_comm and s.zero_stage < 3 else 1
    return 4 * buffers * min(trained, REDUCED_AT_ONCE) * (chosen == "deepspeed" and s.zero_stage > 0)


def frozen_width(s: StrategyConfig, world_size: int, bf16: bool) -> float:
    """Return the bytes per weight of a model that is not trained; FSDP2 keeps it in float32."""
    return 2.0 if bf16 and s.resolved(world_size) != "fsdp" else 4.0


def gathered_weights(s: StrategyConfig, world_size: int, size: ModelSize, bf16: bool,
                     gradient_checkpointing: bool) -> tuple[float, float]:
    """Return the bytes of weights that are gathered or cast, in a pass without gradients and in an update.

    Sharded: two layers (one computes, one is fetched) and the weights outside the layers. ZeRO holds them in float32
    and cast. Without gradient checkpointing it gathers up to :data:`LIVE_AT_ONCE` ahead, and in an update autograd
    keeps all that are cast.
    """
    if not s.divides_weights(world_size):
        return (2.0 * size.total * bf16, ) * 2
    gathered = min(size.total, size.outside + 2 * size.largest_layer)
    if s.resolved(world_size) == "fsdp":
        return ((2.0 if bf16 else 4.0) * gathered, ) * 2
    ahead = gathered if gradient_checkpointing else max(gathered, min(size.total, LIVE_AT_ONCE))
    cast = gathered if gradient_checkpointing else size.total
    return 4.0 * ahead + 2.0 * gathered * bf16, 4.0 * ahead + 2.0 * cast * bf16
