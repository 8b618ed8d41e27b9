"""Attention over packed sequences for every Hugging Face model that goes through ``AttentionInterface``.

Models run with ``attn_implementation="packed"`` on one row of T tokens, ``attention_mask=None``, ``position_ids`` that
restart with every sequence and ``packing=PackedLayout.build(cu_seqlens)``; Hugging Face hands unknown keyword arguments
of a forward call down to the attention function. No token sees another sequence, and no [T, T] mask is ever built.

CPU (and float32 on CUDA): sequences of more than ``SHORT`` tokens take one exact SDPA call each on a view; shorter
ones are gathered into rows of a few common widths, one call per width (under a causal mask padding on the right is
invisible).
CUDA in half precision: flash-attn when it can be imported, else ``torch.nn.attention.varlen``.
"""
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from lightrft.models.attention_kernels import flash_kernel, takes_groups, varlen_kernel
from lightrft.models.state_rows import StateRows
from lightrft.ops.segment import RowGather
from lightrft.utils.tensors import upload

PACKED = "packed"
# Towers hand the bounds of segments to what is called flash; for others the host reads them, and splits by them.
SEGMENTED = "segmented_flash"
SHORT = 64  # tokens; longer sequences are not padded (measured: the gather costs more than the saved calls)
HALF = (torch.float16, torch.bfloat16)  # what fused kernels compute in
_STEP = 16  # widths of the padded rows are multiples of this


class AttentionCache(Protocol):
    """Interface of the rollout engine's ``kv_cache=``: it stores keys and values and attends to all that it stored."""

    def attend(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None,
               sliding_window: int | None) -> Tensor:
        """Store and attend: queries [1, heads, T, d], keys and values [1, kv_heads, T, d] -> [1, T, heads, d].

        Models with capped scores (Gemma 2) also pass ``softcap=``.
        """


class _Group(NamedTuple):
    """Rows of one attention call: of ``queries`` and of ``keys`` tokens each, padded on the right.

    ``skips``: leading keys of each row that have no query; one number if it is the same in all. ``blocks``: the
    sequence whose blocks count; -1: none.
    """
    rows: int
    queries: int
    keys: int
    skips: tuple[int, ...] = (0, )
    blocks: int = -1


class _Rows(NamedTuple):
    """Calls over a packed row, in the order of the padded rows, and the way there and back (None: nothing moves)."""
    groups: list[_Group]
    queries: RowGather | None = None
    keys: RowGather | None = None
    out: RowGather | None = None


