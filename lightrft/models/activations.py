"""Estimate of the tensors that a forward pass keeps for its backward pass, from the shape of the model.

Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1) count the activations of a Transformer layer. This is their sum
for the layers of today: flash attention keeps no [T, T] scores but one float32 per head and token (the log-sum-exp of
its row), there is no dropout, norms are RMSNorm computed in float32, and the MLP has a gate.

The sums count what every such layer keeps, and norms of queries and keys. A family with more (norms after a block)
takes more, so a plan that does not fit by these sums does not fit. What a layer with state keeps is not a sum of few
terms, so its own code says it (:mod:`lightrft.models.state_sizes`).
"""
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lightrft.models.state_sizes import StateLayers

_HEAD_NORMS = ("qwen3", "gemma3")  # families whose heads of queries and keys have a norm
_GATED = ("qwen3_5", "qwen3_next")  # families whose queries come with a gate of the output of attention
_WIDE_NORMS = (*_GATED, "gemma")  # families whose norms multiply by their weight in float32
_NO_GATE = ("relu2", "gelu_new", "gelu_fast")  # activations of MLPs that have no gate
INNER = ("intermediate_size", "moe_intermediate_size", "encoder_ffn_dim")  # config's names of widths inside an MLP


class LayerKind(NamedTuple):
    """Layers of one kind, and what they have beside a norm for each of these."""
    layers: int
    attends: bool = True
    state: bool = False
    mlp: bool = True
    dense: bool = False  # its MLP is no mixture, and those of other layers are


class Mixture(NamedTuple):
    """Experts of an MLP: how many a token takes, the width of those that all tokens take, and that of layers without.
    """
    taken: int
    shared: int = 0
    dense: int = 0


@dataclass(frozen=True)
class ModelShape:
    """Widths of a decoder: of the residual stream, of the MLP (of the experts of a token together), of the queries and
    of the keys of all heads. ``towers``: of vision and audio towers; ``vocabulary``: tokens that have a logit."""
    layers: int
    hidden: int
    mlp: int
    queries: int
    keys: int
    heads: int
    towers: "tuple[TowerShape, ...]" = ()
    vocabulary: int = 0
    windows: int = 0  # layers whose tokens see a window alone
    head_norms: bool = False  # queries and keys have a norm
    gated: bool = False  # the output of attention has a gate
    wide_norms: bool = False  # norms multiply by their weight in float32
    mlp_gate: bool = True  # MLPs have a gate
    mixture: Mixture | None = None  # of the MLPs
    ends_alike: bool = False  # selective recomputation takes the product after attention for the last of an MLP
    kinds: tuple[LayerKind, ...] = ()  # of the layers; empty: all attend and have an MLP
    state_layers: "StateLayers | None" = None
    stored: int = 0  # width of the keys in a cache, and of the values; 0: as keys

    @classmethod
    def of(cls, config: "PretrainedConfig") -> "ModelShape | None":
        """Read a Hugging Face config; None if it does not have the usual names."""
        text = config.get_text_config()
        values, kinds = text.to_dict(), getattr(text, "layer_types", None) or ()
        hidden, heads, layers = values.get("hidden_size"), values.get("num_attention_heads"), text.num_hidden_layers
        mlp, family = _mlp_width(values, kinds), values.get("model_type", "")
        if not (hidden and heads and mlp and layers):
            return None
        head = values.get("head_dim") or hidden // heads
        mixture = _mixture(values, kinds, mlp)
        return cls(
            layers, hidden, mlp, heads * head, (values.get("num_key_value_heads") or heads) * head, heads,
            TowerShape.all_of(config) if text is not config else (),
            values.get("vocab_size") or 0, sum(kind.endswith("_attention") and kind not in _WHOLE for kind in kinds),
            family.startswith(_HEAD_NORMS) or bool(values.get("use_qk_norm")), family.startswith(_GATED),
            family.startswith(_WIDE_NORMS),
            _activation(values) not in _NO_GATE, mixture, heads * head in _inner(values),
            *_kinds_of(config, kinds or ["full_attention"] * layers,
                       _mixes(values, kinds, layers) if mixture else [True] * layers), stored=_stored(values, heads))

    @property
    def attending(self) -> int:
        """Number of layers with keys and values."""
        return sum(kind.layers * kind.attends for kind in self.all_kinds)

    @property
    def all_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of all layers."""
        return self.kinds or (LayerKind(self.layers), )

    def width(self, kind: LayerKind) -> int:
        """Return the width of the MLP of a layer; 0 for none."""
        return (self.mixture.dense if kind.dense and self.mixture else self.mlp) * kind.mlp

    @property
    def attention(self) -> float:
        """Cost of causal attention: a pass over n tokens multiplies as one over ``n + attention * n**2`` tokens that
        attend to nothing. Layers with a window do not count."""
        projections = self.hidden * ((2 + self.gated) * self.queries + 2 * self.keys)
        mlps = sum(kind.layers * self.width(kind) for kind in self.all_kinds)
        states = self.state_layers.costs().multiplications if self.state_layers else 0
        others = self.hidden * ((2 + self.mlp_gate) * mlps + self.vocabulary) + states
        return (self.attending - self.windows) * self.queries / (self.attending * projections + others)

    def kv_bytes(self, itemsize: int) -> int:
        """Return the bytes of keys and values of one token over all layers."""
        return 2 * self.attending * (self.stored or self.keys) * itemsize

    def cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of the keys and values of ``tokens``, and of the states of a prompt and its response, with
        convolutions in float32."""
        return self.kv_bytes(itemsize) * tokens + 2 * (self.state_layers.costs().states if self.state_layers else 0)

    def head_gradient(self, itemsize: int) -> int:
        """Return the bytes of the gradient of a trained head in a backward pass: summed up in float32, then cast."""
        return self.vocabulary * self.hidden * (4 + itemsize * (itemsize < 4))


