"""Families whose layers do not hand keyword arguments on to their attention or to a layer with state, which need those
of the packed row."""
from functools import partial
from typing import Any

from torch import nn

LAYERS = {
    "StableLmDecoderLayer": "self_attn",
    "NemotronDecoderLayer": "self_attn",
    "MoshiDecoderLayer": "self_attn",
    "JambaMambaDecoderLayer": "mamba",
    "Lfm2DecoderLayer": "conv",
    "Lfm2MoeDecoderLayer": "conv",
}  # and the name of what does not get them
KEYWORDS = ("packing", "kv_cache")


def adapt(body: nn.Module) -> None:
    """Let these modules in ``body`` get what their layer gets; also when a checkpoint is computed again."""
    for module in body.modules():
        inner = getattr(module, LAYERS.get(type(module).__name__, ""), None)
        if isinstance(inner, nn.Module):
            module.register_forward_pre_hook(partial(_keep, inner), with_kwargs=True)
            inner.register_forward_pre_hook(_add, with_kwargs=True)


def _keep(inner: nn.Module, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    vars(inner)["of_layer"] = {name: kwargs[name] for name in KEYWORDS if name in kwargs}


def _add(inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, vars(inner).get("of_layer", {}) | kwargs
