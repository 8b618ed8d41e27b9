"""Bytes and multiplications of layers with state, found on a copy of the model without data."""
import inspect
import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, CONFIG_MAPPING, PretrainedConfig

from lightrft.models.state_rows import Layer, LayerState
from lightrft.models.stateful import adapt, LAYERS, stateful


@dataclass(frozen=True)
class StateCosts:
    """Costs of all layers with state together.

    Attributes:
        layers: their number.
        states: bytes of the states of one sequence.
        kept: bytes per token that a forward pass keeps for the backward pass, without the input of the layers.
        results: bytes per token of the results of their linear layers that selective recomputation keeps.
        multiplications: per token.
    """
    layers: int
    states: int
    kept: float
    results: int
    multiplications: float


@dataclass(frozen=True)
class StateLayers:
    """The layers with state of a decoder, by its model type and its config as JSON. ``inner``: widths inside its MLPs.
    """
    model_type: str
    values: str = field(repr=False)
    inner: frozenset[int] = frozenset()

    @classmethod
    def of(cls, config: PretrainedConfig, inner: frozenset[int] = frozenset()) -> "StateLayers":
        """Describe the layers of a Hugging Face config."""
        text = config.get_text_config()
        return cls(text.model_type, json.dumps(text.to_dict(), default=str), inner)

    def costs(self, width: int = 4, frozen: bool = False) -> StateCosts:
        """Return their costs in elements of ``width`` bytes. ``frozen``: weights other than matrices are not trained.
        """
        return _costs(self.model_type, self.values, self.inner, width, frozen)


class _Cache:
    """Cache that counts the bytes of the states of one sequence."""

    def __init__(self) -> None:
        self.states = 0

    def mix(self, layer_idx: int, hidden: Tensor, layer: Layer) -> tuple[Tensor, ...]:
        """Run a layer from its beginning."""
        outs = layer(hidden, state := LayerState())
        self.states += sum(x.nbytes for x in state.states.values())
        return outs


@lru_cache(maxsize=16)
def _costs(model_type: str, values: str, inner: frozenset[int], width: int, frozen: bool) -> StateCosts:
    dtype = torch.float32 if width == 4 else torch.bfloat16
    config = CONFIG_MAPPING[model_type].from_dict(json.loads(values) | {"dtype": "float32"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=dtype)
    adapt(model)
    layers = stateful(model)
    unadapted = {module for layer in layers for name, module in layer.named_children() if name == _unadapted(layer)}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            weight.requires_grad_(not frozen or weight.ndim == 2 and module not in unadapted)
    kinds = [[layer for layer in layers if type(layer) is family] for family in {type(layer) for layer in layers}]
    costs = [(len(kind), _of_layer(kind[0], config.hidden_size, dtype, inner, frozen)) for kind in kinds]
    return StateCosts(len(layers), sum(count * cost.states for count, cost in costs),
                      sum(count * cost.kept for count, cost in costs),
                      sum(count * cost.results for count, cost in costs),
                      sum(count * cost.multiplications for count, cost in costs))


def _unadapted(layer: nn.Module) -> str:
    """Return the name of the linear layer of ``layer`` that cannot have an adapter, if any."""
    return (LAYERS[type(layer).__name__].unadapted or ("", ))[0]


def _of_layer(layer: nn.Module, hidden_size: int, dtype: torch.dtype, inner: frozenset[int],
              frozen: bool) -> StateCosts:
    known = LAYERS[type(layer).__name__]
    chunk, again = known.chunk, known.strided if frozen else ()
    (_, kept, multiplied), (states, kept_of_two, multiplied_by_two) = (_measured(
        layer, torch.empty(1, tokens, hidden_size, dtype=dtype, device="meta", requires_grad=True))
                                                                       for tokens in (chunk, 2 * chunk))
    widths = sum(module.out_features for name, module in layer.named_modules()
                 if isinstance(module, nn.Linear) and module.in_features not in inner and name not in again)
    return StateCosts(1, states, (kept_of_two - kept) / chunk, widths * dtype.itemsize,
                      (multiplied_by_two - multiplied) / chunk)


def _measured(layer: nn.Module, hidden: Tensor) -> tuple[int, int, float]:
    """Run a layer; return the bytes of its states, those that it keeps, and its multiplications."""
    cache, kept = _Cache(), dict[int, Tensor]()
    there = {_storage(tensor) for tensor in (hidden, *layer.parameters())}

    def pack(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in there:
            kept[_storage(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), FlopCounterMode(display=False) as count:
        layer(hidden, kv_cache=cache, **dict.fromkeys(_unused(type(layer).__mro__[2])))
    return cache.states, sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), count.get_total_flops() / 2


def _storage(tensor: Tensor) -> int:
    """Identity of the storage of a tensor; one without data has no address."""
    return tensor.untyped_storage()._cdata


def _unused(family: Any) -> list[str]:
    """Names of the arguments that the forward pass of a layer asks for, besides the hidden states: masks, positions."""
    _, _, *others = inspect.signature(family.forward).parameters.values()
    return [each.name for each in others if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
