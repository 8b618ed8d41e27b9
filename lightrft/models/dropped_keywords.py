"""Families whose layers do not hand keyword arguments on to their attention, which needs those of the packed row."""
from typing import Any

from torch import nn

LAYERS = ("StableLmDecoderLayer", "NemotronDecoderLayer", "MoshiDecoderLayer")
KEYWORDS = ("packing", "kv_cache")


def adapt(body: nn.Module) -> None:
    """Let the attention of these families in ``body`` get what its layer gets; also when a checkpoint is computed
    again."""
    for module in body.modules():
        if type(module).__name__ in LAYERS:
            module.register_forward_pre_hook(_keep, with_kwargs=True)
            attention: Any = module.self_attn
            attention.register_forward_pre_hook(_add, with_kwargs=True)


def _keep(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    vars(layer.self_attn)["of_layer"] = {name: kwargs[name] for name in KEYWORDS if name in kwargs}


def _add(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, vars(attention).get("of_layer", {}) | kwargs
