"""Bytes of a sequence in the cache of the HF engine, and the number of sequences for which there is room."""
import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from lightrft.models.actor_modality import ActorModality
from lightrft.models.packing_check import identity, small_packed
from lightrft.models.state_rows import Layer
from lightrft.models.stateful import continues
from lightrft.rollout.hf.states import Shapes, shapes_after_a_token
from lightrft.utils.errors import UserError

_PROBES: "dict[str, LayerProbe | None]" = {}  # of small copies, by their configs
_LIVE_PROMPTS = 2.5  # prompt slots, over rows / samples per prompt: a prompt stays until its longest sample ends


@dataclass(frozen=True)
class KVSpec:
    """Cache of one token, (key, value) x heads x dim in each of the ``layers`` with attention, which are named by their
    index in the model; and ``states``, what each layer with state keeps of a sequence, however long that is.

    ``continues``: these layers take up a state with several tokens; else with one.
    """
    layers: tuple[int, ...]
    heads: int
    dim: int
    dtype: torch.dtype
    states: dict[int, Shapes] = field(default_factory=dict)
    continues: bool = True

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return len(self.layers) * 2 * self.heads * self.dim * self.dtype.itemsize

    @property
    def tokens_per_sequence(self) -> int:
        """Tokens whose keys and values take as many bytes as the states of a sequence."""
        states = (state for shapes in self.states.values() for state in shapes.values())
        return -(-sum(math.prod(shape) * dtype.itemsize for shape, dtype in states) // self.bytes_per_token)


class LayerProbe:
    """View of a cache that stores nothing: it records what each attention layer would, and returns its queries."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, torch.dtype]] = {}
        self.states: dict[int, Shapes] = {}
        self.shared: set[int] = set()  # layers that attended more than once

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None,
               softcap: float | None = None) -> Tensor:
        """Record the layer's shape and dtype."""
        self.shared |= {layer} & self.shapes.keys()
        self.shapes[layer] = (key.shape[1], key.shape[3], value.dtype)
        return query.transpose(1, 2)

    def mix(self, layer_idx: int, hidden: Tensor, layer: Layer) -> list[Tensor]:
        """Record what a layer with state keeps; every token is the first of a sequence."""
        outs, self.states[layer_idx] = shapes_after_a_token(hidden, layer)
        return outs


@torch.no_grad()
def probed(model: Any, modality: ActorModality) -> LayerProbe:
    """Run one token through ``model`` and record what its layers would cache."""
    probe = LayerProbe()
    zero = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    modality.logits(model, 0, input_ids=zero, position_ids=zero, attention_mask=None, use_cache=False, kv_cache=probe)
    return probe


def check_layers(probe: LayerProbe, family: str) -> None:
    """Refuse the model type ``family``, whose layers showed ``probe`` what the cache has no place for.

    Raises:
        UserError: with the other engines.
    """
    reason, layers = "", sorted(probe.shapes)
    if probe.shared:
        reason = "attends more than once under one index, and the cache has one place for each"
    elif len({*probe.shapes.values()}) != 1 or not probe.states and layers != [*range(len(layers))]:
        reason = "needs other keys in some layers than in others, and the cache has the same in all"
    if reason:
        raise UserError(f"--engine_type hf: model type {family!r} {reason}. Take --engine_type vllm or sglang")


def check_decoder(config: PretrainedConfig) -> None:
    """Refuse a text config whose layers the cache has no place for; what a small copy shows is stored.

    Raises:
        UserError: of :func:`check_layers`.
    """
    known = identity(config)
    if known not in _PROBES:
        model, modality = small_packed(config), ActorModality()
        if model is not None:
            modality.adapt(model)
        _PROBES[known] = None if model is None else probed(model, modality)
    if (probe := _PROBES[known]) is not None:
        check_layers(probe, config.model_type)


def probe_spec(model: Any, modality: ActorModality) -> KVSpec:
    """Find what the layers of ``model`` cache.

    Raises:
        UserError: of :func:`check_layers`.
    """
    probe = probed(model, modality)
    check_layers(probe, model.config.get_text_config().model_type)
    return KVSpec(tuple(sorted(probe.shapes)), *next(iter(probe.shapes.values())), probe.states, continues(model))


@dataclass(frozen=True)
class KVPlan:
    """Cache of ``prompts`` prompt slots of ``prompt_len`` tokens, and ``slots`` response rows of ``length`` tokens."""
    prompts: int
    prompt_len: int
    slots: int
    length: int

    @classmethod
    def fit(cls, tokens: int, sizes: list[int], prompt_len: int, length: int, most: int = 0,
            state: int = 0) -> "KVPlan":
        """Plan the most rows that fit in ``tokens`` (perhaps 0), for prompts of ``sizes`` samples each; at most
        ``most``, if that is not 0. ``state``: tokens that the states of a prompt or a row take the place of."""
        mean = sum(sizes) / max(1, int(np.count_nonzero(sizes))) or 1

        def plan(slots: int) -> KVPlan:
            live = int(np.ceil(_LIVE_PROMPTS * slots / mean))
            return cls(min(live, slots, len(sizes)), prompt_len, slots, length)

        rows = range(1, min(max(1, sum(sizes)), most or sum(sizes)) + 1)
        return plan(bisect_right(rows, tokens, key=lambda slots: plan(slots).tokens_with(state)))

    @property
    def tokens(self) -> int:
        """Capacity in tokens."""
        return self.tokens_with(0)

    def tokens_with(self, state: int) -> int:
        """Capacity in tokens, with ``state`` more for each prompt and each row."""
        return self.prompts * (self.prompt_len + state) + self.slots * (self.length + state)
