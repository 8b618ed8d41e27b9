"""Declarations of the fields of a batch: what a number belongs to, and how it is read from responses."""
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightrft.types.episodes import Episode
from lightrft.utils.registry import Registry


def flatten(rows: Iterable[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    """Join lists of numbers, one after another, in one vector."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), torch.empty(0, dtype=dtype).numpy().dtype))


@dataclass(frozen=True)
class Field:
    """Declaration of a field of a batch of B sequences with T tokens.

    ``axis``: "T", a tensor with a value per token; "B", a tensor with a value per sequence; "list", an object per
    sequence, on the host; "cu", the boundaries of the sequences.
    ``missing``: the value of a sequence, or of a token, that has none; None: all have one.
    ``packed``: a response has the field (:meth:`lightrft.types.Episode.columns`); the others are set by later stages.
    ``of``: reads a number from a response: its value, or the values of its last tokens for "T"; None: missing.
    """
    axis: str
    dtype: torch.dtype | None = None
    missing: float | None = None
    packed: bool = False
    of: Callable[[Episode], Any] = field(default=lambda response: None)

    def pack(self, values: Sequence[Any]) -> Any:
        """Join the values of sequences: one of each, or lists of one per token."""
        if self.axis == "list":
            return [*values]
        if self.axis == "T":
            return flatten(values, self.dtype or torch.float32)
        return torch.tensor([self.missing if value is None else value for value in values], dtype=self.dtype)

    def pack_numbers(self, responses: Sequence[Episode], lens: Sequence[int]) -> Any:
        """Read a number from responses, sequences of ``lens`` tokens."""
        values = [self.of(response) for response in responses]
        if self.axis == "T":  # the first tokens may have none
            lists = [[*(each or ())] for each in values]
            values = [[self.missing] * (length - len(each)) + each for each, length in zip(lists, lens)]
        return self.pack(values)

    def cat(self, values: Sequence[Any]) -> Any:
        """Join the values of several batches."""
        if self.axis == "list":
            return [*chain.from_iterable(values)]
        if self.axis == "cu":
            lens = torch.cat([value.diff() for value in values])
            return torch.cat([lens.new_zeros(1), lens.cumsum(0).to(lens.dtype)])
        return torch.cat([*values])

    def blank(self, *shape: int) -> Tensor:
        """Return the values of sequences or tokens that have none.

        Raises:
            ValueError: all must have one.
        """
        if self.missing is None:
            raise ValueError("no value is declared for a missing one")
        return torch.full(shape, self.missing, dtype=self.dtype)


NUMBERS: Registry[Field] = Registry("number of a response")


def number(name: str, axis: str = "B", dtype: torch.dtype = torch.float32, missing: float = math.nan,
           of: Callable[[Episode], Any] | None = None) -> None:
    """Declare a number of every response, or with axis "T" of every token.

    It arrives in ``extra[name]`` of the batch (``[B]`` of all ranks, or ``[T]``), in ``response/<name>/mean``, ``min``
    and ``max`` of the metrics, and, per response, in ``numbers`` of the rows of the log.

    Args:
        missing: value of a response or a token that has none; NaN enters no metric.
        of: reads it from a response; None: ``response.extra[name]``, which any stage of the rollout sets.
    """
    NUMBERS.register(name)(Field(axis, dtype, missing, True, of or (lambda response: response.extra.get(name))))


def numbers_of(response: Episode) -> dict[str, float]:
    """Return the declared numbers that a response has."""
    declared = {name: NUMBERS.get(name) for name in NUMBERS}
    values = {name: each.of(response) for name, each in declared.items() if each.axis == "B"}
    return {name: float(value) for name, value in values.items() if value is not None}
