"""Rows in which layers with state run over packed sequences: every sequence begins with its own state.

A layer with state (a convolution over the last tokens, a recurrent matrix) reads its tokens in order. In a packed row
it would carry the state of one sequence into the next. So the sequences become rows of a few calls, as of a batch, and
a sequence that continues another one begins with the state in which that one ended.
"""
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightrft.ops.segment import RowGather

_LEAST = 32  # tokens; shorter sequences are rows of one call
_PARTS = 4  # lengths between two powers of two are rounded up to one of so many widths
States = dict[str, Tensor]  # by name, [rows, ...]; empty: nothing was read yet


class LayerState:
    """The cache of transformers as a layer with state uses it, of that layer alone: its calls replace tensors of
    ``states`` and change none, so that gradients go through them.

    The members have the names of transformers. ``record_past``: the layer takes no kernel for one token, which would
    write into its state.
    """
    record_past = True

    def __init__(self, states: States | None = None) -> None:
        self.states: States = dict(states or {})
        self.began = bool(self.states)

    @property
    def layers(self) -> "LayerState":
        """Every layer is this one."""
        return self

    def __getitem__(self, layer_idx: int) -> "LayerState":
        return self

    @property
    def conv_states(self) -> "_Named":
        """Last tokens that the convolutions read, by index."""
        return _Named(self.states, "conv")

    @property
    def recurrent_states(self) -> "_Named":
        """Recurrent matrices, by index."""
        return _Named(self.states, "recurrent")

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """True if the rows continue others."""
        return self.began

    def is_recording_past(self, layer_idx: int) -> bool:
        """As ``record_past``."""
        return self.record_past

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The tokens that a convolution read last, [rows, channels, k]; None at the start."""
        return self.states[f"conv{state_idx}"] if self.began else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A recurrent matrix, [rows, ...]; None at the start."""
        return self.states[f"recurrent{state_idx}"] if self.began else None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0,
                          conv_kernel_size: int | None = None, **unused: Any) -> Tensor:
        """Store the last tokens of ``conv_states`` [rows, channels, L]; return them after those stored before."""
        name, size = f"conv{state_idx}", conv_kernel_size or conv_states.shape[-1]
        if self.began:
            conv_states = torch.cat([self.states[name].to(conv_states.dtype), conv_states], -1)
        missing = max(0, size - conv_states.shape[-1])
        self.states[name] = torch.nn.functional.pad(conv_states, (missing, 0))[..., -size:]
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0,
                               **unused: Any) -> Tensor:
        """Store a recurrent matrix."""
        self.states[f"recurrent{state_idx}"] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """The recurrent matrix of lightning attention (MiniMax); None at the start."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Store it."""
        self.update_recurrent_state(linear_cache, layer_idx)


class _Named(NamedTuple):
    """States whose names begin with ``kind``, by index."""
    states: States
    kind: str

    def __getitem__(self, index: Any) -> Any:
        return self.states[f"{self.kind}{index}"]


# A layer: rows [n, L, H] and their states, which it replaces by those at their ends -> its outputs, [n, L, ...] each.
Layer = Callable[[Tensor, LayerState], tuple[Tensor, ...]]


class _Call(NamedTuple):
    """Rows of one call, padded on the right to ``width`` tokens.

    ``parents``: the gather, from the states stored before, of those that the rows begin with; None: they begin with
    none. ``stored``: the states at the ends of the rows, which then have no padding, are stored.
    """
    rows: int
    width: int
    parents: RowGather | None
    stored: bool


