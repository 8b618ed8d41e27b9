"""Layers with state, by their class in transformers: convolutions, delta rules, state spaces, lightning attention.

transformers runs them over a row as over one sequence. Here their own code runs per sequence (:class:`StateRows`), and
a prompt that several sequences share hands its state to each of them. A family that is not in :data:`LAYERS` is
refused.
"""
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from torch import nn, Tensor
from torch.nn.functional import softplus
from transformers import PretrainedConfig

from lightrft.models.attention import PackedLayout
from lightrft.models.state_rows import LayerState

KEYWORDS = ("packing", "kv_cache")
_STEP = "mamba2_selective_state_update"
_CACHES = ("cache", "cache_params", "past_key_values")  # names of the cache in ``forward``, by release and family


class StateCache(Protocol):
    """Interface of the rollout engine's ``kv_cache=`` for layers with state."""

    def mix(self, layer_idx: int, hidden: Tensor, layer: Callable[[Tensor, LayerState], tuple[Tensor, ...]]) -> Any:
        """Run a layer from the states of its rows, and store those at their ends: [1, T, H] -> [1, T, ...] each."""


@dataclass(frozen=True)
class StatefulLayer:
    """Particulars of the layers of one class.

    Attributes:
        continues: its code takes up a state exactly, so that sequences can share the forward pass of a prompt.
        outputs: tensors [n, L, ...] that it returns.
        unread: further outputs, which no model reads.
        unadapted: its linear layer that cannot have an adapter, and why.
        chunk: a multiple of the tokens that its code takes at once.
        exact: its parts between which it computes in float32, because its decays are float32.
        strided: linear layers that read a transposed tensor. torch multiplies it by weights that are not trained as a
            batch of matrices, which selective recomputation does not keep.
    """
    continues: bool = True
    outputs: int = 1
    unread: int = 0
    unadapted: tuple[str, str] | None = None
    chunk: int = 256
    exact: tuple[str, str] | None = None
    strided: tuple[str, ...] = ()


_DELTA = _STATE_SPACE = _CONVOLUTION = StatefulLayer()
_FUSED = StatefulLayer(unadapted=("out_proj", "peft refuses it, for kernels that read its weight"))
_SCAN = StatefulLayer(continues=False, chunk=8,  # Mamba 1: its scan begins with zeros, and goes on token by token
                      unadapted=("dt_proj", "its layer reads its weight past adapters"),
                      strided=("x_proj", "dt_proj", "out_proj"))  # yapf: disable
_LIGHTNING = StatefulLayer(continues=False, unread=1, exact=("act_fn", "norm"))  # goes on token by token
LAYERS: dict[str, StatefulLayer] = {
    "Qwen3NextGatedDeltaNet": _DELTA,
    "Qwen3_5GatedDeltaNet": _DELTA,
    "Qwen3_5MoeGatedDeltaNet": _DELTA,
    "OlmoHybridGatedDeltaNet": _DELTA,
    "KimiLinearDeltaAttention": _DELTA,
    "BambaMixer": _STATE_SPACE,
    "FalconH1Mixer": _FUSED,
    "GraniteMoeHybridMambaLayer": _STATE_SPACE,
    "NemotronHMamba2Mixer": _FUSED,
    "Zamba2MambaMixer": _STATE_SPACE,
    "Lfm2ShortConv": _CONVOLUTION,
    "Lfm2MoeShortConv": _CONVOLUTION,
    "JambaMambaMixer": _SCAN,
    "MiniMaxLightningAttention": _LIGHTNING,
}
KINDS = {"linear_attention", "conv", "hybrid"}  # their names in ``layer_types``
MIXES_NOTHING = {"mlp", "moe"}  # names of layers that treat every token alone


