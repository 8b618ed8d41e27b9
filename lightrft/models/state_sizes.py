"""Bytes that layers with state keep of a sequence, found by one token on a copy of the model without data."""
import inspect
import json
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CONFIG_MAPPING, PretrainedConfig

from lightrft.models.state_rows import Layer, LayerState
from lightrft.models.stateful import adapt, stateful


class _Sizes:
    """Cache that counts the bytes of the states of one sequence."""

    def __init__(self) -> None:
        self.total = 0

    def mix(self, layer_idx: int, hidden: Tensor, layer: Layer) -> tuple[Tensor, ...]:
        """Run a layer from its beginning."""
        outs = layer(hidden, state := LayerState())
        self.total += sum(x.nbytes for x in state.states.values())
        return outs


def state_bytes(config: PretrainedConfig) -> int:
    """Return the bytes of the states of one sequence in all layers of ``config``, with convolutions in float32."""
    text = config.get_text_config()
    return _bytes_of(text.model_type, json.dumps(text.to_dict(), default=str))


@lru_cache(maxsize=8)
def _bytes_of(model_type: str, values: str) -> int:
    config = CONFIG_MAPPING[model_type].from_dict(json.loads(values) | {"dtype": "float32"})
    with torch.device("meta"), torch.no_grad():
        model, sizes = AutoModelForCausalLM.from_config(config, trust_remote_code=False), _Sizes()
        adapt(model)
        token = torch.empty(1, 1, config.hidden_size)
        for layer in stateful(model):
            layer(token, kv_cache=sizes, **dict.fromkeys(_unused(type(layer).__mro__[2])))
    return sizes.total


def _unused(family: Any) -> list[str]:
    """Names of the arguments that the forward pass of a layer asks for, besides the hidden states: masks, positions."""
    _, _, *others = inspect.signature(family.forward).parameters.values()
    return [each.name for each in others if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
