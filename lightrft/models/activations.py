"""Estimate of the tensors that a forward pass keeps for its backward pass, from the shape of the model.

Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1) count the activations of a Transformer layer. This is their sum
for the layers of today: flash attention keeps no [T, T] scores but one float32 per head and token (the log-sum-exp of
its row), there is no dropout, norms are RMSNorm computed in float32, and the MLP has a gate.

The sums count what every such layer keeps, and norms of queries and keys. A family with more (norms after a block)
takes more, so a plan that does not fit by these sums does not fit.
"""
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_HEAD_NORMS = ("qwen3", "gemma3")  # families whose heads of queries and keys have a norm


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
    keyless: int = 0  # layers without keys and values: with a state, or an MLP alone
    states: int = 0  # bytes of the states of a sequence

    @classmethod
    def of(cls, config: "PretrainedConfig") -> "ModelShape | None":
        """Read a Hugging Face config; None if it does not have the usual names."""
        values = config.get_text_config().to_dict()
        hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
        width = values.get("moe_intermediate_size") or values.get("intermediate_size")
        if not (hidden and heads and width and values.get("num_hidden_layers")):
            return None
        head = values.get("head_dim") or hidden // heads
        experts = values.get("num_experts_per_tok") or 1
        return cls(values["num_hidden_layers"], hidden, width * experts, heads * head,
                   (values.get("num_key_value_heads") or heads) * head, heads,
                   TowerShape.all_of(config) if config.get_text_config() is not config else (),
                   values.get("vocab_size") or 0,
                   sum(kind != "full_attention" for kind in values.get("layer_types") or ()),
                   values.get("model_type", "").startswith(_HEAD_NORMS) or bool(values.get("use_qk_norm")),
                   *_states_of(config))

    @property
    def attention(self) -> float:
        """Cost of causal attention: a pass over n tokens multiplies as one over ``n + attention * n**2`` tokens that
        attend to nothing. Layers with a window do not count."""
        weights = self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.mlp)
        return (self.layers - self.windows) * self.queries / (self.layers * weights + self.hidden * self.vocabulary)

    def kv_bytes(self, itemsize: int) -> int:
        """Return the bytes of keys and values of one token over all layers."""
        return 2 * (self.layers - self.keyless) * self.keys * itemsize

    def cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of the keys and values of ``tokens``, and of the states of a prompt and its response."""
        return self.kv_bytes(itemsize) * tokens + 2 * self.states

    def head_gradient(self, itemsize: int) -> int:
        """Return the bytes of the gradient of a trained head in a backward pass: summed up in float32, then cast."""
        return self.vocabulary * self.hidden * (4 + itemsize * (itemsize < 4))


def _states_of(config: "PretrainedConfig") -> tuple[int, int]:
    """Return the number of layers without keys, and the bytes of the states of a sequence."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    attending = sum(kind.endswith("_attention") and kind != "linear_attention" for kind in kinds)
    if attending == len(kinds):
        return 0, 0
    from lightrft.models.state_sizes import state_bytes  # it loads torch
    return len(kinds) - attending - list(kinds).count("hybrid"), state_bytes(config)


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

    @property
    def layer(self) -> float:
        """Kept by one layer: 2 norms, queries, keys, values, the output of the attention, and the MLP."""
        s, w = self.shape, self.width
        attention = w * (2 * s.queries + 2 * (s.queries if self.repeated else s.keys)) + 4 * s.heads
        mlp = w * s.mlp * (3 if self.fused else 4)  # gate, its activation, up, their product
        heads = self._norm(s.queries + s.keys) * s.head_norms
        return self.tokens * (2 * (self._norm(s.hidden) + w * s.hidden) + heads + attention + mlp)

    def _norm(self, size: int) -> float:
        """Kept by a norm of ``size`` numbers, per token: its input in float32, and the normalised one for the gradient
        of the weight. Its output belongs to the layer that reads it."""
        return size * (self.width if self.fused else 4 + self.width * (not self.frozen))

    @property
    def kept(self) -> float:
        """Kept from the forward to the backward pass: by the layers, by the last norm and by the head's input."""
        s, w = self.shape, self.width
        per_layer = self.tokens * w * s.hidden + self._results if self.recompute else self.layer
        return s.layers * per_layer + self.tokens * (self._norm(s.hidden) + w * s.hidden)

    @property
    def _results(self) -> float:
        """Kept of the results of a layer that is computed again: of attention and its products, gate and up."""
        s, w = self.shape, self.width
        kept = w * (2 * s.queries + 2 * s.keys + s.hidden + 2 * s.mlp) + 4 * s.heads
        return self.tokens * kept * (self.recompute == "selective")

    @property
    def backward(self) -> float:
        """Peak of the backward pass: what is kept, what a layer computes again, and the gradient of the MLP's product.
        """
        again = max(0.0, self.layer - self._results) * bool(self.recompute)
        return self.kept + again + self.tokens * self.width * self.shape.mlp

    @property
    def forward(self) -> float:
        """Peak of a pass without gradients: the residual stream, its norm, and three tensors of the MLP."""
        s = self.shape
        return self.tokens * self.width * (2 * s.hidden + 3 * s.mlp)
