"""Attention over packed sequences for every Hugging Face model that goes through ``AttentionInterface``.

Models run with ``attn_implementation="packed"`` on one row of T tokens, ``attention_mask=None``, ``position_ids`` that
restart with every sequence and ``packing=PackedLayout.build(cu_seqlens)``; Hugging Face hands unknown keyword arguments
of a forward call down to the attention function. No token sees another sequence, and no [T, T] mask is ever built.

CPU (and float32 on CUDA): sequences of more than ``SHORT`` tokens take one exact SDPA call each on a view; shorter
ones are gathered into rows of a few common widths, one call per width (under a causal mask padding on the right is
invisible).
CUDA in half precision: flash-attn when it can be imported, else ``torch.nn.attention.varlen``.
"""
import importlib.util
import inspect
from functools import cached_property, lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from lightrft.utils.logging import get_logger
from lightrft.utils.transfer import upload

PACKED = "packed"
SHORT = 64  # tokens; longer sequences are not padded (measured: the gather costs more than the saved calls)
_STEP = 16  # widths of the padded rows are multiples of this


class AttentionCache(Protocol):
    """Interface of the rollout engine's ``kv_cache=``: it stores keys and values and attends to all that it stored."""

    def attend(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None,
               sliding_window: int | None) -> Tensor:
        """Store and attend: queries [1, heads, T, d], keys and values [1, kv_heads, T, d] -> [1, T, heads, d].

        Models with capped scores (Gemma 2) also pass ``softcap=``.
        """


class PackedLayout:
    """Positions of the sequences in one packed row; built once per forward and shared by all layers.

    Not a dataclass: FSDP's mixed precision would hand every layer a copy of one. ``calls`` counts the attention layers
    that used it, so that a model which mixes tokens elsewhere is noticed.
    """

    def __init__(self, cu_seqlens: Tensor, lens: list[int]) -> None:
        self.cu_seqlens, self.lens = cu_seqlens, lens  # int32 [B + 1], on the device of the model; B ints
        self.calls = 0
        self._masks: dict[tuple[int, int], Tensor] = {}

    @classmethod
    def build(cls, cu_seqlens: Tensor, lens: list[int] | None = None) -> "PackedLayout":
        """The layout of ``cu_seqlens`` (int [B + 1]); without ``lens``, CUDA copies B integers to the host."""
        return cls(cu_seqlens.to(torch.int32), cu_seqlens.diff().tolist() if lens is None else lens)

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lens, default=0)

    @cached_property
    def _rows(self) -> tuple[list[tuple[int, int]], Tensor | None, Tensor | None]:
        """Groups (rows, width) in padded order; slot -> token; token -> slot (None: nothing moves)."""
        lens = torch.tensor(self.lens, dtype=torch.long)
        widths = torch.where(lens > SHORT, lens, (lens + _STEP - 1).div(_STEP, rounding_mode="floor") * _STEP)
        order = torch.where(lens > SHORT, SHORT + 1, widths).argsort(stable=True)
        values, counts = torch.unique_consecutive(widths[order][widths[order] <= SHORT], return_counts=True)
        groups = [(n, width) for n, width in zip(counts.tolist(), values.tolist()) if width]
        groups += [(1, length) for length in self.lens if length > SHORT]
        if not bool((lens <= SHORT).any()):
            return groups, None, None
        there, back = (upload(index, self.cu_seqlens.device) for index in _slots(lens[order], widths[order], order))
        return groups, there, back

    def window_mask(self, length: int, window: int) -> Tensor:
        """Bool [length, length]: position i sees the ``window`` positions that end with itself."""
        if (length, window) not in self._masks:
            index = torch.arange(length, device=self.cu_seqlens.device)
            back = index[:, None] - index[None, :]
            self._masks[length, window] = (back >= 0) & (back < window)
        return self._masks[length, window]


