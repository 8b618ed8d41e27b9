"""One pass over a chunk of logits on CUDA, in Triton: log-probs and entropy, and the gradient of the logits.

:mod:`lightrft.ops.logprobs` imports it where ``--fused_logprobs`` asks for it. Liger has no such kernel: its
cross-entropies give no entropy, and compute gradients before the loss is known.
"""
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8  # logits that a program reads at once, and the warps that share them


@triton.jit
def _read_row(logits, targets, logprobs, norms, entropies, vocab, temperature, ENTROPY: tl.constexpr,
              BLOCK: tl.constexpr):
    """Read a row once, with a running maximum (Milakov & Gimelshein 2018, arXiv:1805.02867).

    total = sum(exp(x - top)), energy = sum(exp(x - top) * (x - top)); logits of -inf add nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    top, total, energy = -float("inf"), 0.0, 0.0
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(logits + index, mask=index < vocab, other=-float("inf")) / temperature
        highest = tl.maximum(top, tl.max(x, 0))
        back = tl.where(total > 0, top - highest, 0.0)
        ahead = tl.where(x > -float("inf"), x - highest, 0.0)
        weights = tl.where(x > -float("inf"), tl.exp(ahead), 0.0)
        energy = tl.exp(back) * (energy + total * back) + tl.sum(weights * ahead, 0)
        total = tl.exp(back) * total + tl.sum(weights, 0)
        top = highest
    log_total = tl.log(total)
    chosen = tl.load(logits + tl.load(targets + row)) / temperature
    tl.store(logprobs + row, chosen - top - log_total)
    tl.store(norms + row, top + log_total)
    if ENTROPY:
        tl.store(entropies + row, log_total - energy / total)


@triton.jit
def _slope_block(logits, out, targets, norms, entropies, grad_logprobs, grad_entropies, vocab, temperature,
                 LOGPROBS: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    """Write ``(g_l * (onehot - p) - g_h * p * (log p + H)) / temperature`` for a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocab
    log_p = tl.load(logits + row * vocab + index, mask=inside, other=-float("inf")) / temperature - tl.load(norms + row)
    p = tl.exp(log_p)
    slope = tl.zeros((BLOCK, ), tl.float32)
    if LOGPROBS:
        slope += tl.load(grad_logprobs + row) * (tl.where(index == tl.load(targets + row), 1.0, 0.0) - p)
    if ENTROPY:
        held = tl.where(p > 0, p * (log_p + tl.load(entropies + row)), 0.0)
        slope -= tl.load(grad_entropies + row) * held
    tl.store(out + row * vocab + index, slope / temperature, mask=inside)


def read(logits: Tensor, targets: Tensor, temperature: float, logprobs: Tensor, norms: Tensor,
         entropies: Tensor | None) -> None:
    """Write the log-probs of ``targets`` [n], log-sum-exps and entropies [n] of contiguous float32 logits [n, V]."""
    _read_row[(len(logits), )](logits, targets, logprobs, norms, norms if entropies is None else entropies,
                               logits.shape[1], float(temperature), ENTROPY=entropies is not None, BLOCK=BLOCK,
                               num_warps=WARPS)  # yapf: disable


def slope(logits: Tensor, out: Tensor, targets: Tensor, temperature: float, norms: Tensor, entropies: Tensor | None,
          grad_logprobs: Tensor | None, grad_entropies: Tensor | None) -> Tensor:
    """Write the gradient of the logits [n, V] to ``out``, which may be the logits themselves, and return it.

    Args:
        norms, entropies: [n], of :func:`read`.
        grad_logprobs, grad_entropies: [n], with any stride; None: nothing depends on them.
    """
    ones = [norms if x is None else x.contiguous() for x in (entropies, grad_logprobs, grad_entropies)]
    grid = (len(logits), triton.cdiv(logits.shape[1], BLOCK))
    _slope_block[grid](logits, out, targets, norms, *ones, logits.shape[1], float(temperature),
                       LOGPROBS=grad_logprobs is not None,
                       ENTROPY=grad_entropies is not None and entropies is not None, BLOCK=BLOCK,
                       num_warps=WARPS)  # yapf: disable
    return out
