"""Activations that a backward pass computes again (gradient checkpointing): all of a layer, or the cheap ones."""
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.models.activations import INNER
from lightrft.models.attention_kernels import repeats_heads

# Operators that multiply by a weight -> index of their left factor [..., n]
_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::_grouped_mm": 0, "mkldnn::_linear_pointwise": 0}


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
            contexts = partial(_contexts, partial(_is_kept, _widths(layer) | {cfg.lora_rank}))
            layer._gradient_checkpointing_func = partial(checkpoint, context_fn=contexts)


def _widths(layer: nn.Module) -> set[int]:
    """Return the widths inside the MLP of a layer, which its attention knows."""
    configs = [vars(module.config) for module in layer.modules() if hasattr(module, "config")]
    return {config[name] for config in configs for name in INNER if isinstance(config.get(name), int)}


def _is_kept(inner: set[int], op: Any, args: tuple[Any, ...]) -> bool:
    """Return True for attention, and for products over other widths than ``inner``.

    Those over the width of an MLP are the end of the layer: nothing in it reads them. Those over the rank of adapters
    cost little, and are as large as the product that they are added to.
    """
    name = op.name()
    left = _PRODUCTS.get(name)
    return "attention" in name or "attn" in name if left is None else args[left].shape[-1] not in inner


def _contexts(keeps: Callable[[Any, tuple[Any, ...]], bool]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of a layer's forward pass and of its repetition, which share the results that are kept."""
    results: deque[Any] = deque()
    return _Keeping(keeps, results), _Repeating(keeps, results)


class _Keeping(TorchDispatchMode):
    """Keeps the results of some operators.

    torch's own selective checkpoints count every operator, also those with which ZeRO-3 gathers parameters, which
    differ between a forward pass and its repetition. Here the operators that are kept alone have to be the same.
    """

    def __init__(self, keeps: Callable[[Any, tuple[Any, ...]], bool], results: deque[Any]) -> None:
        super().__init__()
        self.keeps, self.results = keeps, results

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if self.keeps(op, args):
            self.results.append(tree_map_only(Tensor, Tensor.detach, result))  # without the graph that it gets above
        return result


class _Repeating(_Keeping):
    """Takes the results that were kept, in their order, in place of computing them."""

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self.results.popleft() if self.keeps(op, args) else op(*args, **(kwargs or {}))
