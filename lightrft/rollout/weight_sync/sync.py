"""Transfer of the trainer's weights to the engine: full tensors under their Hugging Face names."""
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lightrft.models.packed_model import PackedModel
from lightrft.rollout.engine import RolloutEngine, TakesAdapters
from lightrft.rollout.weight_sync.verify import WeightSyncVerifier
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.strategy.optimizer import full_shape


def sync_weights(strategy: StrategyBase, prepared: Prepared, engine: RolloutEngine, version: int, bucket_mib: int = 512,
                 proof: WeightSyncVerifier | None = None) -> float:
    """Stream the full weights of ``prepared.model`` into ``engine``, ``bucket_mib`` MiB at a time; return the
    seconds taken. An engine that takes adapters gets the base weights once.

    A collective when the model is sharded: every rank calls it, and each fills its own engine. With ``proof`` the
    stream is observed; :meth:`WeightSyncVerifier.check` then verifies the engine.
    """
    start = time.perf_counter()
    lora = engine.lora if isinstance(engine, TakesAdapters) else "merged"
    stream = strategy.full_params(prepared.model, bucket_mib << 20, lora)
    engine.update_weights(proof.watch(stream) if proof else stream, version)
    return time.perf_counter() - start


Shapes = dict[str, torch.Size]
Names = dict[str, list[tuple[str, int, torch.Size]]]  # in checkpoints: name, first element, shape of each of its parts


class WeightManifest(NamedTuple):
    """Contents of an update: name and shape of every weight, and its names in checkpoints where they differ."""
    shapes: Shapes
    names: Names


def exported_shapes(actor: PackedModel, merge: bool = True) -> Shapes:
    """Name and shape of every weight that ``full_params`` of ``actor`` brings, LoRA merged or apart."""
    stream = ((name, torch.empty(full_shape(parameter), dtype=parameter.dtype, device="meta"))
              for name, parameter in actor.named_parameters())
    return {name: tensor.shape for name, tensor in actor.export_params(stream, merge)}


def checkpoint_names(model: PreTrainedModel, shapes: Shapes) -> Names:
    """Names of the weights that checkpoints of the family of ``model`` have instead of those in ``shapes``, where they
    differ: transformers joins the experts of a MoE as it reads them, and renames weights of vision models. Weights
    that cannot be cut up are left out."""
    found: Names = {}
    for name, shape in shapes.items():
        if not shape:
            continue
        numbers = torch.arange(0, shape.numel(), shape[-1])  # of the first element of each row, which stands for it
        parts = revert_weight_conversion(model, {name: numbers.view(*shape[:-1], 1).expand(*shape[:-1], 2)})
        whole = all((part[..., 0].flatten().diff() == shape[-1]).all() for part in parts.values())
        if whole and list(parts) != [name] and (len(shape) > 1 or len(parts) == 1):
            found[name] = [(new, int(part.flatten()[0]), torch.Size((*part.shape[:-1], shape[-1])))
                           for new, part in parts.items()]  # yapf: disable
    return found


def under_checkpoint_names(named_tensors: Iterable[tuple[str, Tensor]], names: Names) -> Iterator[tuple[str, Tensor]]:
    """Yield the stream under the names, and in the parts, of checkpoints; its tensors are views."""
    for name, tensor in named_tensors:
        if name not in names:
            yield name, tensor
        for new, first, shape in names.get(name, ()):
            yield new, tensor.flatten()[first:first + shape.numel()].view(shape)


def checked(named_tensors: Iterable[tuple[str, Tensor]], shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Yield the stream itself, and check that it holds each weight of ``shapes`` exactly once.

    Raises:
        ValueError: a name is unknown or comes twice, a shape differs, or at the end a weight is missing.
    """
    missing = dict(shapes)
    for name, tensor in named_tensors:
        if name not in missing:
            raise ValueError(f"weight {name!r} {'came twice' if name in shapes else 'is not one of the model'}")
        if missing.pop(name) != tensor.shape:
            raise ValueError(f"weight {name!r} has shape {list(tensor.shape)}, the model's has {list(shapes[name])}")
        yield name, tensor
    if missing:
        raise ValueError(f"{len(missing)} weights did not arrive, the first is {next(iter(missing))!r}")