_WHOLE = ("full_attention", "linear_attention")  # kinds of layers that see no window


def _inner(values: dict[str, Any]) -> frozenset[int]:
    """Return the widths inside the MLPs."""
    return frozenset(values[name] for name in INNER if values.get(name))


def _stored(values: dict[str, Any], heads: int) -> int:
    """Return the width in a cache of the keys of all heads, and of the values, which are filled up to it: of multi-head
    latent attention, and of Zamba 2, whose attention reads two streams; 0 for another one."""
    if "qk_nope_head_dim" in values:
        return heads * int(max(values["qk_nope_head_dim"] + values["qk_rope_head_dim"], values.get("v_head_dim") or 0))
    return int(values.get("attention_head_dim") or 0) * int(values.get("num_key_value_heads") or heads)


def _activation(values: dict[str, Any]) -> str:
    """Return the name of the activation of an MLP."""
    return str(values.get("mlp_hidden_act") or values.get("hidden_act") or "")


def _shared_width(values: dict[str, Any]) -> int:
    """Return the width of the experts that all tokens take."""
    return int(values.get("shared_expert_intermediate_size") or values.get("shared_intermediate_size") or 0)


def _mlp_width(values: dict[str, Any], kinds: Sequence[str]) -> int:
    """Return the width of the MLP of a layer, of the experts of a token together; 0 for none."""
    width = int(values.get("intermediate_size") or 0)
    if not _experts(values, kinds):  # the config may have widths of experts, the model has none
        return width if "mlp" in kinds else _shared_width(values) or width
    taken = int(values.get("num_experts_per_tok") or 1)
    return int(values.get("moe_intermediate_size") or width) * taken + _shared_width(values)


def _experts(values: dict[str, Any], kinds: Sequence[str]) -> bool:
    """Return True if MLPs have experts to choose from."""
    counts = [
        values[name] for name in ("num_experts", "num_local_experts", "n_routed_experts")
        if values.get(name) is not None
    ]
    chosen = values.get("num_experts_per_tok") and max(counts, default=2) > 1
    return bool(chosen) and any(_mixes(values, kinds, values.get("num_hidden_layers") or len(kinds)))


def _mixture(values: dict[str, Any], kinds: Sequence[str], mlp: int) -> Mixture | None:
    """Return the experts, if there are any."""
    if not _experts(values, kinds):
        return None
    return Mixture(values["num_experts_per_tok"], _shared_width(values), values.get("intermediate_size") or mlp)


def _mixes(values: dict[str, Any], kinds: Sequence[str], layers: int) -> list[bool]:
    """Return for each layer whether a mixture takes the place of its MLP, by the names that configs have for it."""
    if {"mlp", "moe"} & {*kinds}:
        return [kind == "moe" for kind in kinds]
    if names := values.get("mlp_layer_types"):
        return [name != "dense" for name in names]
    period, offset = values.get("expert_layer_period") or 1, values.get("expert_layer_offset") or 0
    step, alone = values.get("decoder_sparse_step") or 1, values.get("mlp_only_layers") or ()
    first = values.get("first_k_dense_replace") or 0
    return [i >= first and i % period == offset % period and (i + 1) % step == 0 and i not in alone
            for i in range(layers)]  # yapf: disable


