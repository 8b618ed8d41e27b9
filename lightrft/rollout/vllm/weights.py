"""Transfer of the trainer's weights to vLLM's model in this process: every weight, or the LoRA adapters alone."""
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, get_args, TYPE_CHECKING

import torch
from torch import nn, Tensor
from transformers import PretrainedConfig

from lightrft.models.towers import config_value
from lightrft.rollout.weight_sync.sync import Shapes
from lightrft.utils.errors import UserError

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


def is_borrowed(model: nn.Module) -> bool:
    """True if vLLM runs the code that transformers has for this model."""
    return f"{type(model).__module__}.".startswith("vllm.model_executor.models.transformers.")


def tie_head(model: nn.Module) -> None:
    """Let the head read the embedding's weight: for models that are tied although their folder holds a copy of the
    head (vLLM then gives the head a separate weight, which no update would reach)."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    tables = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    heads = [layer for layer in tables if isinstance(layer, ParallelLMHead)]
    if len(heads) == 1 and len(tables) == 2:
        heads[0].tie_weights(next(table for table in tables if table is not heads[0]))


def keep_expert_layout(model: nn.Module) -> None:
    """Let joined experts be read as the trainer holds them, which checkpoints of some families (Qwen3-VL) transpose."""
    for layer in model.modules():
        if getattr(layer, "is_fused_checkpoint_transposed", False):
            layer.is_fused_checkpoint_transposed = False  # type: ignore[assignment]


def derived_layers(model: nn.Module) -> list[nn.Module]:
    """Layers that compute with values derived from their weights: quantized, packed, the experts of a MoE, MLA.

    Such weights cannot be filled in place.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    return [layer for layer in model.modules()
            if isinstance(layer, MLAAttention) or not _has_plain_method(layer)
            or any(not parameter.numel() for parameter in layer.parameters(recurse=False))]  # yapf: disable


def _has_plain_method(layer: nn.Module) -> bool:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    method = getattr(layer, "quant_method", None)  # that of experts is a module, and not in vars(layer)
    return (not isinstance(method, QuantizeMethodBase)
            or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))


def are_experts(layers: Iterable[nn.Module]) -> bool:
    """True if all ``layers`` are experts of a MoE without quantization, whose weights vLLM lays out for its kernels."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    return all(isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod) for layer in layers)


def in_plain_layers(model: nn.Module, derived: Iterable[nn.Module], shapes: Shapes) -> Shapes:
    """Weights of ``shapes`` (by HF name) whose layer, by the name vLLM has for it, is none of ``derived``: no loader of
    a :func:`derived layer <derived_layers>` has to be called to see where they go."""
    fused = {one: name for name, some in getattr(model, "packed_modules_mapping", {}).items() for one in some}
    layers, hidden = dict(model.named_modules()), set(derived)

    def layer_of(name: str) -> nn.Module | None:
        above, _, own = name.rpartition(".")[0].rpartition(".")
        return layers.get(f"{above}.{fused.get(own, own)}")

    return {name: shape for name, shape in shapes.items() if layer_of(name) not in {None, *hidden}}


_INNER_TOWER = {"model.vision_tower.": "model.vision_tower.vision_model."}  # of CLIP and SigLIP
_NO_MAPPER = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.",
              "model.": ""}  # yapf: disable
_JOINED_EXPERTS = {".router.weight": ".router.layer.weight", ".experts.gate_up_proj": ".input_linear.weight",
                   ".experts.down_proj": ".output_linear.weight"}  # of Granite  # yapf: disable


def under_native_names(model: nn.Module, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of ``stream`` under the names that vLLM's loader of ``model`` reads, which for some
    models are older than those of transformers' modules."""
    modules, prefixes = {name for name, _ in model.named_modules()}, {}
    suffixes = _JOINED_EXPERTS if type(model).__name__.startswith("GraniteMoe") else {}
    if "vision_tower.vision_model" in modules:
        prefixes = _INNER_TOWER
    elif "language_model.lm_head" in modules and not hasattr(model, "hf_to_vllm_mapper"):  # Qwen2-Audio
        prefixes = _NO_MAPPER
    for name, tensor in stream:
        name = next((new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old)), name)
        yield next((name.removesuffix(old) + new for old, new in suffixes.items() if name.endswith(old)), name), tensor


def unused_prefixes(config: PretrainedConfig) -> tuple[str, ...]:
    """Prefixes of weights of a tower that nothing is computed with, and that vLLM does not hold: the head of SigLIP,
    and what comes after the layer whose output is the features, where ``config`` names one."""
    chosen, after = config_value(config, "vision_feature_layer", None), ["head"]
    if chosen is not None:
        layers = config.vision_config.num_hidden_layers
        last = max(layer % (layers + 1) for layer in ([chosen] if isinstance(chosen, int) else chosen))
        after += ["post_layernorm", *(f"encoder.layers.{i}" for i in range(last, layers))]
    return tuple(f"model.vision_tower.{module}." for module in after)


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Floating-point buffers that checkpoints of ``model`` hold, by name."""
    weights, saved = dict(model.named_parameters()), model.state_dict(keep_vars=True)
    return {name: saved[name] for name, buffer in model.named_buffers()
            if name in saved and name not in weights and buffer.is_floating_point()}  # yapf: disable


def load_plain(engine: "LLMEngine", model: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Run vLLM's own loader, which fills the existing tensors; return the names of those that it filled."""
    from vllm.config import set_current_vllm_config
    with set_current_vllm_config(engine.vllm_config):
        return model.load_weights(under_native_names(model, named_tensors))