class PackedLayout:
    """Positions of the sequences in one packed row; built once per forward and shared by all layers.

    A sequence may *continue* an earlier one, its prefix: its tokens attend to the whole prefix and their own past. So a
    common beginning of several sequences is in the row, and computed, only once.

    Not a dataclass: FSDP's mixed precision would hand every layer a copy of one. ``calls`` counts the attention layers
    that used it, so that a model which mixes tokens elsewhere is noticed. ``blocks`` (int [T], on the CPU; None: none):
    tokens of a sequence with one id >= 0, those of a picture, also see those after them; with ``blocks_in_windows``
    only in layers with a sliding window.

    Args:
        cu_seqlens: int32 [B + 1], on the device of the model.
        lens: tokens of the sequences.
        before: index of the prefix of each sequence, which has none itself; -1: none. None: no sequence has one.
    """
    blocks_in_windows = False

    def __init__(self, cu_seqlens: Tensor, lens: list[int], before: list[int] | None = None) -> None:
        self.cu_seqlens, self.lens, self.before = cu_seqlens, lens, before
        self.blocks: Tensor | None = None
        self.calls = 0
        self._masks: dict[tuple[_Group, int | None], Tensor] = {}

    @classmethod
    def build(cls, cu_seqlens: Tensor, lens: list[int] | None = None,
              before: list[int] | None = None) -> "PackedLayout":
        """The layout of ``cu_seqlens`` (int [B + 1]); without ``lens``, CUDA copies B integers to the host."""
        return cls(cu_seqlens.to(torch.int32), cu_seqlens.diff().tolist() if lens is None else lens, before)

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence, without its prefix."""
        return max(self.lens, default=0)

    @cached_property
    def whole_lens(self) -> list[int]:
        """Tokens of the whole sequence that each one is a part of: with its prefix; of a prefix the longest of them."""
        lens = list(self.lens)
        for number, prefix in enumerate(self.before or ()):
            if prefix >= 0:
                lens[number] += self.lens[prefix]
                lens[prefix] = max(lens[prefix], lens[number])
        return lens

    @cached_property
    def _with_blocks(self) -> dict[int, Tensor]:
        """Ids of the blocks of each sequence that has any, by its index."""
        parts = () if self.blocks is None else self.blocks.split(self.lens)
        return {index: ids for index, ids in enumerate(parts) if bool((ids >= 0).any())}

    @cached_property
    def _starts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens before each sequence, before its prefix, and in its prefix; int64 [B] on the host."""
        lens = torch.tensor(self.lens, dtype=torch.long)
        starts = lens.cumsum(0) - lens
        if self.before is None:
            return starts, starts, torch.zeros_like(lens)
        before = torch.tensor(self.before)
        return starts, starts[before], torch.where(before < 0, 0, lens[before])

    @cached_property
    def seen(self) -> "PackedLayout":
        """The layout of what each sequence sees: its prefix and itself."""
        if self.before is None:
            return self
        lens = torch.tensor(self.lens) + self._starts[2]
        return PackedLayout(upload(F.pad(lens.cumsum(0), (1, 0)).int(), self.cu_seqlens.device), lens.tolist())

    @cached_property
    def copies(self) -> RowGather:
        """Gather of the keys (values) that :attr:`seen` describes."""
        lens = torch.tensor(self.seen.lens)
        tokens, _, real = self._slots(torch.arange(len(lens)), lens, torch.zeros_like(lens))
        return RowGather(tokens, sum(self.lens), self.cu_seqlens.device, real)

    @cached_property
    def state_rows(self) -> StateRows:
        """The calls of layers with state."""
        return StateRows(self.lens, self.before, self.cu_seqlens.device)

    @cached_property
    def _rows(self) -> _Rows:
        """Padded rows. Long sequences, and those with blocks, are rows of their own.

        The queries of a prefix are computed again with a longer sequence: a causal kernel skips what is not seen, while
        under a mask it would be computed.
        """
        own, shared = torch.tensor(self.lens, dtype=torch.long), self._starts[2]
        keys = torch.where(own > 0, own + shared, 0)
        skips = torch.where((own < shared) | (keys <= SHORT), shared, 0) * (own > 0)
        alone = keys > SHORT
        alone[list(self._with_blocks)] = True
        widths = torch.stack([torch.where(alone, n, (n + _STEP - 1).div(_STEP, rounding_mode="floor") * _STEP)
                              for n in (keys - skips, keys)])  # yapf: disable
        order = torch.where(alone, (SHORT + 1)**2, widths[1] * (SHORT + 1) + widths[0]).argsort(stable=True)
        groups = self._groups(order[~alone[order]], widths, skips)
        groups += [_Group(1, int(widths[0, i]), int(widths[1, i]), (int(skips[i]), ),
                          i if i in self._with_blocks else -1) for i in order[alone[order]].tolist()]  # yapf: disable
        if bool(alone.all()) and self.before is None:
            return _Rows(groups)
        gather = partial(RowGather, device=self.cu_seqlens.device)
        (asked, mine, _), (seen, _, real) = (self._slots(order, each[order], skip[order])
                                             for each, skip in zip(widths, (skips, torch.zeros_like(skips))))
        slots = mine.nonzero()[:, 0]
        out = torch.empty_like(slots)
        out[asked[slots]] = slots
        total = len(slots)
        return _Rows(groups, gather(asked, total, used=mine), gather(seen, total, used=real), gather(out, len(asked)))

    def _groups(self, order: Tensor, widths: Tensor, skips: Tensor) -> list[_Group]:
        """Group the short sequences ``order`` by their widths [2, B], of queries and keys."""
        values, counts = torch.unique_consecutive(widths[:, order], return_counts=True, dim=1)
        groups = []
        for (queries, keys), some in zip(values.T.tolist(), skips[order].split(counts.tolist())):
            same = bool((some == some[0]).all())
            if keys:
                groups.append(_Group(len(some), queries, keys, tuple(some[:1].tolist() if same else some.tolist())))
        return groups

    def _slots(self, order: Tensor, widths: Tensor, skips: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of the padded rows of the sequences ``order``, of ``widths``, without their first ``skips`` tokens.

        Return the token of each slot, whether it is of the sequence itself, and whether it is of that or its prefix.
        Padding repeats the first token: finite and unseen.
        """
        starts, heads, shared = (each[order] for each in self._starts)
        row = torch.repeat_interleave(torch.arange(len(order)), widths)
        column = torch.arange(len(row)) - (widths.cumsum(0) - widths)[row] + skips[row]
        lens = torch.tensor(self.lens, dtype=torch.long)[order] + shared
        real, starts, heads, shared = column < lens[row], starts[row], heads[row], shared[row]
        column = torch.where(real, column, 0)
        own = column >= shared
        return torch.where(own, starts + column - shared, heads + column), real & own, real

    def mask(self, group: _Group, window: int | None) -> Tensor | None:
        """Bool [rows or 1, 1, queries, keys]: a query sees a key, as far as ``window`` reaches back; None: all up to
        its own."""
        if self.blocks_in_windows and not window:
            group = group._replace(blocks=-1)
        if group.blocks < 0 and not any(group.skips) and (not window or group.keys <= window):
            return None
        known = group._replace(rows=len(group.skips)), window
        if known not in self._masks:
            device = self.cu_seqlens.device
            query = torch.arange(group.queries, device=device) + upload(torch.tensor(group.skips), device)[:, None]
            back = query[..., None] - torch.arange(group.keys, device=device)
            seen = back >= 0
            if group.blocks >= 0:
                ids = self._with_blocks[group.blocks]
                ids = upload(F.pad(ids, (group.keys - len(ids), 0), value=-1), device)  # a prefix has blocks of its own
                asked = ids[group.skips[0]:, None]
                seen |= (asked == ids) & (asked >= 0)
            self._masks[known] = (seen & (back < window) if window else seen)[:, None]
        return self._masks[known]


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
    rows = layout._rows
    if rows.queries is not None and rows.keys is not None:
        query, key, value = rows.queries(query), rows.keys(key), rows.keys(value)
    asked, seen = ([group.rows * width for group, width in zip(rows.groups, widths)]
                   for widths in zip(*((group.queries, group.keys) for group in rows.groups)))
    outs = []
    for group, q, k, v in zip(rows.groups, query.split(asked), key.split(seen), value.split(seen)):
        q, k, v = (x.unflatten(0, (group.rows, -1)).transpose(1, 2) for x in (q, k, v))
        outs.append(attend(q, k, v, scaling, layout.mask(group, window), softcap).transpose(1, 2).flatten(0, 1))
    out = torch.cat(outs) if len(outs) > 1 else outs[0]
    return out if rows.out is None else rows.out(out)


def _attend_varlen(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None,
                   window: int | None, causal: bool = True) -> Tensor | None:
    """Attend in half precision on CUDA with torch's own kernel; None when this torch cannot do it."""
    kernel, known = varlen_kernel()
    if kernel is None or not ({"window_size", "is_causal"} & known) or (window and "window_size" not in known):
        return None
    kwargs: dict[str, Any] = {"scale": scaling} if "scale" in known else {}
    if "scale" not in known and scaling is not None:
        query = query * (scaling * query.shape[-1]**0.5)
    if "window_size" in known:
        kwargs["window_size"] = (window - 1 if window else -1, 0 if causal else -1)
    else:
        kwargs["is_causal"] = causal
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in known:
            kwargs["enable_gqa"] = True
        elif not takes_groups(kernel, known, query.device.type):
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    return kernel(query.contiguous(), key.contiguous(), value.contiguous(), layout.cu_seqlens, layout.seen.cu_seqlens,
                  layout.max_len, layout.seen.max_len, **kwargs)


def _attend_cuda(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None,
                 window: int | None, softcap: float | None, causal: bool = True) -> Tensor | None:
    """Attend with fused kernels in half precision; None when no kernel takes these tensors."""
    width = query.shape[-1]
    if query.dtype not in HALF or width > 256 or width % 8 or width != value.shape[-1] or layout._with_blocks:
        return None
    if layout.before is not None:
        key, value = layout.copies(key), layout.copies(value)
    flash = flash_kernel()
    if flash is None:
        return None if softcap else _attend_varlen(query, key, value, layout, scaling, window, causal)
    seen = layout.seen
    return flash(query, key, value, layout.cu_seqlens, seen.cu_seqlens, layout.max_len, seen.max_len,
                 softmax_scale=scaling, causal=causal, softcap=softcap or 0.0,
                 window_size=(window - 1 if window else -1, 0 if window else -1))


def _attend_stored(cache: AttentionCache, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None,
                   window: int | None, softcap: float | None) -> Tensor:
    """Attend through a cache, whose keys and values have one width: zeros fill up those that are narrower (the values
    of multi-head latent attention), and change no number."""
    extra, width, widest = {} if softcap is None else {"softcap": softcap}, value.shape[-1], key.shape[-1]
    if width == widest:
        return cache.attend(layer, query, key, value, scaling, window, **extra)
    scale, most = widest**-0.5 if scaling is None else scaling, max(width, widest)
    query, key, value = (F.pad(x, (0, most - x.shape[-1])) for x in (query, key, value))
    return cache.attend(layer, query, key, value, scale, window, **extra)[..., :width]


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
        layer: Any = module.layer_idx
        return _attend_stored(kv_cache, layer, query, key, value, scaling, sliding_window, softcap), None
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


def _attend_segments(query: Tensor, key: Tensor, value: Tensor, lens: list[int], scaling: float | None) -> Tensor:
    """Attend in both directions within segments of ``lens`` tokens, [T, h, d] each; any device and dtype.

    Neighbours of one length, such as the windows of a picture, are rows of one call.
    """
    runs = [(length, len(list(same))) for length, same in groupby(lens)]
    outs = []
    for (length, count), *qkv in zip(runs, *(x.split([n * rows for n, rows in runs]) for x in (query, key, value))):
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)
        outs.append(F.scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2).flatten(0, 1))
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def segmented_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                        scaling: float | None = None, cu_seq_lens_q: Tensor | None = None,
                        segments: list[PackedLayout] | None = None, **unused: Any) -> tuple[Tensor, None]:
    """The attention of towers over several pictures, frames, windows or sounds: [1, h, T, d] -> [1, T, h, d].

    ``segments`` has the layout whose bounds are ``cu_seq_lens_q``; without it the host asks the device for them.
    """
    if cu_seq_lens_q is None:
        raise ValueError(f"{type(module).__name__} gives no segment bounds, which the attention of its tower needs")
    layout = next((known for known in segments or () if known.cu_seqlens is cu_seq_lens_q), None)
    layout = PackedLayout.build(cu_seq_lens_q) if layout is None else layout
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = _attend_cuda(q, k, v, layout, scaling, None, None, causal=False) if query.is_cuda else None
    return (_attend_segments(q, k, v, layout.lens, scaling) if out is None else out)[None], None


def register() -> None:
    """Register "packed" and "segmented_flash" with Hugging Face (done when this module is imported; a second call
    changes nothing).

    There are no mask functions of these names: Hugging Face then builds no mask, and does not ask the device in every
    forward pass whether positions restart.
    """
    AttentionInterface.register(PACKED, packed_attention)
    AttentionInterface.register(SEGMENTED, segmented_attention)


register()
