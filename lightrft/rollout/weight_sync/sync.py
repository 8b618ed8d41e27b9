"""Transfer of the trainer's weights to the engine: full tensors under their Hugging Face names."""
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lightrft.models.packed_model import PackedModel
from lightrft.rollout.engine import KeepsWeights, RolloutEngine
from lightrft.rollout.weight_sync.verify import WeightSyncVerifier
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.strategy.sharding import full_shape


def sync_weights(strategy: StrategyBase, prepared: Prepared, engine: RolloutEngine, version: int, bucket_mib: int = 512,
                 proof: WeightSyncVerifier | None = None) -> float:
    """Stream the full weights of ``prepared.model`` into ``engine``, ``bucket_mib`` MiB at a time; return the
    seconds taken. An engine that still has the weights of the last update gets only those that training changes.

    A collective when the model is sharded: every rank calls it, and each fills its own engine. With ``proof`` the
    stream is observed; :meth:`WeightSyncVerifier.check` then verifies the engine.
    """
    start = time.perf_counter()
    merge, kept = (not engine.apart, engine.holds_weights) if isinstance(engine, KeepsWeights) else (True, False)
    stream = strategy.full_params(prepared.model, bucket_mib << 20, merge, kept)
    engine.update_weights(proof.watch(stream) if proof else stream, version)
    return time.perf_counter() - start


Shapes = dict[str, torch.Size]
Names = dict[str, list[tuple[str, int, torch.Size]]]  # in checkpoints: name, first element, shape of each of its parts


class WeightManifest(NamedTuple):
    """Contents of an update: name and shape of every weight.

    ``frozen``: names of the weights that training does not change; ``names``: those of checkpoints, where they differ.
    """
    shapes: Shapes
    frozen: frozenset[str] = frozenset()
    names: Names = {}

    @property
    def changing(self) -> Shapes:
        """Weights of the update of an engine that has the frozen ones already."""
        return {name: shape for name, shape in self.shapes.items() if name not in self.frozen}


def manifest(actor: PackedModel, merge: bool = True) -> WeightManifest:
    """Describe the weights that ``full_params`` of ``actor`` brings, LoRA merged or apart."""
    every, trained = {name for name, _ in actor.named_parameters()}, actor.trained_names(merge)
    shapes, changing = _exported_shapes(actor, every, merge), _exported_shapes(actor, trained, merge)
    return WeightManifest(shapes, frozenset(shapes.keys() - changing.keys()))


def _exported_shapes(actor: PackedModel, names: set[str], merge: bool) -> Shapes:
    stream = ((name, torch.empty(full_shape(parameter), dtype=parameter.dtype, device="meta"))
              for name, parameter in actor.named_parameters() if name in names)  # yapf: disable
    return {name: tensor.shape for name, tensor in actor.export_params(stream, merge)}


def checkpoint_names(model: PreTrainedModel, shapes: Shapes) -> Names:
    """Names of the weights that checkpoints of the family of ``model`` have instead of those in ``shapes``, where they
    differ: transformers joins the experts of a MoE as it reads them, and renames weights of vision models. Experts
    that checkpoints hold joined and transposed get names of their own. Other weights that cannot be cut up are left
    out."""
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
        elif not whole and len(shape) == 3:
            found |= _single_experts(name, shape)
    return found


_OF_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj", )}


def _single_experts(name: str, shape: torch.Size) -> Names:
    """Names of the matrices of single experts in the weight ``name`` [experts, rows, columns], as checkpoints with an
    expert per weight have them; nothing for other weights."""
    above, _, own = name.rpartition(".")
    parts = _OF_EXPERTS.get(own, ()) if above.endswith("experts") else ()
    one = torch.Size((shape[1] // max(len(parts), 1), shape[2]))
    names = [f"{above}.{i}.{part}.weight" for i in range(shape[0]) for part in parts]
    return {name: [(each, i * one.numel(), one) for i, each in enumerate(names)]} if names else {}


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
