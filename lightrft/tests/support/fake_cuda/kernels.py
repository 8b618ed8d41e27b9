"""Operators that exist on CUDA only, computed on the CPU: attention of torch's varlen kernel, products into float32."""
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.varlen  # noqa: F401  (registers the operators)
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
Window = list[int] | None


def _sight(length: int, window: Window) -> Tensor:
    """Bool [length, length]: causal, and at most ``window[0]`` tokens back unless that is negative."""
    back = torch.arange(length)[:, None] - torch.arange(length)
    seen = back >= 0
    return seen & (back <= window[0]) if window and window[0] >= 0 else seen


def _check(query: Tensor, cu: Tensor, window: Window) -> None:
    """Refuse what the real kernel refuses."""
    assert query.dtype in (torch.bfloat16, torch.float16), f"flash attention takes half precision, not {query.dtype}"
    assert cu.dtype == torch.int32 and query.is_contiguous() and query.shape[-1] <= 256
    assert window is None or window[1] == 0, "this emulation is causal"


def varlen(query: Tensor, key: Tensor, value: Tensor, cu: Tensor, cu_keys: Tensor, max_q: int, max_k: int,
           causal: bool = False, scale: float | None = None, window: Window = None, *rest:
           Any) -> tuple[Tensor, Tensor, Tensor]:
    """Attend causally within each sequence; queries [T, h, d], keys and values [T, hk, d]."""
    _check(query, cu, window)
    outs, ends = [], cu.tolist()
    for start, end in zip(ends, ends[1:]):
        q, k, v = (x[start:end].transpose(0, 1)[None].float() for x in (query, key, value))
        seen = _sight(end - start, window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    lse = torch.zeros(query.shape[1], len(query))  # never read here
    return torch.cat(outs).to(query.dtype), lse, torch.zeros(2, dtype=torch.uint64)


def varlen_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu: Tensor,
                    cu_keys: Tensor, max_q: int, max_k: int, causal: bool, rng: Tensor, scale: float | None = None,
                    window: Window = None) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate :func:`varlen`; dS = P * (dP - sum(dP * P)), with P = softmax(S) and dP = G V^T."""
    scale = query.shape[-1]**-0.5 if scale is None else scale
    ends, grads = cu.tolist(), [torch.zeros(x.shape) for x in (query, key, value)]
    for start, end in zip(ends, ends[1:]):
        q, k, v, g = (x[start:end].transpose(0, 1).float() for x in (query, key, value, grad))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        probs = (q @ k.mT * scale).masked_fill(~_sight(end - start, window), -torch.inf).softmax(-1)
        slope = g @ v.mT
        slope = probs * (slope - (slope * probs).sum(-1, keepdim=True)) * scale
        for whole, part in zip(grads, (slope @ k, slope.mT @ q, probs.mT @ g)):
            whole[start:end] = part.unflatten(0, (whole.shape[1], -1)).sum(1).transpose(0, 1)
    return grads[0].to(query.dtype), grads[1].to(key.dtype), grads[2].to(value.dtype)


EMULATED: dict[Any, Callable[..., Any]] = {
    torch.ops.torch_attn._varlen_attn.default: varlen,
    torch.ops.torch_attn._varlen_attn_backward.default: varlen_backward,
    aten.mm.dtype: lambda a, b, dtype: torch.mm(a.to(dtype), b.to(dtype)),
    aten.bmm.dtype: lambda a, b, dtype: torch.bmm(a.to(dtype), b.to(dtype)),
    aten.mm.dtype_out: lambda a, b, dtype, out: torch.mm(a.to(dtype), b.to(dtype), out=out),
    aten.bmm.dtype_out: lambda a, b, dtype, out: torch.bmm(a.to(dtype), b.to(dtype), out=out),
}
