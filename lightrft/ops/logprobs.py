"""Log-probs and entropy straight from hidden states, without the [N, V] logits ever existing as a whole."""
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Read = Callable[[Tensor, slice], tuple[Tensor, ...]]  # log-probs [n, V] of some rows -> values [n, ...]

_BLOCK = 1 << 14  # rows of a sum of products that are computed at once


def _rows(vocab: int, buffers: int, itemsize: int, chunk_mib: float) -> int:
    """Return the rows whose ``buffers`` live [rows, V] temporaries fit into ``chunk_mib``; at least one."""
    return max(1, int(chunk_mib * 2**20) // (vocab * buffers * itemsize))


def _matmul(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """``left @ right`` in ``out``, in the inputs' dtype or in float32; sums are float32 also of half precision."""
    if left.dtype == out.dtype:
        return torch.mm(left, right, out=out)
    return torch.mm(left, right, out_dtype=out.dtype, out=out)


def _add_matmul(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``out``, which is float32 where they are half precision: without rounding the product."""
    if left.dtype == out.dtype:
        out.addmm_(left, right)
        return
    room = torch.empty_like(out[:_BLOCK])
    for total, rows in zip(out.split(_BLOCK), left.split(_BLOCK)):
        total += _matmul(rows, right, room[:len(rows)])


def full_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``hidden @ weight.T + bias`` [..., V] as :func:`chunked_logprobs` has it: float32, of half precision too;
    no gradient."""
    head = _Head(weight, bias, 1.0, 0.0)
    rows = hidden.flatten(0, -2)
    head.allocate(len(rows), len(rows), False)
    return head.logits(rows).unflatten(0, hidden.shape[:-1])


class _Head:
    """Logits of a slice of rows: operands in the dtype of the inputs, sums and all that follows in ``math`` precision.

    A CPU has no product of half precision with float32 sums: there the operands are converted, which is exact. The
    [rows, V] buffers are allocated once per pass and reused by every chunk; methods return views of them.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, temperature: float, soft_cap: float,
                 fused: bool = False) -> None:
        self.math = torch.promote_types(weight.dtype, torch.float32)
        self.weight, self.bias = weight if weight.is_cuda else weight.to(self.math), bias
        self.temperature, self.soft_cap = temperature or 1.0, soft_cap
        self.buffers = self.operand = weight.new_empty(0)
        self.fused = fused and bias is None and soft_cap <= 0 and self.math == torch.float32

    def allocate(self, rows: int, total: int, entropy: bool) -> None:
        """Allocate the buffers for chunks of at most ``rows`` out of ``total`` rows."""
        size = (1 + int(entropy and not self.fused) + int(self.soft_cap > 0), min(rows, total), len(self.weight))
        self.buffers = self.weight.new_empty(size, dtype=self.math)
        if self.fused and self.weight.dtype != self.math:
            self.operand = self.weight.new_empty(size[1:])

    def rows(self, chunk_mib: float) -> int:
        """Return the rows per chunk: buffers hold logits, entropy and soft-cap temporaries, the gradient as operand.

        The result does not depend on ``entropy``, because the matmul of other chunks rounds log-probs differently.
        """
        buffers = 2 + int(self.soft_cap > 0) + int(self.weight.dtype != self.math)
        return _rows(len(self.weight), buffers, self.math.itemsize, chunk_mib)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, V]; a fused pass divides them by the temperature."""
        logits = _matmul(hidden.to(self.weight.dtype), self.weight.t(), self.buffers[0, :len(hidden)])
        if self.bias is not None:
            logits += self.bias
        if self.soft_cap > 0:
            logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits if self.temperature == 1.0 or self.fused else logits.div_(self.temperature)

    def exp(self, x: Tensor) -> Tensor:
        """``x.exp()``, [n, V]; ``x`` stays."""
        return torch.exp(x, out=self.buffers[1, :len(x)])

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return d logits / d (hidden @ weight.T + bias), computed from the logits."""
        if self.soft_cap <= 0:
            return 1 / self.temperature
        tanh = torch.mul(logits, self.temperature / self.soft_cap, out=self.buffers[-1, :len(logits)])
        return tanh.square_().neg_().add_(1).div_(self.temperature)


class _HeadGrads:
    """Gradients of a head's inputs, summed over chunks of rows; None for an input that needs none."""

    def __init__(self, head: _Head, hidden: Tensor, weight: Tensor, needs: tuple[bool, ...]) -> None:
        self.head, self.states, self.inputs = head, hidden, (hidden, weight, head.bias)
        dtypes = head.weight.dtype, head.math, head.math
        self.hidden, self.weight, self.bias = (torch.zeros_like(x, dtype=dtype) if x is not None and needed else None
                                               for x, dtype, needed in zip(self.inputs, dtypes, needs))

    def add(self, grad: Tensor, part: slice) -> None:
        """Add what the gradient [n, V] of the logits of the rows ``part`` means for the inputs."""
        if self.bias is not None:
            self.bias += grad.sum(0)
        operand = grad.to(self.head.weight.dtype)
        if self.hidden is not None:
            torch.mm(operand, self.head.weight, out=self.hidden[part])
        if self.weight is not None:
            _add_matmul(self.weight, operand.t(), self.states[part].to(operand.dtype))

    def results(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias, each in the dtype of its input."""
        found = zip((self.hidden, self.weight, self.bias), self.inputs)
        return tuple(None if grad is None or x is None else grad.to(x.dtype) for grad, x in found)


class _ChunkedLogprobs(torch.autograd.Function):

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, soft_cap, chunk_mib, with_entropy, fused):
        head = _Head(weight, bias, temperature, soft_cap, fused)
        rows = head.rows(chunk_mib)
        head.allocate(rows, len(hidden), with_entropy)
        logprobs, norms = hidden.new_empty((2, len(hidden)), dtype=head.math)
        entropies = torch.empty_like(norms) if with_entropy else None
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = head.logits(hidden[part])
            if head.fused:
                _kernels().read(logits, targets[part], head.temperature, logprobs[part], norms[part],
                                None if entropies is None else entropies[part])
                continue
            top = logits.amax(-1, keepdim=True)
            logits -= top
            chosen = logits.gather(-1, targets[part, None])[:, 0]
            weights = head.exp(logits) if with_entropy else logits.exp_()
            total = weights.sum(-1)
            log_total = total.log()
            torch.sub(chosen, log_total, out=logprobs[part])
            torch.add(log_total, top[:, 0], out=norms[part])
            if entropies is not None:
                torch.sub(log_total, weights.mul_(logits).sum(-1).div_(total), out=entropies[part])
        ctx.save_for_backward(hidden, weight, bias, targets, norms, entropies)
        ctx.options = temperature, soft_cap, rows, fused
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, bias, targets, norms, entropies = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return (None, ) * 9
        temperature, soft_cap, rows, fused = ctx.options
        head = _Head(weight, bias, temperature, soft_cap, fused)
        head.allocate(rows, len(hidden), grad_entropy is not None)
        grads = _HeadGrads(head, hidden, weight, ctx.needs_input_grad)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            grad = _grad_logits(head, hidden[part], targets[part, None], norms[part, None], _column(entropies, part),
                                _column(grad_logprobs, part), _column(grad_entropy, part))
            grads.add(grad, part)
        return *grads.results(), None, None, None, None, None, None


def _kernels() -> Any:
    """The module of fused passes; it imports Triton."""
    from lightrft.ops import logits_kernels
    return logits_kernels


def _column(x: Tensor | None, part: slice) -> Tensor | None:
    return None if x is None else x[part, None]


def _grad_logits(head: _Head, hidden: Tensor, targets: Tensor, norm: Tensor, entropy: Tensor | None,
                 grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> Tensor:
    """``g_l * (onehot - p) - g_h * p * (log p + H)`` times the slope of the head, [n, V]; the columns are [n, 1]."""
    logits = head.logits(hidden)
    if head.fused:
        out = logits if head.operand.numel() == 0 else head.operand[:len(logits)]
        columns = (None if x is None else x[:, 0] for x in (norm, entropy, grad_logprob, grad_entropy))
        return _kernels().slope(logits, out, targets[:, 0], head.temperature, *columns)
    slope = head.slope(logits)
    log_p = logits.sub_(norm)
    if grad_logprob is None:
        grad_logprob = torch.zeros_like(norm)
    if grad_entropy is None or entropy is None:
        grad = log_p.exp_().mul_(-grad_logprob)
    else:
        p = head.exp(log_p)
        grad = log_p.add_(entropy).mul_(-grad_entropy).sub_(grad_logprob).mul_(p)
    grad.scatter_add_(-1, targets, grad_logprob)
    return grad if isinstance(slope, float) and slope == 1.0 else grad.mul_(slope)


def chunked_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0,
                     bias: Tensor | None = None, chunk_mib: float = 256, entropy: bool = True, soft_cap: float = 0.0,
                     fused: bool = False) -> tuple[Tensor, Tensor | None]:
    """``p = log_softmax((hidden @ weight.T + bias).float() / temperature); (p[i, targets[i]], -(p.exp() * p).sum(-1))``

    Computed in chunks of rows whose temporaries together stay within ``chunk_mib``, and recomputed in the backward
    pass: the peak does not grow with N, and with V only by the weight and its gradient (accumulated in float32). The
    log-probs are the same to the bit with and without the entropy. Products of half precision are summed up in float32
    and not rounded; only the gradient of the logits is rounded to it, on CUDA, where it is an operand.

    Args:
        hidden: [N, H] states that choose the targets; float64 stays float64, everything else does its math in float32.
        weight: [V, H] output embedding; a frozen one costs no gradient.
        targets: [N] int64 token ids.
        temperature: the sampling temperature; 0 (greedy) counts as 1.
        bias: [V] or None.
        chunk_mib: MiB of logits and their temporaries alive at once (a single row may exceed it).
        entropy: False skips the entropy and returns None for it.
        soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)`` before the temperature; 0 is off.
        fused: one pass over the logits of a chunk, and one for their gradient (:mod:`lightrft.ops.logits_kernels`); on
            CUDA, with Triton. A head with a bias or a soft cap takes the usual way.

    Returns:
        ``(logprobs [N], entropy [N] or None)`` in nats, differentiable in hidden, weight and bias.
    """
    return _ChunkedLogprobs.apply(hidden, weight, bias, targets, temperature, soft_cap, chunk_mib, entropy, fused)


class _ChunkedRead(torch.autograd.Function):

    @staticmethod
    def forward(ctx, hidden, weight, bias, read, vocab, chunk_mib, soft_cap):
        ctx.options = read, vocab, chunk_mib, soft_cap
        ctx.save_for_backward(hidden, weight, bias)
        ctx.set_materialize_grads(False)
        found = [read(_normalised(logits, vocab, soft_cap), part)
                 for part, logits in _chunks(_Head(weight, bias, 1.0, 0.0), hidden, chunk_mib)]  # yapf: disable
        return tuple(torch.cat(column) for column in zip(*found))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        (hidden, weight, bias), (read, vocab, chunk_mib, soft_cap) = ctx.saved_tensors, ctx.options
        head = _Head(weight, bias, 1.0, 0.0)
        summed = _HeadGrads(head, hidden, weight, ctx.needs_input_grad)
        for part, logits in _chunks(head, hidden, chunk_mib):
            with torch.enable_grad():
                found = read(_normalised(logits.requires_grad_(), vocab, soft_cap), part)
            pairs = [(value, grad[part]) for value, grad in zip(found, grads) if grad is not None]
            if not pairs:
                break
            values, slopes = zip(*pairs)
            summed.add(torch.autograd.grad(values, logits, slopes)[0], part)
        return *summed.results(), None, None, None, None


def _chunks(head: _Head, hidden: Tensor, chunk_mib: float) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of rows and their logits [n, V], in a buffer that the next slice uses again; at least one slice."""
    rows = _rows(len(head.weight), 4, head.math.itemsize, chunk_mib)
    head.allocate(rows, len(hidden), False)
    for start in range(0, max(len(hidden), 1), rows):
        states = hidden[start:start + rows].detach()
        yield slice(start, start + len(states)), head.logits(states).detach()


def _normalised(logits: Tensor, vocab: int | None, soft_cap: float) -> Tensor:
    """Return the log-probs of the first ``vocab`` tokens, after the soft cap."""
    logits = logits[:, :vocab]
    return (soft_cap * torch.tanh(logits / soft_cap) if soft_cap > 0 else logits).log_softmax(-1)


def read_logprobs(hidden: Tensor, weight: Tensor, read: Read, vocab: int | None = None, bias: Tensor | None = None,
                  chunk_mib: float = 256, soft_cap: float = 0.0) -> tuple[Tensor, ...]:
    """``read(log_softmax((hidden @ weight.T + bias).float()[:, :vocab]), slice(0, N))``, in chunks of rows.

    Log-probs of a chunk are computed again in the backward pass, so that only what ``read`` returns of them is kept.
    Sums and roundings are those of :func:`chunked_logprobs`.

    Args:
        hidden: [N, H]; N may be 0.
        weight: [V, H] output embedding.
        read: maps log-probs of some rows, and which these are, to values of these rows; gradients go through the
            log-probs alone.
        vocab: tokens that count; None: all.
        bias, chunk_mib, soft_cap: as in :func:`chunked_logprobs`.
    """
    return _ChunkedRead.apply(hidden, weight, bias, read, vocab, chunk_mib, soft_cap)
