"""Attention of a decode step in one Triton kernel: a program per row and group of heads reads the keys and values of
the prompt, then those of the row, with a running maximum (Milakov & Gimelshein 2018, arXiv:1805.02867).

:mod:`lightrft.rollout.hf.kv_cache` imports it where ``--fused_decode`` asks for it. A prompt is read once per sample,
where products of a batch read it once for all of them; in exchange only tokens that exist are read.
"""
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 64, 4  # most keys that a program reads at once, and the warps that share them
_BLOCK_BYTES = 16 << 10  # of these keys: three blocks of keys and of values are on their way, on GPUs with 99 KiB too
_LEAST = 16  # rows and columns of a product of a program
_FAR = 1 << 40  # tokens: no window


@triton.jit
def _read(query, keys, to_values, first, end, scale, softcap, top, total, sums, DIM: tl.constexpr, WIDTH: tl.constexpr,
          CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Add the tokens from ``first`` to ``end`` of a sequence [tokens, DIM], whose values stand ``to_values`` after its
    keys, to ``total`` = sum(exp(score - top)) and ``sums`` = sum(exp(score - top) * value)."""
    columns = tl.arange(0, WIDTH)
    end = tl.where(first < end, end, 0)  # no block without a token that is seen
    for start in range(first // BLOCK * BLOCK, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        seen = (index >= first) & (index < end)
        inside = seen[:, None] & (columns < DIM)[None, :]
        at = keys + index[:, None] * DIM + columns[None, :]
        key = tl.load(at, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        back, weights = tl.exp(top - highest), tl.exp(scores - highest[:, None])
        value = tl.load(at + to_values, mask=inside, other=0.0)
        sums = sums * back[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * back + tl.sum(weights, 1)
        top = highest
    return top, total, sums


# A step must not compile anew while a graph records it: sizes that differ between caches choose no other kernel.
@triton.jit(do_not_specialize=["between", "prompts_count", "prompt_len", "rows_count", "row_len", "window"])
def _attend(queries, prompts, rows, slots, lengths, newest, out, between, prompts_count, prompt_len, rows_count,
            row_len, window, scale, softcap, HEADS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr,
            PADDED: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Write the outputs of a row and a group of heads, QUERIES * DIM numbers."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number, columns = tl.arange(0, PADDED), tl.arange(0, WIDTH)
    inside = (number < QUERIES)[:, None] & (columns < DIM)[None, :]
    at, group = number[:, None] * DIM + columns[None, :], row * HEADS + head
    query = tl.load(queries + group * between + at, mask=inside, other=0.0)
    length, last = tl.load(lengths + row), tl.load(newest + row)  # tokens of the prompt; index of the newest in the row
    slot = tl.maximum(tl.load(slots + row), 0)  # a free row has length 0
    first = tl.maximum(length + last - window + 1, 0)
    top = tl.full((PADDED, ), -float("inf"), tl.float32)
    total, sums = tl.zeros((PADDED, ), tl.float32), tl.zeros((PADDED, WIDTH), tl.float32)
    step, whole = prompt_len.to(tl.int64) * DIM, prompts_count.to(tl.int64) * HEADS
    top, total, sums = _read(query, prompts + (slot * HEADS + head) * step, whole * step, first, length, scale, softcap,
                             top, total, sums, DIM, WIDTH, CAPPED, BLOCK)
    step, whole = row_len.to(tl.int64) * DIM, rows_count.to(tl.int64) * HEADS
    top, total, sums = _read(query, rows + group * step, whole * step, tl.maximum(first - length, 0), last + 1, scale,
                             softcap, top, total, sums, DIM, WIDTH, CAPPED, BLOCK)
    tl.store(out + group * QUERIES * DIM + at, sums / total[:, None], mask=inside)


def attend(query: Tensor, prompts: Tensor, rows: Tensor, slots: Tensor, lengths: Tensor, newest: Tensor, scaling: float,
           window: int | None, softcap: float | None) -> Tensor:
    """Return the outputs [live, heads * n * dim] of the newest tokens of ``live`` rows.

    Args:
        query: [live * heads, n, dim], of each group of heads the n queries of its key; groups may stand apart.
        prompts, rows: keys and values of a layer, [2, sequences, heads, tokens, dim], of all prompts and of all rows.
        slots, lengths, newest: int64 [live]: the prompt of each row, the tokens of that prompt (0: a free row), and the
            index of the newest token in the row.
        window: tokens that a query sees, with its own; None: all.
        softcap: ``softcap * tanh(score / softcap)`` takes the place of a score; None: of none.
    """
    (_, prompts_count, heads, prompt_len, dim), (groups, queries, _) = prompts.shape, query.shape
    out = query.new_empty(groups // heads, heads * queries * dim)
    padded, width = (max(_LEAST, triton.next_power_of_2(size)) for size in (queries, dim))
    block = min(BLOCK, max(_LEAST, _BLOCK_BYTES // (width * query.itemsize)))
    _attend[(groups // heads, heads)](
        query, prompts, rows, slots, lengths, newest, out, query.stride(0), prompts_count, prompt_len, rows.shape[1],
        rows.shape[3], window or _FAR, float(scaling), float(softcap or 0.0), HEADS=heads, QUERIES=queries, DIM=dim,
        PADDED=padded, WIDTH=width, CAPPED=softcap is not None, BLOCK=block, num_warps=WARPS)  # yapf: disable
    return out
