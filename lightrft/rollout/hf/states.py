"""Layers with state in the HF engine: convolutions and recurrent matrices of each slot, beside its keys and values.

Such a layer takes rows of tokens and their states (:mod:`lightrft.models.stateful`). The engine runs all tokens of a
pass as one row; the view that the pass reads splits it, runs the layer from the states of the slots, and stores the new
ones. What a layer keeps is found by one call; no family is named.
"""
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightrft.models.state_rows import Layer, LayerState
from lightrft.utils.tensors import upload

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]  # of the states of a sequence in one layer, by their names
Runs = list[tuple[Tensor, Tensor]]  # calls of a layer: the slots [n] of their rows, and the tokens [n, L]


def runs_of(lens: Sequence[int], slots: np.ndarray, device: torch.device) -> Runs:
    """Split sequences of ``lens`` tokens, packed one after another, into calls with rows of one length."""
    counts = np.asarray(lens)
    starts, runs = counts.cumsum() - counts, Runs()
    for length in np.unique(counts):
        rows = np.flatnonzero(counts == length)
        tokens = starts[rows, None] + np.arange(length)
        runs.append((upload(torch.from_numpy(slots[rows]), device), upload(torch.from_numpy(tokens), device)))
    return runs


def shapes_after_a_token(hidden: Tensor, layer: Layer) -> tuple[list[Tensor], Shapes]:
    """Run a layer over tokens [1, T, H], each the first of a sequence; return its outputs, and what it keeps of one."""
    state = LayerState()
    outs = [out.transpose(0, 1) for out in layer(hidden.transpose(0, 1), state)]
    return outs, {name: (tuple(x.shape[1:]), x.dtype) for name, x in state.states.items()}


class StateStore:
    """States of ``count`` sequences: of each layer, by its index, tensors [count, ...] by their names."""

    def __init__(self, states: dict[int, Shapes], count: int, device: torch.device) -> None:
        self.data = {
            layer:
            {name: torch.zeros(count, *shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}
            for layer, shapes in states.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(stored.nbytes for states in self.data.values() for stored in states.values())

    def copy(self, source: "StateStore", slots: Tensor, to: Tensor) -> None:
        """Let the sequences ``to`` have the states of ``slots`` in ``source``."""
        for index, states in self.data.items():
            for name, stored in states.items():
                stored[to] = source.data[index][name][slots]

    def over(self, index: int, hidden: Tensor, layer: Layer, runs: Runs, begun: bool, at_once: bool) -> list[Tensor]:
        """Run layer ``index`` over the tokens [1, T, H] of sequences, from their states if they have ``begun``, all
        ``at_once`` or one after another, and store the states at their ends."""
        states, calls = self.data[index], []
        for slots, tokens in runs:
            state = LayerState({name: stored[slots] for name, stored in states.items()} if begun else {})
            pieces = [layer(x, state) for x in hidden[0, tokens].split(tokens.shape[1] if at_once else 1, 1)]
            calls.append([torch.cat(outs, 1) for outs in zip(*pieces)])
            for name, stored in states.items():
                stored[slots] = state.states[name].to(stored.dtype)
        places = torch.cat([tokens.flatten() for _, tokens in runs]).argsort()
        return [torch.cat([out.flatten(0, 1) for out in outs])[places][None] for outs in zip(*calls)]

    def step(self, index: int, hidden: Tensor, layer: Layer, draws: Tensor) -> list[Tensor]:
        """Run layer ``index`` over one token [1, n, H] of each of the first n sequences, and store the states of those
        that draw (``draws`` [n] is not 0); the others read noise."""
        states = {name: stored[:len(draws)] for name, stored in self.data[index].items()}
        state = LayerState({name: stored.clone() for name, stored in states.items()})  # some layers write into it
        outs = layer(hidden.transpose(0, 1), state)
        for name, stored in states.items():
            moves = draws.bool().view(-1, *[1] * (stored.ndim - 1))
            stored.copy_(torch.where(moves, state.states[name].to(stored.dtype), stored))
        return [out.transpose(0, 1) for out in outs]
