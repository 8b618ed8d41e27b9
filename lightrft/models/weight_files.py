"""Weights in safetensors files: placeholders for them while a model is built, the rows that a rank reads, and the
names under which they are written."""
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel, modeling_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, Transpose, WeightConverter, WeightTransform

FLOATS = ("F64", "F32", "F16", "BF16")  # names of types in safetensors files


class Place(NamedTuple):
    """The file of a tensor, and its name there."""
    file: str
    key: str


class WeightFiles:
    """Files that hold the weights of a model; ``places`` maps the names of its tensors to where they are stored."""

    def __init__(self, places: dict[str, Place]) -> None:
        self.places = places

    def read(self, name: str, at: tuple[slice, ...]) -> Tensor:
        """Return the block ``at`` of a tensor, in the type of the file. The file is mapped into memory only while the
        result exists, so that what other tensors took does not count as this process' memory."""
        with safe_open(self.places[name].file, framework="pt") as opened:
            whole = opened.get_slice(self.places[name].key)
            return whole[at] if at else opened.get_tensor(self.places[name].key)


class StandIns:
    """Tensors with the shapes of those in files and without their data: one element each, expanded.

    transformers assigns them to parameters as if they had been read. So names, tied weights, missing tensors, buffers
    and what is initialized at random are its decision, as with real weights.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.made: dict[int, tuple[Place, Tensor]] = {}  # by the address of the element

    def make(self, place: Place, shape: list[int]) -> Tensor:
        """Return the tensor that stands for the one at ``place``."""
        tensor = torch.zeros(1, dtype=self.dtype).expand(shape) if shape else torch.zeros((), dtype=self.dtype)
        self.made[tensor.data_ptr()] = place, tensor
        return tensor

    def open(self, file: str, **kwargs: Any) -> "Header":
        """Open a file as ``safetensors.safe_open`` does."""
        return Header(self, file, safe_open(file, **kwargs))

    def stands_in(self, tensor: Tensor) -> bool:
        """Return True for a tensor made here."""
        return tensor.data_ptr() in self.made

    def places(self, hf: PreTrainedModel, missing: set[str]) -> dict[str, Place] | None:
        """Return where the tensors of ``hf`` are stored; None if some are not stored as ``hf`` has them (transformers
        converted them), or if it depends on their values whether they are tied. ``missing``: not in any file."""
        state = hf.state_dict(keep_vars=True)
        found = {name: self.made[tensor.data_ptr()] for name, tensor in state.items() if self.stands_in(tensor)}
        converted = any(isinstance(one, WeightConverter) for one in vars(hf).get("_weight_conversions") or ())
        lost = any(state[name].is_floating_point() for name in state.keys() - found.keys() - missing)
        reshaped = any(state[name].shape != made.shape for name, (_, made) in found.items())
        stored = {place.key for place, _ in self.made.values()}
        tied_twice = any({target, source} <= stored for target, source in hf.all_tied_weights_keys.items())
        if converted or lost or reshaped or tied_twice:
            return None
        return {name: place for name, (place, _) in found.items()}


class Shapes(StandIns):
    """Tensors on the meta device with the shapes of those in files: nothing is known of where they are stored."""

    def make(self, place: Place, shape: list[int]) -> Tensor:
        """Return the tensor that stands for the one at ``place``."""
        return torch.empty(shape, dtype=self.dtype, device="meta")


class Header:
    """An open safetensors file whose floating-point tensors are stood in for."""

    def __init__(self, stand_ins: StandIns, file: str, opened: Any) -> None:
        self.stand_ins, self.file, self.opened = stand_ins, file, opened

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self.opened.keys())

    def get_slice(self, key: str) -> Any:
        """Return the tensor ``key``, which transformers slices."""
        real = self.opened.get_slice(key)
        if real.get_dtype() not in FLOATS:
            return real
        return self.stand_ins.make(Place(self.file, key), real.get_shape())

    def __exit__(self, *error: Any) -> None:
        self.opened.__exit__(*error)


def stand_ins(dtype: torch.dtype) -> AbstractContextManager[StandIns]:
    """Context in which ``from_pretrained`` reads the headers of safetensors files only."""
    return _opened_by(StandIns(dtype))


def shapes_alone(dtype: torch.dtype) -> AbstractContextManager[StandIns]:
    """Context in which ``from_pretrained``, onto the meta device, reads the headers of safetensors files only."""
    return _opened_by(Shapes(dtype))


@contextmanager
def _opened_by(made: StandIns) -> Iterator[StandIns]:
    name = "safe_open"
    before = vars(modeling_utils)[name]
    setattr(modeling_utils, name, made.open)
    try:
        yield made
    finally:
        setattr(modeling_utils, name, before)


def name_as_published(hf: PreTrainedModel) -> PreTrainedModel:
    """Return ``hf``, which will be written as published checkpoints of its family are, with their names and experts,
    whatever files it was read from: vLLM, SGLang and earlier versions of transformers read those alone.

    transformers reverts the steps of its reading. One of the whole model (Qwen2-Audio) that the model inside of it
    repeats would be reverted twice. Tensors that are one in checkpoints and several in the model do not come together
    where one is written after another. Experts that checkpoints transpose (Qwen3-VL) would stay as they are; they do
    where they are square, since then transformers cannot know which way it reads them. The prefix that a model has
    inside of a larger one (the thinker of Qwen2.5-Omni, since transformers 5.21) is not written.
    """
    steps = get_model_conversion_mapping(hf, add_legacy=False)
    whole = {pattern for step in steps if step.scope_prefix is None for pattern in step.source_patterns}
    square = any(weight.ndim == 3 and weight.shape[1] == weight.shape[2] for weight in hf.parameters())

    def is_reverted(step: WeightTransform) -> bool:
        operations = step.operations if isinstance(step, WeightConverter) else []
        turns = [one for one in operations if isinstance(one, Transpose)]
        for one in turns:
            one.check_dims = False  # against the shape in the model, which is the one that is written from
        again = step.scope_prefix is not None and whole.intersection(step.source_patterns)
        inside = (isinstance(step, PrefixChange) and step.scope_prefix is None and not step.model_prefix
                  and step.prefix_to_remove)
        return len(step.target_patterns) == 1 and not again and not inside and not (turns and square)

    vars(hf)["_weight_conversions"] = [step for step in steps if is_reverted(step)]
    return hf
