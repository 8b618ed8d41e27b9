"""Key-value cache of the HF engine, preallocated, and the attention that reads it.

A prompt is stored and read once for all its samples; each sample's own row holds its response only.

The "packed" attention of :mod:`lightrft.models.attention` calls ``attend`` of the view that the engine passes as the
``kv_cache`` keyword of the model: :class:`Prefill` for whole sequences, :class:`Decode` for one token per live row,
:class:`Extend` for what is appended to rows, and :class:`Joined` for both in one pass.
Layers with state call ``mix`` of the same view (:mod:`lightrft.rollout.hf.states`).
"""
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from lightrft.models.attention import PackedLayout, packed_attention
from lightrft.models.state_rows import Layer
from lightrft.rollout.hf.cache_plan import KVPlan, KVSpec
from lightrft.rollout.hf.states import Runs, runs_of, StateStore
from lightrft.utils.tensors import upload

_BLAS = 400  # multiplications of one product of a batch, below which PyTorch takes a slow loop of its own instead
_ENGINE = nn.Identity()  # stands for the calling layer, which only error messages name


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros; on a CPU the memory is taken where it is written, and most rows stay short of their length."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    data = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)


class Store:
    """Keys and values of ``count`` sequences, ``data`` [layers, 2, count, heads, length, dim], and their ``states``.

    Layers are named by their index in the model, where some may have no attention.
    """

    def __init__(self, spec: KVSpec, count: int, length: int, device: torch.device) -> None:
        self.data = _zeros((len(spec.layers), 2, count, spec.heads, length, spec.dim), spec.dtype, device)
        self.layers = dict(zip(spec.layers, self.data.unbind()))
        self._flat = dict(zip(spec.layers, [layer.unbind() for layer in self.data.flatten(2, 4).unbind()]))
        self.states = StateStore(spec.states, count, device)
        self.first = torch.arange(0, count * spec.heads * length, length, device=device).view(count, spec.heads)

    def write(self, layer: int, index: Tensor, *new: Tensor) -> None:
        """Write a layer's keys and values [1, heads, k, dim]; ``index`` [k * heads]: ``first[sequence] + position``."""
        for part, tokens in zip(self._flat[layer], new):
            part.index_copy_(0, index, tokens[0].transpose(0, 1).reshape(-1, part.shape[1]).to(part.dtype))

    def write_pairs(self, layer: int, index: Tensor, new: Tensor) -> None:
        """Write a layer's keys and values together: [n, 2, dim] at ``index`` [n], as in :meth:`write`."""
        pairs = self.layers[layer].flatten(1, 3)
        pairs.transpose(0, 1).index_put_((index, ), new)

    def views(self, count: int, length: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys [count * heads, dim, length] and values [count * heads, length, dim] of each layer."""
        parts = self.data[:, :, :count, :, :length].flatten(2, 3)
        return dict(zip(self.layers, zip(parts[:, 0].mT.unbind(), parts[:, 1].unbind())))

    def move(self, source: Tensor, target: Tensor, length: int | None = None) -> None:
        """Let sequences ``target`` have what ``source`` have, the first ``length`` tokens (None: all)."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]
        self.states.copy(self.states, source, target)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states."""
        return self.data.nbytes + self.states.nbytes


class KVCache:
    """The two stores of one plan: ``prompts``, and ``rows`` for what follows them."""

    def __init__(self, spec: KVSpec, plan: KVPlan, device: torch.device) -> None:
        self.spec, self.plan, self.device = spec, plan, device
        self.prompts = Store(spec, plan.prompts, plan.prompt_len, device)
        self.rows = Store(spec, plan.slots, plan.length, device)

    def fork(self, prompts: list[int], slots: np.ndarray) -> None:
        """Let rows ``slots`` begin with the states after the prompts of their prompt slots."""
        if self.spec.states and prompts:
            source, to = (upload(torch.as_tensor(index), self.device) for index in (prompts, slots))
            self.rows.states.copy(self.prompts.states, source, to)

    def runs(self, lens: Sequence[int], slots: np.ndarray) -> Runs:
        """Calls of the layers with state over sequences of ``lens`` tokens, in ``slots``; without such layers none."""
        return runs_of(lens, slots, self.device) if self.spec.states else []


class Prefill:
    """Attention of whole sequences, packed one after another. Prompt i is stored in prompt slot ``slots[i]``; with
    ``skip``, sequence i is stored in row ``slots[i]``, from token ``skip[i]`` (the end of its prompt) on."""

    def __init__(self, cache: KVCache, layout: PackedLayout, slots: np.ndarray, skip: np.ndarray | None = None) -> None:
        counts = torch.tensor(layout.lens)
        ends = counts.cumsum(0)
        self.store, self.last = cache.prompts if skip is None else cache.rows, upload(ends - 1, cache.device)
        self.layout, self.runs = layout, cache.runs(layout.lens, slots)
        positions = torch.arange(int(ends[-1])) - torch.repeat_interleave(ends - counts, counts)
        slot = torch.repeat_interleave(torch.from_numpy(slots), counts)
        self.kept: slice | Tensor = slice(None)
        if skip is not None:
            positions = positions - torch.repeat_interleave(torch.from_numpy(skip), counts)
            kept = (positions >= 0).nonzero()[:, 0]
            slot, positions, self.kept = slot[kept], positions[kept], upload(kept, cache.device)
        self.index = (self.store.first[upload(slot, cache.device)] + upload(positions, cache.device)[:, None]).flatten()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None,
               softcap: float | None = None) -> Tensor:
        """Store keys and values; attend within each sequence."""
        self.store.write(layer, self.index, key[:, :, self.kept], value[:, :, self.kept])
        return packed_attention(_ENGINE, query, key, value, None, scaling, sliding_window=window, softcap=softcap,
                                packing=self.layout)[0]

    def mix(self, layer_idx: int, hidden: Tensor, layer: Layer) -> list[Tensor]:
        """Run a layer with state over each sequence from its beginning; store the states at the ends."""
        return self.store.states.over(layer_idx, hidden, layer, self.runs, begun=False, at_once=True)


def _product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Batched matrix product in float32, also of half precision (scores rounded to bfloat16 are off by percents)."""
    if left.dtype == torch.float32:
        return torch.bmm(left, right, out=out)
    if not left.is_cuda:
        return torch.bmm(left.float(), right.float(), out=out)
    if out is None:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left, right, out_dtype=torch.float32, out=out)


