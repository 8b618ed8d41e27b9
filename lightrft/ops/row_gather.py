"""Gather of rows, some of them more than once, with a backward pass that adds up the copies in a fixed order."""
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightrft.utils.transfer import upload


class RowGather:
    """``x[index]`` for x [n, ...]; differentiable, and called as often as there are x.

    The gradient of a row is the sum over its copies, in the order of ``index``, so that it is the same in every run. It
    is a gather too where every row is taken once: no slow ``index_add``.

    Args:
        index: int64 [m].
        rows: n.
        device: of x; ``index`` may be on the host.
        used: bool [m]; the gradient of the other copies, padding, is not read. None: all are used.
    """

    def __init__(self, index: Tensor, rows: int, device: torch.device | str, used: Tensor | None = None) -> None:
        order = index.argsort(stable=True)
        order = order if used is None else order[used[order]]
        counts = index[order].bincount(minlength=rows)
        self.index, self._order = upload(index, device), upload(order, device)
        self._starts = None if bool((counts == 1).all()) else upload(counts.cumsum(0) - counts, device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x[index]``."""
        return _Gather.apply(x, self)

    def add_up(self, grad: Tensor) -> Tensor:
        """Return the gradient [n, ...] of x from that of ``x[index]``."""
        if self._starts is None:
            return grad.index_select(0, self._order)
        sums = F.embedding_bag(self._order, grad.flatten(1), self._starts, mode="sum")
        return sums.unflatten(1, grad.shape[1:])


class _Gather(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: RowGather) -> Tensor:
        ctx.gather = gather
        return x.index_select(0, gather.index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.gather.add_up(grad), None
