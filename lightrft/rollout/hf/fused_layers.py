"""Decoder layers of a decode step with fewer kernels: one product for queries, keys and values, one for gate and up.

A product of a few rows takes a GPU less time than its launch takes the host. The joined weights are copies, made when a
generation begins, with the deltas of LoRA adapters added; the trainer's weights are only read. The numbers are those of
transformers' layers to rounding; a trial shows it before they are used.
"""
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightrft.models.lora import merged_weight
from lightrft.rollout.hf.module_calls import Inputs, ModuleCalls, Step

Rotation = Tensor  # [T, 1, 1, 2, 2, d / 2]: the matrix of each pair of numbers of a head
_MODULES = {"input_layernorm", "self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
            "self_attn.o_proj", "post_attention_layernorm", "mlp", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
            "mlp.act_fn"}  # yapf: disable
_HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}
_LAYERS = {f"{family}DecoderLayer" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")}  # one table of positions
_CLOSE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the largest logit of the trial


def _eps(module: Any) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


class FusedNorm:
    """An RMSNorm in one kernel."""

    def __init__(self, module: Any) -> None:
        self.module, self.eps = module, _eps(module)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of ``x`` [..., H]."""
        return F.rms_norm(x, x.shape[-1:], self.module.weight, self.eps)


class FusedRotary:
    """The rotary tables of a step as the matrices that turn a head: [T, 1, 1, 2, 2, d / 2]."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Rotation:
        """Return the matrices of the positions of a step."""
        cos, sin = (table[0].unflatten(-1, (2, -1)) for table in self.module(*args, **kwargs))
        return torch.stack([cos[:, 0], -sin[:, 0], sin[:, 1], cos[:, 1]], 1).unflatten(1, (2, 2))[:, None, None]


class FusedLayer:
    """A decoder layer in the form of those of Llama and Qwen: [1, T, H] -> [1, T, H].

    ``weights``: the joined ones by name; absent until :meth:`refresh`. Queries, keys and values of a group of heads
    stand together, so that a product of the attention takes them as they are.
    """

    def __init__(self, layer: Any) -> None:
        self.attention, self.mlp = layer.self_attn, layer.mlp
        self.norm, self.mlp_norm = FusedNorm(layer.input_layernorm), FusedNorm(layer.post_attention_layernorm)
        self.dim, self.groups = self.attention.head_dim, self.attention.k_proj.out_features // self.attention.head_dim
        self.weights: dict[str, Tensor] = {}
        self.asks: tuple[Any, ...] = ()  # index of the layer, scaling and window, as transformers passes them

    @staticmethod
    def takes(layer: nn.Module) -> bool:
        """Return True for a layer with the modules of Llama's or Qwen's, adapters aside."""
        names = {name for name, _ in layer.named_modules() if ".lora_" not in name and not name.endswith("base_layer")}
        return type(layer).__name__ in _LAYERS and names - {""} in (_MODULES, _MODULES | _HEAD_NORMS)

    @property
    def copied(self) -> list[Any]:
        """Linear layers whose weights are copied."""
        a, m = self.attention, self.mlp
        merged = [part for part in (a.o_proj, m.down_proj) if not isinstance(part, nn.Linear)]
        return [a.q_proj, a.k_proj, a.v_proj, m.gate_proj, m.up_proj, *merged]

    def joined(self) -> dict[str, Tensor]:
        """Compute the weights of the products; a view where nothing is joined or added."""
        a, m = self.attention, self.mlp
        grouped = [merged_weight(part).view(self.groups, -1, self.dim, part.in_features)
                   for part in (a.q_proj, a.k_proj, a.v_proj)]  # yapf: disable
        weights = {"qkv": torch.cat(grouped, 1).flatten(0, 2), "out": merged_weight(a.o_proj),
                   "gate_up": torch.cat([merged_weight(m.gate_proj), merged_weight(m.up_proj)]),
                   "down": merged_weight(m.down_proj)}  # yapf: disable
        if a.q_proj.bias is not None:
            biases = [part.bias.view(self.groups, -1, self.dim) for part in (a.q_proj, a.k_proj, a.v_proj)]
            weights["qkv_bias"] = torch.cat(biases, 1).flatten()
        if hasattr(a, "q_norm"):
            queries = grouped[0].shape[1]
            weights["heads"] = torch.stack([a.q_norm.weight] * queries + [a.k_norm.weight])
        return weights

    def refresh(self) -> None:
        """Compute the joined weights; those of an earlier call stay where they are."""
        for name, weight in self.joined().items():
            if name in self.weights and self.weights[name] is not weight:
                self.weights[name].copy_(weight)
            else:
                self.weights[name] = weight

    def __call__(self, hidden: Tensor, *, position_embeddings: Rotation, kv_cache: Any, **unused: Any) -> Tensor:
        """Run a step of T tokens, in place; ``kv_cache`` attends."""
        x, weights = hidden[0], self.weights
        packed = F.linear(self.norm(x), weights["qkv"], weights.get("qkv_bias"))
        packed = packed.view(len(x), self.groups, -1, self.dim)
        self._turn(packed[:, :, :-1], position_embeddings)
        out = kv_cache.attend_packed(*self.asks, packed)
        _add(x, out, weights["out"], self.attention.o_proj.bias)
        gate, up = F.linear(self.mlp_norm(x), weights["gate_up"]).chunk(2, -1)
        _add(x, self.mlp.act_fn(gate).mul_(up), weights["down"], self.mlp.down_proj.bias)
        return hidden

    def _turn(self, heads: Tensor, rotation: Rotation) -> None:
        """Rotate queries and keys [T, groups, heads, d] in place, with their norms where the family has any."""
        values = heads
        if "heads" in self.weights:
            values = F.rms_norm(heads, (self.dim, ), None, _eps(self.attention.q_norm)) * self.weights["heads"]
        terms = values.unflatten(-1, (2, -1)).unsqueeze(3) * rotation
        torch.sum(terms, -2, out=heads.unflatten(-1, (2, -1)))


def _add(x: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Add ``inputs @ weight.T + bias`` to ``x``; CUDA would copy ``x`` first if the sum were another tensor."""
    if bias is None:
        x.addmm_(inputs, weight.t())
    else:
        x += F.linear(inputs, weight, bias)


class _Trial:
    """View of a cache that stores nothing; its output depends on queries, keys and values."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None,
               softcap: float | None = None) -> Tensor:
        """Attend as the packed attention asks."""
        self.calls.append((layer, scaling, window, softcap))
        return (query + (key + 2 * value).repeat_interleave(query.shape[1] // key.shape[1], 1)).transpose(1, 2)

    def attend_packed(self, layer: int, scaling: float | None, window: int | None, packed: Tensor) -> Tensor:
        """Attend as :class:`FusedLayer` asks."""
        return (packed[:, :, :-2] + packed[:, :, -2:-1] + 2 * packed[:, :, -1:]).flatten(1)


class FusedCalls(ModuleCalls):
    """The calls of a decode step, with fused ``layers``; :meth:`refresh` before the first and after every update."""

    def __init__(self, steps: list[Step], constants: list[Any], layers: list[FusedLayer]) -> None:
        super().__init__(steps, constants)
        self.layers = layers

    @torch.no_grad()
    def refresh(self) -> tuple[int, ...]:
        """Compute the joined weights of all layers; return their addresses."""
        for layer in self.layers:
            layer.refresh()
        return tuple(weight.data_ptr() for layer in self.layers for weight in layer.weights.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the copies: of the weights that are joined, and of those that an adapter is added to."""
        parts = [part for layer in self.layers for part in layer.copied]
        return sum(part.in_features * part.out_features * part.weight.itemsize for part in parts)

    def release(self) -> None:
        """Free the joined weights."""
        for layer in self.layers:
            layer.weights.clear()


def _fused_steps(calls: ModuleCalls) -> FusedCalls | None:
    """Replace the layers, the rotary tables and the last norm of ``calls``; None where layers have another form."""
    layers = [step for step in calls.steps if "position_embeddings" in step.kwargs]
    tables = {step.kwargs["position_embeddings"] for step in layers}
    if len(tables) != 1 or not all(FusedLayer.takes(step.module) for step in layers):
        return None
    index = tables.pop() - len(Inputs) - len(calls.constants)  # of the call that made the tables
    if index < 0:
        return None
    layer_of = {id(step.module): FusedLayer(step.module) for step in layers}
    rotary = calls.steps[index].module
    made: dict[int, Any] = {id(rotary): FusedRotary(rotary), **layer_of}
    for step in calls.steps:
        if type(step.module).__name__.endswith("RMSNorm"):
            made[id(step.module)] = FusedNorm(step.module)
    steps = [step._replace(module=made.get(id(step.module), step.module)) for step in calls.steps]
    return FusedCalls(steps, calls.constants, list(layer_of.values()))


@torch.no_grad()
def find_fused(calls: Any, device: torch.device, most: int) -> FusedCalls | None:
    """Return ``calls`` with fused layers if a trial of them gives the same logits to rounding, else None; also where
    their copies take more than ``most`` bytes."""
    fused = _fused_steps(calls) if isinstance(calls, ModuleCalls) else None
    if fused is None or fused.nbytes > most:
        return None
    tokens, positions = torch.arange(3, device=device)[None], torch.tensor([[3, 0, 1]], device=device)
    expected = calls(tokens, positions, view := _Trial()).float()
    if len(view.calls) != len(fused.layers) or any(softcap is not None for *_, softcap in view.calls):
        return None
    for layer, (*asks, _) in zip(fused.layers, view.calls):
        layer.asks = tuple(asks)
    fused.refresh()
    bound = _CLOSE.get(fused.layers[0].weights["qkv"].dtype, 0.0) * expected.abs().max()
    same = bool((fused(tokens, positions, view).float() - expected).abs().max() <= bound)
    fused.release()
    return fused if same else None
