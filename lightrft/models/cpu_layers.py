"""Layers in float32 on CPUs: linear layers that oneDNN computes, and norms with one backward pass.

PyTorch computes linear layers with the BLAS library of its build. MKL takes its AVX-512 kernels on Intel's CPUs only,
where they are faster than those of oneDNN. These run on all CPUs (on an AMD EPYC of 2024 in half the time), and every
x86 build of PyTorch holds them too. The products are the same sums in another order.

Hugging Face writes RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) as six operations, each of which keeps its
inputs and has a backward pass of its own. The output here is the same to the bit, the gradient is the same sum.
"""
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_LEAST = 1 << 20  # multiplications; a call of oneDNN costs more than one of MKL before it starts
_LEAST_PACKED = 1 << 19  # with a packed weight
_ROWS = 1024  # rows of a sum over tokens that are computed at once: they stay in the cache
_CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # of oneDNN, and of PyTorch's cache before it
_KERNELS = "128"  # that each keeps; a kernel is for one number of rows, takes 0.8 MiB, and 1,024 would be kept
_DECODED = 64  # rows of a product for which weights are packed
_PACKED_MOST = 1 << 30  # bytes of weights; larger models are not packed, because that takes their memory again


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``; x [..., k], weight [n, k], with any strides."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """The bias comes before the weight, so that their gradients are ready in this order, as those of ``nn.Linear`` are:
    ZeRO-1 and 2 sum over ranks what is ready in turn, and ranks with few tokens take the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, needs = grad.flatten(0, -2), ctx.needs_input_grad
        return (_product(grad, weight.t()) if needs[0] else None, rows.sum(0) if needs[1] else None,
                _sum_of_products(rows, x.flatten(0, -2)) if needs[2] else None)


def _sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left.T @ right``, [T, n] and [T, k] -> [n, k]."""
    parts = [_product(a.t(), b.t()) for a, b in zip(left.split(_ROWS), right.split(_ROWS))]
    for part in parts[1:]:
        parts[0] += part
    return parts[0]


class CPULinear(nn.Linear):
    """A linear layer whose products in float32 on a CPU are oneDNN's; with other inputs it is ``nn.Linear``."""
    packed: Tensor | None = None  # the weight in oneDNN's own layout, within :func:`packed_weights`

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``."""
        if not self._takes(input):
            return super().forward(input)
        if torch.is_grad_enabled():
            return cast(Tensor, _Linear.apply(input, self.bias, self.weight))
        return _product(input, self.weight if self.packed is None else self.packed, self.bias)

    def _takes(self, x: Tensor) -> bool:
        least = _LEAST if self.packed is None else _LEAST_PACKED
        return x.is_cpu and x.dtype == self.weight.dtype == torch.float32 and x.numel() * self.out_features >= least

    @property
    def _packs(self) -> bool:
        return self.weight.is_cpu and self.weight.dtype == torch.float32


def _keep_few_kernels() -> None:
    """Limit the kernels that are kept, unless the environment does; it is read at the first product."""
    own = {name: _KERNELS for name in _CAPACITIES if name not in os.environ}
    os.environ.update(own)
    _product(torch.ones(1, 1), torch.ones(1, 1))
    for name in own:
        del os.environ[name]


@lru_cache(maxsize=1)
def _vendor() -> str:
    """Maker of the CPU by its own name, such as GenuineIntel; empty where the system does not report it."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    return next((line.split()[-1] for line in lines if line.startswith("vendor_id")), "")


def use_onednn(model: nn.Module) -> None:
    """Make the linear layers of ``model`` :class:`CPULinear`, on x86 machines without a GPU where MKL is slower."""
    if torch.cuda.is_available() or platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available():
        return
    if torch.backends.mkl.is_available() and _vendor() == "GenuineIntel":
        return
    _keep_few_kernels()
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = CPULinear


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Context without gradients in which weights do not change: oneDNN, which else brings a weight into its own layout
    in every product, does so once. The numbers are the same."""
    layers = [module for module in model.modules() if type(module) is CPULinear and module._packs]
    small = sum(layer.weight.nbytes for layer in layers) <= _PACKED_MOST
    try:
        for layer in layers if small else []:
            layer.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight, _DECODED)
        yield
    finally:
        for layer in layers:
            layer.packed = None


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of ``x`` [..., n], and the inverse root of its mean squares [..., 1]."""
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (x * inverse), inverse


class _RMSNorm(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, inverse = _norm(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """With r the inverse root: ``r * (g * w - x * r^2 * mean(g * w * x))``, and the sum of ``g * x * r``."""
        x, weight, inverse = ctx.saved_tensors
        rows = (grad * x).flatten(0, -2)
        of_weight = rows.t().mv(inverse.flatten()) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None
        mean = rows.mv(weight).view_as(inverse) / x.shape[-1]
        return (grad * weight).mul_(inverse).addcmul_(x, mean * inverse**3, value=-1), of_weight, None


def _eps(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


class _OnCPU:
    """The forward pass of a norm of any family, for float32 on a CPU."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the norm of ``hidden_states`` [..., n]."""
        weight: Tensor = self.weight  # type: ignore[attr-defined]
        if torch.is_grad_enabled() and hidden_states.is_cpu and hidden_states.dtype == weight.dtype == torch.float32:
            return _RMSNorm.apply(hidden_states, weight, _eps(self))  # type: ignore[arg-type, no-any-return]
        return super().forward(hidden_states)  # type: ignore[misc, no-any-return]


@lru_cache(maxsize=None)
def _derived(family: type[Any]) -> type[Any]:
    return type(family.__name__, (_OnCPU, family), {"__module__": family.__module__})


@torch.no_grad()
def _same(module: nn.Module) -> bool:
    """True if ``module`` computes what this file does; other families add one to the weight, or round in between."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 1 or not weight.is_cpu or weight.dtype != torch.float32 or not _eps(module):
        return False
    x = torch.linspace(-2.0, 3.0, 2 * len(weight)).view(2, -1)
    return torch.equal(module(x), _norm(x, weight, _eps(module))[0])


def use_cpu_norms(model: nn.Module) -> None:
    """Give the norms of ``model`` that compute exactly this one its backward pass, on machines without a GPU."""
    if torch.cuda.is_available():
        return
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and not isinstance(module, _OnCPU) and _same(module):
            module.__class__ = _derived(type(module))  # type: ignore[arg-type]
