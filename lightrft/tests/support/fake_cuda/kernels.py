"""Operators, or types of them, that exist on CUDA only, computed on the CPU: torch's varlen attention, products into
float32, histograms of integers."""
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.varlen  # noqa: F401  (registers the operators)
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
Window = list[int] | None


def _sight(queries: int, keys: int, window: Window) -> Tensor:
    """Bool [queries, keys], the last query at the last key: as far as ``window`` (back, ahead) reaches; a negative
    number is no limit."""
    behind, ahead = window or (-1, 0)
    back = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    seen = torch.ones_like(back, dtype=torch.bool) if ahead < 0 else back >= -ahead
    return seen & (back <= behind) if behind >= 0 else seen


def _spans(cu: Tensor) -> list[slice]:
    """Tokens of each sequence."""
    ends = cu.tolist()
    return [slice(start, end) for start, end in zip(ends, ends[1:])]


def _check(query: Tensor, cu: Tensor, window: Window) -> None:
    """Refuse what the real kernel refuses."""
    assert query.dtype in (torch.bfloat16, torch.float16), f"flash attention takes half precision, not {query.dtype}"
    assert cu.dtype == torch.int32 and query.is_contiguous() and query.shape[-1] <= 256
    assert query.shape[-1] % 8 == 0, "head_size should be a multiple of 8"


def varlen(query: Tensor, key: Tensor, value: Tensor, cu: Tensor, cu_keys: Tensor, max_q: int, max_k: int,
           causal: bool = False, scale: float | None = None, window: Window = None, *rest:
           Any) -> tuple[Tensor, Tensor, Tensor]:
    """Attend within each sequence, as far as ``window`` reaches; queries [T, h, d], keys and values [T, hk, d]."""
    _check(query, cu, window)
    outs = []
    for asked, held in zip(_spans(cu), _spans(cu_keys)):
        q, k, v = (x[span].transpose(0, 1)[None].float() for x, span in ((query, asked), (key, held), (value, held)))
        seen = _sight(q.shape[2], k.shape[2], window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    lse = torch.zeros(query.shape[1], len(query))  # never read here
    return torch.cat(outs).to(query.dtype), lse, torch.zeros(2, dtype=torch.uint64)


def varlen_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu: Tensor,
                    cu_keys: Tensor, max_q: int, max_k: int, causal: bool, rng: Tensor, scale: float | None = None,
                    window: Window = None) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate :func:`varlen`; dS = P * (dP - sum(dP * P)), with P = softmax(S) and dP = G V^T."""
    scale = query.shape[-1]**-0.5 if scale is None else scale
    grads = [torch.zeros(x.shape) for x in (query, key, value)]
    for asked, held in zip(_spans(cu), _spans(cu_keys)):
        q, k, v, g = (x[span].transpose(0, 1).float()
                      for x, span in ((query, asked), (key, held), (value, held), (grad, asked)))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        probs = (q @ k.mT * scale).masked_fill(~_sight(q.shape[1], k.shape[1], window), -torch.inf).softmax(-1)
        slope = g @ v.mT
        slope = probs * (slope - (slope * probs).sum(-1, keepdim=True)) * scale
        for whole, span, part in zip(grads, (asked, held, held), (slope @ k, slope.mT @ q, probs.mT @ g)):
            whole[span] = part.unflatten(0, (whole.shape[1], -1)).sum(1).transpose(0, 1)
    return grads[0].to(query.dtype), grads[1].to(key.dtype), grads[2].to(value.dtype)


def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """Return the norm, rounded once, and the inverse root of the mean squares."""
    inverse = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + (eps or 0.0))
    out = x.float() * inverse
    return (out if weight is None else out * weight.float()).to(x.dtype), inverse


EMULATED: dict[Any, Callable[..., Any]] = {
    torch.ops.torch_attn._varlen_attn.default: varlen,
    torch.ops.torch_attn._varlen_attn_backward.default: varlen_backward,
    aten._fused_rms_norm.default: rms_norm,
    aten.mm.dtype: lambda a, b, dtype: torch.mm(a.to(dtype), b.to(dtype)),
    aten.bmm.dtype: lambda a, b, dtype: torch.bmm(a.to(dtype), b.to(dtype)),
    aten.mm.dtype_out: lambda a, b, dtype, out: torch.mm(a.to(dtype), b.to(dtype), out=out),
    aten.histc.default: lambda x, *rest, **named: torch.histc(x.float(), *rest, **named).to(x.dtype),
    aten.bmm.dtype_out: lambda a, b, dtype, out: torch.bmm(a.to(dtype), b.to(dtype), out=out),
}
