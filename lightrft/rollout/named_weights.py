"""The weights that an update brings to an engine: full tensors under their Hugging Face names."""
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightrft.models.packed_model import PackedModel

Shapes = dict[str, torch.Size]


def exported_shapes(actor: PackedModel, merge: bool = True) -> Shapes:
    """Name and shape of every weight that ``full_params`` of ``actor`` brings, LoRA merged or apart."""
    stream = ((name, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
              for name, parameter in actor.named_parameters())
    return {name: tensor.shape for name, tensor in actor.export_params(stream, merge)}


def checked(named_tensors: Iterable[tuple[str, Tensor]], shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    """The stream itself, once it is known to hold each weight of ``shapes`` exactly once.

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