def _kinds_of(config: "PretrainedConfig", names: Sequence[str],
              mixes: Sequence[bool]) -> "tuple[tuple[LayerKind, ...], StateLayers | None]":
    """Return the kinds of the layers ``names``, and the layers with state; nothing if all attend and are alike.
    ``mixes``: whether their MLPs are mixtures, where some are."""
    attend = {name for name in names if name in ("attention", "hybrid") or name.endswith("_attention")}
    attend -= {"linear_attention"}
    states = not attend >= {*names} - {"hybrid"} or "hybrid" in names
    if not states and all(mixes):
        return (), None
    from lightrft.models.state_sizes import StateLayers  # it loads torch
    from lightrft.models.stateful import MIXES_NOTHING
    apart = {*names} & MIXES_NOTHING  # then an MLP is a layer of its own
    counts, hybrids = Counter(zip(names, mixes)), "hybrid" in names  # which alone have an MLP
    kinds = (LayerKind(count, name in attend, name not in attend | apart or name == "hybrid",
                       name in apart if apart else name == "hybrid" or not hybrids, not mixed)
             for (name, mixed), count in counts.items())  # yapf: disable
    return tuple(kinds), StateLayers.of(config, _inner(config.get_text_config().to_dict())) if states else None


@dataclass(frozen=True)
class TowerShape:
    """Widths of a tower. A patch (of a sound: a frame) of ``pixels`` numbers is one position of it; the decoder gets a
    token for ``per_token`` of them. ``part``: its name for ``--freeze_prefix``."""
    part: str
    layers: int
    hidden: int
    mlp: int
    heads: int
    per_token: int
    pixels: int

    @classmethod
    def all_of(cls, config: "PretrainedConfig") -> "tuple[TowerShape, ...]":
        """Read the towers of a Hugging Face config that media go through; those of other families, and with other names
        than the usual ones, are left out."""
        from lightrft.models.actor_modality import FAMILIES, part_of  # they load torch
        family, configs = FAMILIES.get(config.model_type), {"visual": "vision_config", "audio": "audio_config"}
        kinds = {part_of(kind): tower for kind, tower in reversed(family.towers.items())} if family else {}
        found = (cls._of(part, vars(config)[configs[part]], tower.per_token(config)) for part, tower in kinds.items())
        return tuple(one for one in found if one is not None)

    @classmethod
    def _of(cls, part: str, tower: "PretrainedConfig", per_token: int) -> "TowerShape | None":
        values = tower.to_dict()

        def first(*names: str) -> int:
            return int(next((values[name] for name in names if isinstance(values.get(name), (int, float))), 0))

        hidden = first("embed_dim", "d_model", "hidden_size")
        mlp = first("encoder_ffn_dim", "intermediate_size") or int(hidden * first("mlp_ratio"))
        side = values.get("patch_size") or 0
        area = int(side[0] * side[1] if isinstance(side, (list, tuple)) else side**2)
        pixels = 2 * first("num_mel_bins") or 3 * area * (first("temporal_patch_size") or 1)
        shape = cls(part, first("depth", "num_hidden_layers", "encoder_layers"), hidden, mlp,
                    first("num_heads", "num_attention_heads", "encoder_attention_heads"), per_token, pixels)
        return shape if all((shape.layers, hidden, mlp, shape.heads)) else None

    def layer(self, patches: int, width: int) -> float:
        """Bytes kept by one layer, of elements of ``width`` bytes: the inputs and outputs of two norms, queries, keys,
        values and the output of the attention, and two tensors of the MLP. One with a gate keeps more."""
        return patches * (width * (8 * self.hidden + 2 * self.mlp) + 4 * self.heads)

    def kept(self, patches: int, width: int, recompute: bool | str = False) -> float:
        """Bytes kept from the forward to the backward pass by a tower that is trained: by the layers, and the pixels.

        With ``recompute`` a layer keeps its input and, if ``selective``, results. Measured on tiny towers of 8 layers,
        this is 0.5 to 1 of what autograd saves.
        """
        again = patches * width * self.hidden + self._results(patches, width, recompute)
        return self.layers * (again if recompute else self.layer(patches, width)) + patches * width * self.pixels

    def _results(self, patches: int, width: int, recompute: bool | str) -> float:
        kept = width * (5 * self.hidden + self.mlp) + 4 * self.heads
        return patches * kept * (recompute == "selective")

    def backward(self, patches: int, width: int, recompute: bool | str = False) -> float:
        """Bytes in the backward pass: those kept, and what a layer computes again."""
        again = self.layer(patches, width) - self._results(patches, width, recompute)
        return self.kept(patches, width, recompute) + again * bool(recompute)


class _OfState(NamedTuple):
    """Bytes per token of one layer with state: kept, and of the results of its linear layers."""
    kept: float
    results: float