class StateRows:
    """The calls of a layer with state for one packed row; built once per forward pass and shared by all layers.

    Args:
        lens: tokens of the sequences, in the order of the row.
        before: index of the sequence that each one continues, -1: none; None: no sequence continues another one.
            Chains may have any length.
        device: of the hidden states.
        ends: sequences whose states :meth:`run` returns, beside those that others continue.
    """

    def __init__(self, lens: list[int], before: list[int] | None, device: torch.device | str,
                 ends: frozenset[int] = frozenset()) -> None:
        self.lens, self.before, self.device = lens, before or [-1] * len(lens), device
        self.stored = frozenset(self.before) - {-1} | ends
        groups = self._groups()
        self.order = [index for _, stored, group in groups if stored for index in group]
        self.calls = self._calls(groups)
        self._rows, self._out = self._gathers([group for _, _, group in groups])

    def _groups(self) -> list[tuple[bool, bool, list[int]]]:
        """Sequences of each call: whether they continue others, whether their states are stored, and their indices."""
        groups: dict[tuple[int, bool, int], list[int]] = {}
        depths: dict[int, int] = {-1: -1}
        for index in range(len(self.lens)):
            chain = [index]
            while chain[-1] not in depths:
                chain.append(self.before[chain[-1]])
            for link in reversed(chain[:-1]):
                depths[link] = depths[self.before[link]] + 1
            length, stored = self.lens[index], index in self.stored
            if length:
                groups.setdefault((depths[index], stored, length if stored else _width(length)), []).append(index)
        return [(depth > 0, stored, groups[depth, stored, width]) for depth, stored, width in sorted(groups)]

    def _calls(self, groups: list[tuple[bool, bool, list[int]]]) -> list[_Call]:
        """The calls of the groups. One token that continues others is padded to two: layers have another path for it,
        which writes into their state."""
        slot, stored_before, calls = {index: at for at, index in enumerate(self.order)}, 0, []
        for begins, stored, group in groups:
            width, parents = max(self.lens[index] for index in group), None
            if begins:
                slots = torch.tensor([slot[self.before[index]] for index in group])
                parents = RowGather(slots, stored_before, self.device)
            calls.append(_Call(len(group), max(width, 2) if begins and not stored else width, parents, stored))
            stored_before += len(group) * stored
        return calls

    def _gathers(self, groups: list[list[int]]) -> tuple[RowGather | None, RowGather | None]:
        """The gathers of the padded rows and of the tokens among them; None: the row is one sequence. Padding repeats
        the first token."""
        if len(self.calls) == 1 and self.calls[0].rows == 1 and self.calls[0].width == sum(self.lens):
            return None, None
        lens = torch.tensor(self.lens)
        starts = lens.cumsum(0) - lens
        tokens: list[Tensor] = []
        real: list[Tensor] = []
        for group, call in zip(groups, self.calls):
            column = torch.arange(call.width)[None]
            real.append((column < lens[group][:, None]).flatten())
            tokens.append((starts[group][:, None] + torch.where(column < lens[group][:, None], column, 0)).flatten())
        token, used = torch.cat(tokens), torch.cat(real)
        slots = used.nonzero()[:, 0]
        out = torch.empty_like(slots)
        out[token[slots]] = slots
        return (RowGather(token, len(slots), self.device, used=used), RowGather(out, len(token), self.device))

    def run(self, hidden: Tensor, layer: Layer) -> tuple[tuple[Tensor, ...], States]:
        """Run ``layer`` over the hidden states of the row.

        Args:
            hidden: [T, H].

        Returns:
            The outputs of the layer, [T, ...] each, and the states at the ends of the sequences ``order``.
        """
        rows = hidden if self._rows is None else self._rows(hidden)
        outputs: list[list[Tensor]] = []
        stored: States = {}
        for call, x in zip(self.calls, rows.split([call.rows * call.width for call in self.calls])):
            state = LayerState({name: call.parents(states) for name, states in stored.items()} if call.parents else {})
            with _own_states(state.states) if call.width == 1 else nullcontext():
                outs = layer(x.unflatten(0, (call.rows, call.width)), state)
            outputs.append([out.flatten(0, 1) for out in outs])
            if call.stored:
                stored = {
                    name: torch.cat([stored[name], states]) if stored else states
                    for name, states in state.states.items()
                }
        joined = (torch.cat(outs) if len(outs) > 1 else outs[0] for outs in zip(*outputs))
        return tuple(out if self._out is None else self._out(out) for out in joined), stored


def _own_states(states: States) -> saved_tensors_hooks:
    """Context of a layer that may write into ``states``, as some do for one token: its backward pass reads what they
    were."""
    storages = {state.untyped_storage()._cdata for state in states.values()}
    return saved_tensors_hooks(lambda x: x.clone() if x.untyped_storage()._cdata in storages else x, lambda x: x)


def _width(length: int) -> int:
    """Round a length up, by a fourth at most."""
    step = max(_LEAST, 2**(length.bit_length() - 1) // _PARTS)
    return -(-length // step) * step