def _slots(lens: Tensor, widths: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Indices between the packed row and the padded rows of the sequences ``order`` (lens and widths in that order)."""
    starts = torch.empty_like(lens)
    starts[order] = lens  # back in packed order
    starts = (starts.cumsum(0) - starts)[order]
    row = torch.repeat_interleave(torch.arange(len(lens)), widths)
    column = torch.arange(len(row)) - (widths.cumsum(0) - widths)[row]
    real = column < lens[row]
    token_of_slot = starts[row] + torch.where(real, column, 0)  # padding repeats the first token: finite and unseen
    slot_of_token = torch.empty(int(lens.sum()), dtype=torch.long)
    slot_of_token[token_of_slot[real]] = real.nonzero()[:, 0]
    return token_of_slot, slot_of_token


class _Pad(torch.autograd.Function):
    """Pad [T, h, d] -> [slots, h, d]. Padding gets no gradient, so the backward is a gather too (no slow index_add)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of_slot: Tensor, slot_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_token)
        return x.index_select(0, token_of_slot)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Unpad(torch.autograd.Function):
    """Unpad [slots, h, d] -> [T, h, d]; zero gradient on padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_token)
        ctx.slots = len(x)
        return x.index_select(0, slot_of_token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.slots, *grad.shape[1:]).index_copy_(0, ctx.saved_tensors[0], grad), None


def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None, mask: Tensor | None = None,
           softcap: float | None = None) -> Tensor:
    """Attention of [B, h, Lq, d] to [B, hk, Lk, d] with grouped heads; ``mask`` (True = see) None means causal.

    With ``softcap`` c the scores are c * tanh(score / c) in float32 (Gemma 2, arXiv:2408.00118); memory [Lq, Lk].
    """
    grouped = query.shape[1] != key.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling,
                                              enable_gqa=grouped)
    if grouped:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    scale = query.shape[-1]**-0.5 if scaling is None else scaling
    scores = softcap * torch.tanh((query @ key.transpose(-1, -2)).float() * scale / softcap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).to(value.dtype) @ value


def _attend_rows(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None,
                 window: int | None, softcap: float | None) -> Tensor:
    """Attend in padded rows: queries [T, h, d], keys and values [T, hk, d] -> [T, h, d]; any device and dtype."""
    groups, token_of_slot, slot_of_token = layout._rows
    if token_of_slot is not None:
        query, key, value = (_Pad.apply(x, token_of_slot, slot_of_token) for x in (query, key, value))
    sizes = [rows * width for rows, width in groups]
    outs = []
    for (rows, width), *qkv in zip(groups, *(x.split(sizes) for x in (query, key, value))):
        q, k, v = (x.unflatten(0, (rows, width)).transpose(1, 2) for x in qkv)
        mask = layout.window_mask(width, window) if window and width > window else None
        outs.append(attend(q, k, v, scaling, mask, softcap).transpose(1, 2).flatten(0, 1))
    out = torch.cat(outs) if len(outs) > 1 else outs[0]
    return out if slot_of_token is None else _Unpad.apply(out, slot_of_token)


@lru_cache(maxsize=1)
def _flash_attn() -> Any:
    """``flash_attn_varlen_func``, or None when flash-attn is not installed, or cannot be imported (logged once).

    A spec is not enough: flash-attn-4 leaves a namespace package of that name, and a wheel may be for another torch.
    """
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        from flash_attn import flash_attn_varlen_func
    except (ImportError, OSError) as error:
        get_logger().warning(f"flash_attn cannot be used ({error}): attention on GPUs takes torch's varlen kernel")
        return None
    return flash_attn_varlen_func


@lru_cache(maxsize=1)
def _varlen_attn() -> tuple[Any, frozenset[str]]:
    """torch's ``varlen_attn`` and the names of its parameters, which differ between torch 2.10 and 2.13."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return None, frozenset()
    from torch.nn.attention.varlen import varlen_attn
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def _attend_varlen(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None,
                   window: int | None) -> Tensor | None:
    """Attend in half precision on CUDA with torch's own kernel; None when this torch cannot do it."""
    kernel, known = _varlen_attn()
    if kernel is None or not ({"window_size", "is_causal"} & known) or (window and "window_size" not in known):
        return None
    kwargs: dict[str, Any] = {"scale": scaling} if "scale" in known else {}
    if "scale" not in known and scaling is not None:
        query = query * (scaling * query.shape[-1]**0.5)
    if "window_size" in known:
        kwargs["window_size"] = (window - 1 if window else -1, 0)
    else:
        kwargs["is_causal"] = True
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in known:
            kwargs["enable_gqa"] = True
        else:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    cu = layout.cu_seqlens
    return kernel(query.contiguous(), key.contiguous(), value.contiguous(), cu, cu, layout.max_len, layout.max_len,
                  **kwargs)


def _attend_cuda(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None,
                 window: int | None, softcap: float | None) -> Tensor | None:
    """Attend with fused kernels in half precision; None when no kernel takes these tensors."""
    if query.dtype not in (torch.float16,
                           torch.bfloat16) or query.shape[-1] > 256 or query.shape[-1] != value.shape[-1]:
        return None
    flash = _flash_attn()
    if flash is None:
        return None if softcap else _attend_varlen(query, key, value, layout, scaling, window)
    cu, longest = layout.cu_seqlens, layout.max_len
    return flash(query, key, value, cu, cu, longest, longest, softmax_scale=scaling, causal=True, softcap=softcap
                 or 0.0, window_size=(window - 1 if window else -1, 0 if window else -1))


def packed_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                     scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
                     softcap: float | None = None, packing: PackedLayout | None = None,
                     kv_cache: AttentionCache | None = None, s_aux: Tensor | None = None,
                     position_bias: Tensor | None = None, **unused: Any) -> tuple[Tensor, None]:
    """The attention function registered as "packed": [1, h, T, d] -> [1, T, h, d].

    Raises:
        ValueError: no layout was given, or the model asks for something packed attention does not do.
    """
    for what, given in (("an attention mask", attention_mask), ("attention sinks", s_aux), ("a position bias",
                                                                                            position_bias)):
        if given is not None:
            raise ValueError(f"packed attention does not support {what} ({type(module).__name__})")
    if dropout:
        raise ValueError("packed attention has no dropout: set attention_dropout to 0 (lightrft.models.loader does)")
    if kv_cache is not None:
        extra = {} if softcap is None else {"softcap": softcap}
        layer: Any = module.layer_idx
        return kv_cache.attend(layer, query, key, value, scaling, sliding_window, **extra), None
    if packing is None:
        raise ValueError(
            f"packed attention got no packing=PackedLayout.build(cu_seqlens) in {type(module).__name__}: either it "
            "was called on its own (then call model.set_attn_implementation('sdpa') first), or its family drops "
            "keyword arguments on the way to attention and cannot be trained here")
    if query.shape[0] != 1 or query.shape[2] != sum(packing.lens):
        raise ValueError(
            f"packed attention takes one row of {sum(packing.lens)} tokens, got {tuple(query.shape)} [B, h, T, d]")
    packing.calls += 1
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = _attend_cuda(q, k, v, packing, scaling, sliding_window, softcap) if query.is_cuda else None
    out = _attend_rows(q, k, v, packing, scaling, sliding_window, softcap) if out is None else out
    return out.unsqueeze(0), None


def register() -> None:
    """Register "packed" with Hugging Face (done when this module is imported; a second call changes nothing).

    There is no mask function of that name: Hugging Face then builds no mask, and does not ask the device in every
    forward pass whether positions restart.
    """
    AttentionInterface.register(PACKED, packed_attention)


register()
