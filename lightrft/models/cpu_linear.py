"""Linear layers in float32 on CPUs, computed by oneDNN.

PyTorch computes them with the BLAS library of its build. MKL takes its AVX-512 kernels on Intel's CPUs only; those of
oneDNN, which every x86 build of PyTorch holds too, run on all CPUs (on an AMD EPYC of 2024 in half the time). The
products are the same sums in another order.
"""
import platform
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_LEAST = 1 << 21  # multiplications; a call of oneDNN costs more than one of MKL before it starts
_ROWS = 1024  # rows of a sum over tokens that are computed at once: they stay in the cache


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``; x [..., k], weight [n, k], with any strides."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, needs = grad.flatten(0, -2), ctx.needs_input_grad
        return (_product(grad, weight.t()) if needs[0] else None,
                _sum_of_products(rows, x.flatten(0, -2)) if needs[1] else None, rows.sum(0) if needs[2] else None)


def _sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left.T @ right``, [T, n] and [T, k] -> [n, k]."""
    parts = [_product(a.t(), b.t()) for a, b in zip(left.split(_ROWS), right.split(_ROWS))]
    for part in parts[1:]:
        parts[0] += part
    return parts[0]


class CPULinear(nn.Linear):
    """A linear layer whose products in float32 on a CPU are oneDNN's; with other inputs it is ``nn.Linear``."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``."""
        if not self._takes(input):
            return super().forward(input)
        if torch.is_grad_enabled():
            return cast(Tensor, _Linear.apply(input, self.weight, self.bias))
        return _product(input, self.weight, self.bias)

    def _takes(self, x: Tensor) -> bool:
        return x.is_cpu and x.dtype == self.weight.dtype == torch.float32 and x.numel() * self.out_features >= _LEAST


def use_onednn(model: nn.Module) -> None:
    """Make the linear layers of ``model`` :class:`CPULinear`, on x86 machines without a GPU."""
    if torch.cuda.is_available() or platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = CPULinear