@torch.no_grad()
def load(engine: "LLMEngine", model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]], plain: bool,
         whole: bool) -> None:
    """Fill ``model``, the one ``engine`` runs, with full weights under HF names; vLLM's loaders fuse and shard them.

    Args:
        plain: there are no :func:`derived_layers`, so that all weights are filled in place.
        whole: every weight comes, not only those that changed.

    Raises:
        ValueError: vLLM has a weight that was not sent.
    """
    # random at the start, buffers too; tied ones count once
    held = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())
            if tensor.is_floating_point()}  # yapf: disable
    expected = {name for name in held.values() if "scale" not in name}  # vLLM finds scales itself
    try:
        filled = (load_plain if plain else load_layerwise)(engine, model, named_tensors)
    except (AttributeError, KeyError) as error:  # of vLLM's loader, which knows no such layer
        raise UserError(f"vLLM cannot load the weights of this model: it has no {error}; use another --engine_type") \
            from error
    if whole and expected - filled:
        raise ValueError(f"vLLM has weights that the trainer does not have, e.g. {min(expected - filled)!r}")


@torch.no_grad()
def load_layerwise(engine: "LLMEngine", model: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Load layer by layer as at start, so that values derived from the weights are computed again; the storage stays.
    Return the names that were filled. Experts that get no weight do not work until all have got theirs."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    for layer in model.modules():
        if are_experts([layer]) and not any(parameter.is_cuda for parameter in layer.parameters()):
            layer.quant_method.moe_kernel = None  # on a CPU its creation packs the experts, and happens only once
    with set_current_vllm_config(engine.vllm_config):
        initialize_layerwise_reload(model)
        try:
            filled = model.load_weights(under_native_names(model, named_tensors))
        finally:  # after a stream that broke off too: the next one starts again
            finalize_layerwise_reload(model, engine.model_config)
        for layer in model.modules():
            if isinstance(layer, ParallelLMHead):  # a tied one got no own weight, so it was skipped
                layer.quant_method.process_weights_after_loading(layer)
    return filled


MARK = ".lora_"  # in the name of every adapter's matrix, and of no other weight
_NUMBER = 1


def adapter_arguments(rank: int) -> dict[str, Any]:
    """Arguments that give vLLM room for one adapter of ``rank`` at each layer."""
    from vllm.config.lora import MaxLoRARanks
    room = min((size for size in get_args(MaxLoRARanks) if size >= rank), default=0)
    if not room:
        raise UserError(f"--lora_rank {rank}: vLLM takes adapters of rank {max(get_args(MaxLoRARanks))} at most; lower "
                        "it, or use --lora_sync merged")  # yapf: disable
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": room}


@contextmanager
def bare(model: nn.Module) -> Iterator[None]:
    """Context without vLLM's wrappers of the layers of ``model`` with adapters: under their names nothing is loaded."""
    from vllm.lora.layers import BaseLayerWithLoRA
    around = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, BaseLayerWithLoRA)]
    for name, layer in around:
        model.set_submodule(name, layer.base_layer)
    try:
        yield
    finally:
        for name, layer in around:
            model.set_submodule(name, layer)


class Adapters:
    """The one adapter of a vLLM engine.

    Attributes:
        request: LoRA request, which lets a request of ``native`` use the adapter.
    """

    def __init__(self, native: "LLMEngine", rank: int) -> None:
        from vllm.lora.request import LoRARequest
        self.request = LoRARequest("policy", _NUMBER, "in this process")
        loader = native.model_executor.driver_worker.worker.model_runner.lora_manager
        loader.add_dummy_lora(self.request, rank)  # zeros; now that it has this one, it looks for no file
        manager = loader._adapter_manager
        manager.activate_adapter(_NUMBER)
        self.slot = manager.lora_index_to_id.index(_NUMBER)
        self.layers = {
            part: (layer, i) for name, layer in manager.modules.items()
            for i, part in enumerate(manager.packed_modules.get(name, [name]))
        }

    def take(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``stream`` without the matrices of adapters, which are filled on the way."""
        for name, tensor in stream:
            if MARK in name:
                self._fill(name, tensor)
            else:
                yield name, tensor

    @torch.no_grad()
    def _fill(self, name: str, tensor: Tensor) -> None:
        at, _, which = name.partition(MARK)
        if at not in self.layers:
            raise UserError(f"vLLM has no room for an adapter at {at}: use --lora_sync merged")
        layer, i = self.layers[at]
        stacked, cut = ((layer.lora_a_stacked, layer.slice_lora_a) if which[0] == "A" else
                        (layer.lora_b_stacked, layer.slice_lora_b))
        if layer.tp_size > 1:
            tensor = cut([tensor if j == i else None
                          for j in range(len(stacked))])[i] if len(stacked) > 1 else cut(tensor)
        stacked[i][self.slot, 0, :tensor.shape[0], :tensor.shape[1]].copy_(tensor)