def _bias(seen: Tensor) -> Tensor:
    """Return the bias of scores with which queries see the tokens of ``seen`` alone."""
    return torch.where(seen, 0.0, -torch.inf)


def _kernel() -> Callable[..., Tensor]:
    """The kernel of ``--fused_decode``; it imports Triton."""
    from lightrft.rollout.hf.attention_kernel import attend
    return attend


def sizes(prompt_slots: np.ndarray, lengths: np.ndarray) -> tuple[int, int, int, int]:
    """Count rows, prompt slots, samples of the prompt with the most, and tokens of the longest prompt; arguments as of
    :meth:`Decode.arrange`."""
    counts = np.bincount(prompt_slots[prompt_slots >= 0])
    return len(prompt_slots), len(counts), int(counts.max()), int(lengths.max())


class Decode:
    """Attention of one new token per row over its prompt and its own row.

    ``arrange`` is called whenever rows or prompts have changed, ``advance`` before every forward pass. One matrix
    product multiplies all queries of a prompt with its keys, padded to the most samples a prompt has:
    [prompts * heads, width, dim]. With ``one_kernel`` a kernel in Triton takes the place of all these products.
    """

    def __init__(self, cache: KVCache, one_kernel: bool = False) -> None:
        self.cache, self.one_kernel = cache, one_kernel
        self.columns = torch.arange(max(cache.plan.length, cache.plan.prompt_len), device=cache.device)
        self.least = min(-(-_BLAS // cache.spec.dim), cache.plan.length)
        self._held: dict[tuple[int, ...], list[Tensor]] = {}  # arrays of an arrangement, by its shape

    def arrange(self, prompt_slots: np.ndarray, lengths: np.ndarray, shape: tuple[int, ...],
                stay: bool = False) -> None:
        """Let row i read ``lengths[i]`` tokens of ``prompt_slots[i]`` (-1: a free row, which reads none).

        ``shape``: what :func:`sizes` says, or more; rows that are added are free. ``stay``: an arrangement of the same
        ``shape`` as an earlier one is copied to where a graph reads that one.
        """
        self.shape = self.live, self.prompts, width, self.longest = shape
        if added := self.live - len(prompt_slots):
            prompt_slots = np.pad(prompt_slots, (0, added), constant_values=-1)
            lengths = np.pad(lengths, (0, added))
        heads, rows = np.arange(self.cache.spec.heads), np.flatnonzero(prompt_slots >= 0)
        rows = rows[np.argsort(prompt_slots[rows], kind="stable")]
        counts = np.bincount(prompt_slots[rows])
        rank = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
        index = (prompt_slots[rows, None] * len(heads) + heads) * width + rank[:, None]
        to_rows = np.zeros((self.live, len(heads)), dtype=np.int64)
        to_rows[rows] = index
        to_prompts = np.zeros(self.prompts * len(heads) * width, dtype=np.int64)
        to_prompts[index] = rows[:, None] * len(heads) + heads
        self._place([to_rows.ravel(), to_prompts, lengths, *([prompt_slots] if self.one_kernel else [])], stay)
        self.shared = self.cache.prompts.views(self.prompts, self.longest)

    def _place(self, arrays: list[np.ndarray], stay: bool) -> None:
        """Copy the arrays of an arrangement to the device; with ``stay`` to those of its shape."""
        new = [upload(torch.from_numpy(x), self.cache.device) for x in arrays]
        held = self._held.setdefault(self.shape, new) if stay else new
        for tensor, values in zip(held, new):
            if tensor is not values:
                tensor.copy_(values)
        self.to_rows, self.to_prompts, self.lengths, self.slots = held[0], held[1], held[2][:, None], held[-1]

    def advance(self, newest: Tensor, width: int, draws: Tensor) -> None:
        """Prepare the next pass, whose tokens have index ``newest`` [live] in their rows, all below ``width``; rows
        that do not draw (``draws`` [live] is 0) keep their states."""
        self.width, self.newest, self.draws = max(width, self.least), newest[:, None], draws
        self.index = (self.cache.rows.first[:self.live] + self.newest).flatten()
        self.own = self.cache.rows.views(self.live, self.width)
        seen = torch.cat([self.columns[:self.longest] < self.lengths, self.columns[:self.width] <= self.newest], 1)
        self.masks: dict[int | None, Tensor] = {None: _bias(seen)[:, None, None]}

    def _mask(self, window: int | None) -> Tensor:
        if window is None or window >= self.longest + self.width:
            return self.masks[None]
        if window not in self.masks:
            positions = torch.cat(
                [self.columns[:self.longest].expand(self.live, -1), self.lengths + self.columns[:self.width]], 1)
            near = positions > self.lengths + self.newest - window
            self.masks[window] = self.masks[None] + _bias(near)[:, None, None]
        return self.masks[window]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None,
               softcap: float | None = None) -> Tensor:
        """Store the new keys and values, then attend; query heads of one group are rows of a product."""
        spec = self.cache.spec
        self.cache.rows.write(layer, self.index, key, value)
        query = query[0].transpose(0, 1).reshape(self.live * spec.heads, -1, spec.dim).to(spec.dtype)
        if self.one_kernel:
            return self._in_one(layer, query, scaling, window, softcap).view(1, self.live, -1, spec.dim)
        shared_keys, keys = self.shared[layer][0], self.own[layer][0]
        shared = self._ungroup(_product(self._group(query), shared_keys))
        scores = torch.cat([shared, _product(query, keys)], -1).mul_(spec.dim**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores.view(self.live, spec.heads, *scores.shape[1:]).add_(self._mask(window))
        return self._weighted(layer, scores).view(1, self.live, -1, spec.dim)

    def attend_packed(self, layer: int, scaling: float | None, window: int | None, packed: Tensor) -> Tensor:
        """Store and attend as :meth:`attend`, in fewer kernels: [live, heads, n + 2, dim], of each group of heads n
        queries, the key and the value, to [live, heads * n * dim]."""
        packed = packed.flatten(0, 1)
        self.cache.rows.write_pairs(layer, self.index, packed[:, -2:])
        if self.one_kernel:
            return self._in_one(layer, packed[:, :-2], scaling, window)
        return self._weighted(layer, self._scores(layer, packed[:, :-2], scaling, window)).view(self.live, -1)

    def _in_one(self, layer: int, query: Tensor, scaling: float | None, window: int | None,
                softcap: float | None = None) -> Tensor:
        """Attend [live * heads, n, dim] to [live, heads * n * dim] in one kernel."""
        stores, scale = (self.cache.prompts, self.cache.rows), self.cache.spec.dim**-0.5 if scaling is None else scaling
        keys_values = (store.layers[layer] for store in stores)
        return _kernel()(query, *keys_values, self.slots, self.lengths, self.newest, scale, window, softcap)

    def _scores(self, layer: int, query: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """Scores [live * heads, n, keys] of queries [live * heads, n, dim], with the mask: products write into one
        tensor, which saves launches, and time on GPUs alone."""
        shared_keys, keys = self.shared[layer][0], self.own[layer][0]
        scores = query.new_empty(*query.shape[:2], self.longest + self.width, dtype=torch.float32)
        shared = _product(self._group(query), shared_keys).view(len(self.to_prompts), -1, self.longest)
        torch.index_select(shared, 0, self.to_rows, out=scores[..., :self.longest])
        _product(query, keys, scores[..., self.longest:])
        rows, factor = scores.unflatten(0, (self.live, -1)), self.cache.spec.dim**-0.5 if scaling is None else scaling
        return torch.add(self._mask(window), rows, alpha=factor, out=rows).flatten(0, 1)

    def _weighted(self, layer: int, scores: Tensor) -> Tensor:
        """Means of the values [live * heads, n, dim] under the softmax of ``scores``."""
        shared_values, values = self.shared[layer][1], self.own[layer][1]
        weights = scores.softmax(-1).to(self.cache.spec.dtype)
        shared = self._ungroup(torch.bmm(self._group(weights[..., :self.longest]), shared_values))
        return shared.baddbmm_(weights[..., self.longest:], values)

    def _group(self, x: Tensor) -> Tensor:
        """Group rows by prompt: [live * heads, n, d] -> [prompts * heads, width * n, d]."""
        return x.index_select(0, self.to_prompts).view(self.prompts * self.cache.spec.heads, -1, x.shape[-1])

    def _ungroup(self, x: Tensor) -> Tensor:
        """Undo :meth:`_group`."""
        return x.view(len(self.to_prompts), -1, x.shape[-1]).index_select(0, self.to_rows)  # faster than x[i] on CPUs

    def mix(self, layer_idx: int, hidden: Tensor, layer: Layer) -> list[Tensor]:
        """Run a layer with state over the new token of each row."""
        return self.cache.rows.states.step(layer_idx, hidden, layer, self.draws)


class Extend:
    """Attention of the tokens that are appended to rows, packed one row after another, over prompt and row.

    Row ``slots[i]``, behind ``lengths[i]`` tokens of ``prompt_slots[i]``, gets ``counts[i]`` tokens, the first of which
    has the index ``begins[i]`` in the row. Rows are padded to the longest: a call should take a few alike.
    """

    def __init__(self, cache: KVCache, prompt_slots: np.ndarray, lengths: np.ndarray, slots: np.ndarray,
                 begins: np.ndarray, counts: np.ndarray) -> None:
        self.cache, self.most = cache, int(counts.max())
        self.longest, self.width = int(lengths.max()), int((begins + counts).max())
        row = np.repeat(np.arange(len(slots)), counts)
        offset = np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts)
        prompt, slot, place, column, last = (upload(torch.from_numpy(x), cache.device)
                                             for x in (prompt_slots, slots, row * self.most + offset,
                                                       begins[row] + offset, counts.cumsum() - 1))
        self.prompt, self.slot, self.place, self.last = prompt, slot, place, last
        self.index = (cache.rows.first[upload(torch.from_numpy(slots[row]), cache.device)] + column[:, None]).flatten()
        self._positions(lengths, begins)
        self.runs = cache.runs(counts.tolist(), slots)

    def _positions(self, lengths: np.ndarray, begins: np.ndarray) -> None:
        """Place keys and padded queries in their sequences; a query sees its prompt, and its row up to itself."""
        size, device = len(lengths), self.cache.device
        length, begin = (upload(torch.from_numpy(x), device)[:, None] for x in (lengths, begins))
        of_prompt, of_row = (torch.arange(n, device=device).expand(size, -1) for n in (self.longest, self.width))
        self.keys_at = torch.cat([of_prompt, length + of_row], 1)[:, None]
        self.queries_at = (length + begin + torch.arange(self.most, device=device))[..., None]
        stored = torch.cat([of_prompt < length, torch.ones_like(of_row, dtype=torch.bool)], 1)[:, None]
        self.masks: dict[int | None, Tensor] = {None: _bias(stored & (self.keys_at <= self.queries_at))}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None,
               softcap: float | None = None) -> Tensor:
        """Store the new keys and values, then attend."""
        spec, rows = self.cache.spec, len(self.slot)
        self.cache.rows.write(layer, self.index, key, value)
        keys, values = (self._stored(layer, part) for part in (0, 1))
        heads = query.shape[1] // spec.heads
        padded = query.new_zeros(rows * self.most, query.shape[1], spec.dim)
        padded[self.place] = query[0].transpose(0, 1)
        padded = padded.view(rows, self.most, spec.heads, heads, spec.dim).permute(0, 2, 3, 1, 4)
        scores = _product(padded.flatten(0, 1).flatten(1, 2).to(spec.dtype), keys.mT)
        scores.mul_(spec.dim**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores.view(*padded.shape[:4], -1).add_(self._mask(window)[:, None, None])
        attended = torch.bmm(scores.softmax(-1).to(spec.dtype), values).view(padded.shape)
        return attended.permute(0, 3, 1, 2, 4).reshape(rows * self.most, -1, spec.dim)[self.place][None]

    def _mask(self, window: int | None) -> Tensor:
        if window is not None and window not in self.masks:
            self.masks[window] = self.masks[None] + _bias(self.keys_at > self.queries_at - window)
        return self.masks[window]

    def _stored(self, layer: int, part: int) -> Tensor:
        """Keys (``part`` 0) or values (1) [rows * heads, tokens, dim] of prompts and rows, each copied once."""
        prompts, rows = (store.layers[layer][part] for store in (self.cache.prompts, self.cache.rows))
        stored = rows.new_empty(len(self.slot), rows.shape[1], self.longest + self.width, rows.shape[3])
        torch.index_select(prompts[:, :, :self.longest], 0, self.prompt, out=stored[:, :, :self.longest])
        torch.index_select(rows[:, :, :self.width], 0, self.slot, out=stored[:, :, self.longest:])
        return stored.flatten(0, 1)

    def mix(self, layer_idx: int, hidden: Tensor, layer: Layer) -> list[Tensor]:
        """Run a layer with state over what is appended to each row."""
        at_once = self.cache.spec.continues
        return self.cache.rows.states.over(layer_idx, hidden, layer, self.runs, begun=True, at_once=at_once)


class Joined:
    """Attention of a step of ``decode``, and behind its tokens those of ``extend``, which rows of this step read."""

    def __init__(self, decode: Decode, extend: Extend) -> None:
        self.decode, self.extend = decode, extend
        self.last = torch.arange(decode.live, device=decode.cache.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None,
               softcap: float | None = None) -> Tensor:
        """Attend with what is appended, then with the new token of each row."""
        (q, q_before), (k, k_before), (v, v_before) = (self._parts(x, 2) for x in (query, key, value))
        attended = self.extend.attend(layer, q_before, k_before, v_before, scaling, window, softcap)
        return torch.cat([self.decode.attend(layer, q, k, v, scaling, window, softcap), attended], 1)

    def mix(self, layer_idx: int, hidden: Tensor, layer: Layer) -> list[Tensor]:
        """Run a layer with state over what is appended, then over the new token of each row."""
        newest, before = self._parts(hidden, 1)
        outs = self.extend.mix(layer_idx, before, layer)
        return [torch.cat(pair, 1) for pair in zip(self.decode.mix(layer_idx, newest, layer), outs)]

    def _parts(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Split tokens into the new ones of rows and those before them."""
        return x.narrow(dim, 0, self.decode.live), x.narrow(dim, self.decode.live, x.shape[dim] - self.decode.live)
