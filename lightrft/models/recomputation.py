"""Activations that a backward pass computes again (gradient checkpointing): all of a layer, or the cheap ones."""
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.models.attention_kernels import repeats_heads

# Operators that multiply by a weight -> index of their left factor [..., n]
_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::_grouped_mm": 0, "mkldnn::_linear_pointwise": 0}
_INNER = ("intermediate_size", "moe_intermediate_size", "encoder_ffn_dim")


def recompute(hf: Any, cfg: PolicyModelConfig) -> None:
    """Recompute the activations of the layers of ``hf`` as ``cfg`` says.

    The state of the random generators is restored for it only where something is drawn: in the dropout of adapters.
    """
    if not cfg.gradient_checkpointing:
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": cfg.lora_rank > 0 and cfg.lora_dropout > 0}
    enable = getattr(hf, "activation_checkpointing_enable", None) or hf.gradient_checkpointing_enable  # before 5.23
    enable(options)
    repeats_heads()  # asks the device, which must not be among the calls that a layer repeats
    for layer in hf.modules() if cfg.gradient_checkpointing == "selective" else ():
        if (checkpoint := vars(layer).get("_gradient_checkpointing_func")) is not None:
            contexts = partial(create_selective_checkpoint_contexts, partial(_policy, _widths(layer) | {cfg.lora_rank}))
            layer._gradient_checkpointing_func = partial(checkpoint, context_fn=contexts)


def _widths(layer: nn.Module) -> set[int]:
    """Return the widths inside the MLP of a layer, which its attention knows."""
    configs = [vars(module.config) for module in layer.modules() if hasattr(module, "config")]
    return {config[name] for config in configs for name in _INNER if isinstance(config.get(name), int)}


def _policy(inner: set[int], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of attention, and of products over other widths than ``inner``.

    Those over the width of an MLP are the end of the layer: nothing in it reads them. Those over the rank of adapters
    cost little, and are as large as the product that they are added to.
    """
    name = op.name()
    left = _PRODUCTS.get(name)
    kept = "attention" in name or "attn" in name if left is None else args[left].shape[-1] not in inner
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