@dataclass(frozen=True)
class Activations:
    """Bytes of activations of one forward and backward pass over ``tokens`` tokens.

    Args:
        width: bytes of an element: 2 in bfloat16, 4 in float32.
        recompute: ``--gradient_checkpointing``: a layer is computed again in the backward pass, from its input alone or
            from this and the results of its products and its attention.
        frozen: the weights of the norms are not trained (LoRA).
        fused: Liger's kernels, which compute the norms and the activation of the MLP again.
        repeated: attention repeats the keys and values of grouped heads, and keeps the copies.
    """
    shape: ModelShape
    tokens: int
    width: int
    recompute: bool | str = False
    frozen: bool = False
    fused: bool = False
    repeated: bool = False

    def _layer(self, kind: LayerKind) -> float:
        """Kept by a layer: a norm before each part, queries, keys, values and the output of attention, what a state
        needs, and the MLP."""
        s, w = self.shape, self.width
        attention: float = w * ((2 + 2 * s.gated) * s.queries + 2 *
                                (s.queries if self.repeated else s.keys)) + 4 * s.heads
        attention += self._norm(s.queries + s.keys) * s.head_norms
        norms = (self._norm(s.hidden) + w * s.hidden) * ((kind.attends or kind.state) + kind.mlp)
        return self.tokens * (norms + attention * kind.attends + self._of_state(kind).kept + self._mlp(kind))

    def _mlp(self, kind: LayerKind) -> float:
        """Kept per token by the MLP of a layer: gate, its activation, up, their product. Experts keep what they read
        and return too, and experts that are not trained neither that nor the product."""
        s, mixture = self.shape, None if kind.dense else self.shape.mixture
        alone, routed = s.width(kind), 0
        tensors = 4 - self.fused if s.mlp_gate else 2
        if mixture and kind.mlp:
            alone, routed = mixture.shared, s.mlp - mixture.shared
        kept = tensors * alone + (tensors - self.frozen) * routed
        if routed and mixture:
            unread = self.frozen and not mixture.shared  # the norm before them, whose result no weight needs
            kept += s.hidden * (mixture.taken * (2 - self.frozen) - unread)
        return self.width * kept

    def _of_state(self, kind: LayerKind) -> "_OfState":
        """Kept per token by the layer with state of a layer, if it has one."""
        if not kind.state or self.shape.state_layers is None:
            return _OfState(0, 0)
        found = self.shape.state_layers.costs(self.width, self.frozen)
        return _OfState(found.kept / found.layers, found.results / found.layers)

    def _norm(self, size: int) -> float:
        """Kept by a norm of ``size`` numbers, per token: its input in float32, and the normalised one for the gradient
        of the weight. Its output belongs to the layer that reads it."""
        normalized = 4 if self.shape.wide_norms else self.width
        return size * (self.width if self.fused else 4 + normalized * (not self.frozen))

    @property
    def kept(self) -> float:
        """Kept from the forward to the backward pass: by the layers, by the last norm and by the head's input."""
        s, w = self.shape, self.width
        # the first norm reads embeddings, which are not trained; where all attend, adapters keep as much, uncounted
        begins = self.frozen and not self.recompute and s.state_layers is not None
        end = self.tokens * (self._norm(s.hidden) * (1 - begins) + w * s.hidden)
        again = self.tokens * w * s.hidden
        per_layer = {kind: again + self._results(kind) if self.recompute else self._layer(kind) for kind in s.all_kinds}
        return end + sum(kind.layers * kept for kind, kept in per_layer.items())

    def _results(self, kind: LayerKind) -> float:
        """Kept of the results of a layer that is computed again: of attention and its products, gate and up."""
        s, w = self.shape, self.width
        attention = w * ((2 + s.gated) * s.queries + 2 * s.keys + s.hidden * (not s.ends_alike)) + 4 * s.heads
        kept = attention * kind.attends + self._of_state(kind).results + (1 + s.mlp_gate) * w * s.width(kind)
        return self.tokens * kept * (self.recompute == "selective")

    @property
    def backward(self) -> float:
        """Peak of the backward pass: what is kept, what a layer computes again, and the gradient of the MLP's product.
        """
        again = max(max(0.0, self._layer(kind) - self._results(kind)) for kind in self.shape.all_kinds)
        return self.kept + again * bool(self.recompute) + self.tokens * self.width * self.shape.mlp

    @property
    def forward(self) -> float:
        """Peak of a pass without gradients: the residual stream, its norm, and three tensors of the MLP."""
        s = self.shape
        return self.tokens * self.width * (2 * s.hidden + 3 * s.mlp)