class _PerSequence:
    """The forward pass of a layer with state in a packed row.

    ``calls_by_rank``: ranks call its modules as often as their own rows need, so no collective may be in such a call.
    All ranks call the layer itself equally often.
    """
    calls_by_rank = True
    layer_idx: int

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer of each sequence of the row [1, T, H]; without a layout, as transformers does."""
        layout: Any = kwargs.get("packing")
        cache: Any = kwargs.get("kv_cache")
        kwargs = {name: value for name, value in kwargs.items() if name not in KEYWORDS}
        forward, name = super().forward, _cache_name(type(self))  # type: ignore[misc, arg-type]
        if layout is None and cache is None:
            return forward(hidden_states, *args, **kwargs)
        kind = LAYERS[type(self).__name__]

        def layer(rows: Tensor, state: LayerState) -> tuple[Tensor, ...]:
            found = forward(rows, **kwargs | {name: state} | self._limits(rows, state))
            return found[:kind.outputs] if isinstance(found, tuple) else (found, )

        outs = cache.mix(self.layer_idx, hidden_states, layer) if cache is not None else _packed(
            layout, hidden_states, layer)
        returned = (*outs, *[None] * kind.unread)
        return returned if len(returned) > 1 else returned[0]

    def _limits(self, rows: Tensor, state: LayerState) -> dict[str, Any]:
        """Arguments of :func:`_limited`, where one token continues others."""
        limit = getattr(self, "time_step_limit", None)
        return {"dt_limit": limit} if limit is not None and state.began and rows.shape[1] == 1 else {}


def _packed(layout: PackedLayout, hidden: Tensor, layer: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
    layout.calls += 1
    return [out[None] for out in layout.state_rows.run(hidden[0], layer)[0]]


@lru_cache(maxsize=None)
def _cache_name(family: type[Any]) -> str:
    """Name of the cache among the parameters of the forward pass of a layer."""
    base: Any = family.__mro__[2]
    parameters = inspect.signature(base.forward).parameters
    return next(name for name in _CACHES if name in parameters)


@lru_cache(maxsize=None)
def _derived(family: type[Any]) -> type[Any]:
    return type(family.__name__, (_PerSequence, family), {"__module__": family.__module__})


def stateful(model: nn.Module) -> list[nn.Module]:
    """Layers with state in ``model``."""
    return [module for module in model.modules() if type(module).__name__ in LAYERS]


def continues(model: nn.Module) -> bool:
    """True if sequences of ``model`` can share the forward pass of a prompt."""
    return all(LAYERS[type(module).__name__].continues for module in stateful(model))


def unadapted(model: nn.Module) -> dict[str, str]:
    """Linear layers of the layers with state of ``model`` that cannot have an adapter, by name: the reason."""
    kinds = {name: LAYERS.get(type(module).__name__) for name, module in model.named_modules()}
    return {f"{name}.{kind.unadapted[0]}": kind.unadapted[1] for name, kind in kinds.items() if kind and kind.unadapted}


def mixing_layers(config: PretrainedConfig) -> int:
    """Number of layers of a decoder in which tokens see each other."""
    kinds = getattr(config, "layer_types", None) or ()
    return config.num_hidden_layers - sum(kind in MIXES_NOTHING for kind in kinds)  # type: ignore[no-any-return]


def adapt(body: nn.Module) -> None:
    """Let the layers with state of ``body`` run per sequence."""
    for module in body.modules():
        if type(module).__name__ == "Zamba2HybridLayer":
            _number_attention(module)
    for module in stateful(body):
        if not isinstance(module, _PerSequence):
            _use_torch(sys.modules[type(module).__module__])
            _compute_exactly(module, LAYERS[type(module).__name__].exact)
            module.__class__ = _derived(type(module))  # type: ignore[arg-type]


def _number_attention(layer: Any) -> None:
    """Give the attention of a hybrid layer of Zamba 2 the index of the layer, by which a cache knows it: transformers
    calls all of them -1, because they share weights."""
    layer.shared_transformer.self_attn.layer_idx = layer.mamba_decoder.layer_idx


def _compute_exactly(layer: Any, parts: tuple[str, str] | None) -> None:
    """Let ``layer`` compute in float32 from the result of its first part to that of its last one: a decay per token
    that is rounded to bfloat16 is off by a half after some hundred tokens."""
    if parts is not None:
        first, last = map(layer.get_submodule, parts)
        first.register_forward_hook(lambda part, args, out: out.float())
        last.register_forward_hook(lambda part, args, out: out.to(part.weight.dtype))


def _use_torch(module: Any) -> None:
    """Replace kernels of other packages in a module of transformers by the torch code that they stand for: none has
    been compared with it here."""
    for name, function in list(vars(module).items()):
        if inspect.isfunction(function) and function.__module__ == module.__name__ and hasattr(function, "__wrapped__"):
            setattr(module, name, inspect.unwrap(function))
    if (step := vars(module).get(_STEP)) is not None and not hasattr(step, "limits"):
        setattr(module, _STEP, _limited(step))


def _limited(step: Any) -> Any:
    """Let the step of Mamba 2 for one token limit the time steps as its code for sequences does."""

    def limited(state: Tensor, hidden: Tensor, dt: Tensor, *args: Any, dt_bias: Tensor, dt_softplus: bool,
                dt_limit: tuple[float, float] | None = None, **kwargs: Any) -> Any:
        if dt_limit is None:
            return step(state, hidden, dt, *args, dt_bias=dt_bias, dt_softplus=dt_softplus, **kwargs)
        limited_dt = softplus(dt + dt_bias.to(dt.dtype)).clamp(*dt_limit)
        return step(state, hidden, limited_dt, *args, dt_bias=None, dt_softplus=False, **kwargs)

    vars(limited)["limits"] = True
    return limited
