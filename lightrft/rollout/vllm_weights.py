"""Trainer weights -> the model that vLLM holds in this process."""
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightrft.rollout.named_weights import Shapes
from lightrft.utils.errors import UserError

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


def is_borrowed(model: nn.Module) -> bool:
    """Whether vLLM runs the code that transformers has for this model."""
    return f"{type(model).__module__}.".startswith("vllm.model_executor.models.transformers.")


def tie_head(model: nn.Module) -> None:
    """Let the head read the embedding's weight: for models that are tied although their folder holds a copy of the
    head (vLLM then gives the head a weight of its own, which no update would reach)."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    tables = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    heads = [layer for layer in tables if isinstance(layer, ParallelLMHead)]
    if len(heads) == 1 and len(tables) == 2:
        heads[0].tie_weights(next(table for table in tables if table is not heads[0]))


def derived_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that compute with something derived from their weights: quantised, packed, the experts of a MoE, MLA.

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
    method = getattr(layer, "quant_method", None)  # that of experts is a module of its own, and not in vars(layer)
    return (not isinstance(method, QuantizeMethodBase)
            or type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))


def are_experts(layers: Iterable[nn.Module]) -> bool:
    """Whether all ``layers`` are experts of a MoE without quantization, whose weights vLLM lays out for its kernels."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    return all(isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod) for layer in layers)


def in_plain_layers(model: nn.Module, derived: Iterable[nn.Module], shapes: Shapes) -> Shapes:
    """Those of the weights ``shapes`` (by HF name) whose layer, by the name vLLM has for it, is none of ``derived``: no
    loader of a :func:`derived layer <derived_layers>` has to be called to see where they go."""
    fused = {one: name for name, some in getattr(model, "packed_modules_mapping", {}).items() for one in some}
    layers, hidden = dict(model.named_modules()), set(derived)

    def layer_of(name: str) -> nn.Module | None:
        above, _, own = name.rpartition(".")[0].rpartition(".")
        return layers.get(f"{above}.{fused.get(own, own)}")

    return {name: shape for name, shape in shapes.items() if layer_of(name) not in {None, *hidden}}


def load_plain(engine: "LLMEngine", model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    """vLLM's own loader, which fills the tensors that are there; the names of those that it filled."""
    from vllm.config import set_current_vllm_config
    with set_current_vllm_config(engine.vllm_config):
        return model.load_weights(named_tensors)


@torch.no_grad()
def load(engine: "LLMEngine", model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]], plain: bool) -> None:
    """Fill ``model``, the one ``engine`` runs, with full weights under HF names; vLLM's loaders fuse and shard them.

    Args:
        plain: there are no :func:`derived_layers`, so that all weights are filled in place.

    Raises:
        ValueError: vLLM has a weight that did not come.
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
    if expected - filled:
        raise ValueError(f"vLLM has weights that the trainer has not, e.g. {min(expected - filled)!r}")


@torch.no_grad()
def load_layerwise(engine: "LLMEngine", model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Layer by layer as at start, so that what is derived from the weights is derived again; the storage stays. Returns
    the names that were filled. Experts of which nothing comes do not work until all have come."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    for layer in model.modules():
        if are_experts([layer]) and not any(parameter.is_cuda for parameter in layer.parameters()):
            layer.quant_method.moe_kernel = None  # on a CPU its making is what packs the experts, and is done but once
    with set_current_vllm_config(engine.vllm_config):
        initialize_layerwise_reload(model)
        try:
            filled = model.load_weights(named_tensors)
        finally:  # after a stream that broke off too: the next one starts anew
            finalize_layerwise_reload(model, engine.model_config)
        for layer in model.modules():
            if isinstance(layer, ParallelLMHead):  # a tied one got no weight of its own, so it was passed over
                layer.quant_method.process_weights_after_loading(layer)
    return filled
