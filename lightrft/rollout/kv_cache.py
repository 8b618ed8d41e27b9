"""Key-value cache of the HF engine: one preallocated tensor of slots, and the attention that reads it.

The "packed" attention of :mod:`lightrft.models.attention` calls ``attend`` of the view that the engine passes as the
``kv_cache`` keyword of the model: :class:`Prefill` for whole prompts, :class:`Decode` for one token per live row.
"""
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightrft.models.attention import PackedLayout, attend, packed_attention
from lightrft.utils.errors import UserError

_ENGINE = nn.Identity()  # stands for the calling layer, which only error messages name


@dataclass(frozen=True)
class KVSpec:
    """What one token costs: layers x (key, value) x heads x dim."""
    layers: int
    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return self.layers * 2 * self.heads * self.dim * self.dtype.itemsize


class _Probe:

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, torch.dtype]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None,
               softcap: float | None = None) -> Tensor:
        if key.shape != value.shape:
            raise UserError(f"the HF engine needs keys and values of one shape, "
                            f"got {list(key.shape)} and {list(value.shape)}")
        # under autocast keys are float32 and attention casts them, so the dtype is that of the values
        self.shapes[layer] = (key.shape[1], key.shape[3], value.dtype)
        return query.transpose(1, 2)


@torch.no_grad()
def probe_spec(model: nn.Module) -> KVSpec:
    """Runs one token through ``model`` and reads off what its attention layers would cache."""
    probe = _Probe()
    zero = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    model(input_ids=zero, position_ids=zero, attention_mask=None, use_cache=False, kv_cache=probe)
    shapes = set(probe.shapes.values())
    if len(shapes) != 1 or sorted(probe.shapes) != list(range(len(probe.shapes))):
        raise UserError(f"the HF engine needs packed attention with equal key shapes in every layer; "
                        f"this {type(model).__name__} "
                        f"shows {probe.shapes or 'no attention layer at all'}")
    return KVSpec(len(probe.shapes), *shapes.pop())


class KVCache:
    """``data`` [layers, 2, slots, heads, length, dim]: row ``slot`` holds one sequence from position 0 on.

    ``bias`` [slots, length] is 0 where a position of the slot holds a token and -inf elsewhere (added to the scores).
    """

    def __init__(self, spec: KVSpec, slots: int, length: int, device: torch.device) -> None:
        self.spec, self.slots, self.length, self.device = spec, slots, length, device
        self.data = torch.zeros(spec.layers, 2, slots, spec.heads, length, spec.dim, dtype=spec.dtype, device=device)
        self.bias = torch.full((slots, length), -torch.inf, dtype=spec.dtype, device=device)

        self._flat = self.data.view(spec.layers, 2, -1, spec.dim)
        self._heads = torch.arange(spec.heads, device=device) * length

    def index(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Where token i of ``slots`` [k] and ``positions`` [k] lies, for :meth:`write`; int64 [k * heads]."""
        return (slots[:, None] * (self.spec.heads * self.length) + self._heads + positions[:, None]).flatten()

    def write(self, layer: int, part: int, index: Tensor, new: Tensor) -> None:
        """Store keys (part 0) or values (part 1) ``new`` [k, heads, dim] at ``index``."""
        self._flat[layer, part].index_copy_(0, index, new.reshape(-1, self.spec.dim).to(self.spec.dtype))

    def open(self, slots: Tensor, lengths: Tensor) -> None:
        """Start rows ``slots`` [k] with ``lengths`` [k] tokens each."""
        used = torch.arange(self.length, device=self.device) < lengths[:, None]
        self.bias[slots] = torch.where(used, 0.0, -torch.inf).to(self.bias.dtype)

    def save(self, slot: int, length: int) -> Tensor:
        """A copy [layers, 2, heads, length, dim] of the first ``length`` positions of a row."""
        return self.data[:, :, slot, :, :length].clone()

    def restore(self, slots: Tensor, saved: Tensor) -> None:
        """Write a saved beginning into every row of ``slots``."""
        self.data[:, :, slots, :, :saved.shape[3]] = saved[:, :, None]

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first ``length`` positions of rows ``source`` to rows ``target`` (no row is in both)."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]
        self.bias[target] = self.bias[source]


class Prefill:
    """Attention of whole prompts, packed one after another; what prompt ``source[i]`` caches goes to ``slots[i]``."""

    def __init__(self, cache: KVCache, lengths: list[int], source: Tensor, slots: Tensor) -> None:
        self.cache = cache
        counts = torch.tensor(lengths)
        ends = counts.cumsum(0)
        self.layout = PackedLayout(F.pad(ends, (1, 0)).to(cache.device, torch.int32), lengths)
        copies = counts[source]
        row = torch.repeat_interleave(copies)
        position = torch.arange(len(row)) - (copies.cumsum(0) - copies)[row]
        self.token = ((ends - counts)[source][row] + position).to(cache.device)  # what is copied ...
        self.index = cache.index(slots[row].to(cache.device), position.to(cache.device))  # ... and where to
        self.positions = (torch.arange(int(ends[-1])) - torch.repeat_interleave(ends - counts, counts)).to(cache.device)
        self.last = (ends - 1).to(cache.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None,
               softcap: float | None = None) -> Tensor:
        """Stores keys and values for every sample; causal attention within each prompt."""
        for part, new in enumerate((key, value)):
            self.cache.write(layer, part, self.index, new[0].transpose(0, 1)[self.token])
        return packed_attention(_ENGINE, query, key, value, None, scaling, sliding_window=window, softcap=softcap,
                                packing=self.layout)[0]


class Decode:
    """Attention of one new token per row over rows ``0..live-1``; ``advance`` comes before every forward pass."""

    def __init__(self, cache: KVCache) -> None:
        self.cache, self.rows = cache, torch.arange(cache.slots, device=cache.device)
        self.masks: dict[int | None, Tensor] = {}
        self.live = self.longest = 0

    def advance(self, positions: Tensor, live: int, longest: int) -> None:
        """The next pass feeds rows ``0..live-1`` at ``positions`` [live], none of them at or beyond ``longest``."""
        self.live, self.longest, self.positions = live, longest, positions
        self.cache.bias[self.rows[:live], positions] = 0
        self.index = self.cache.index(self.rows[:live], positions)
        self.masks = {None: self.cache.bias[:live, None, None, :longest]}

    def _mask(self, window: int | None) -> Tensor:
        if window is None or window >= self.longest:
            return self.masks[None]
        if window not in self.masks:
            far = torch.arange(self.longest, device=self.cache.device) <= self.positions[:, None] - window
            self.masks[window] = self.masks[None].masked_fill(far[:, None, None], -torch.inf)
        return self.masks[window]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None,
               softcap: float | None = None) -> Tensor:
        """Stores the new keys and values, then attends to all the rows hold; query heads of one group are rows."""
        live, spec = self.live, self.cache.spec
        for part, new in enumerate((key, value)):
            self.cache.write(layer, part, self.index, new[0].transpose(0, 1))
        keys, values = self.cache.data[layer, :, :live, :, :self.longest]
        query = query[0].transpose(0, 1).reshape(live, spec.heads, -1, spec.dim).to(spec.dtype)
        mask = self._mask(window)
        out = attend(query, keys, values, scaling, mask if softcap is None else mask == 0, softcap)
        return out.reshape(1, live, -1, spec.dim)
