"""Declarations of the fields of a batch: what a number belongs to, and how it is read from responses."""
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightrft.types.branches import Segment
from lightrft.types.episodes import Episode
from lightrft.utils.errors import CaptureException, did_you_mean, UserError
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
    ``source``: the attribute of a response that has the value; for "T" of its segments, which have a list, or one value
    of all their tokens. Empty: later stages set the field.
    ``of``: reads a number from a response: its value, or the values of its last tokens for "T"; None: missing.
    """
    axis: str
    dtype: torch.dtype | None = None
    missing: float | None = None
    source: str = ""
    of: Callable[[Episode], Any] = field(default=lambda response: None)

    def pack(self, values: Sequence[Any]) -> Any:
        """Join the values of sequences: one of each, or lists of one per token."""
        if self.axis == "list":
            return [*values]
        if self.axis == "T":
            return flatten(values, self.dtype or torch.float32)
        return torch.tensor([self.missing if value is None else value for value in values], dtype=self.dtype)

    def pack_responses(self, responses: Sequence[Episode]) -> Any:
        """Join the values of responses."""
        return self.pack([*map(attrgetter(self.source), responses)])

    def pack_segments(self, segments: Sequence[Segment], counts: Sequence[int]) -> Tensor:
        """Join the values of the tokens of segments, which have ``counts`` tokens."""
        values = [*map(attrgetter(self.source), segments)]
        if not values or isinstance(values[0], list):
            return self.pack(values)
        return torch.from_numpy(np.repeat(torch.tensor(values, dtype=self.dtype).numpy(), counts))

    def read(self, name: str, response: Episode) -> Any:
        """Read the number ``name`` from a response: its value, for "T" a list; None: it has none.

        Raises:
            UserError: that is no number of this type, or there are more values than tokens.
        """
        response, value, caught = response.joined, None, CaptureException()
        with caught:
            value = self.of(response)
        if (cause := caught.cause) is not None:
            raise UserError(f"{_place(name, response)}: of=... of its declaration raised {type(cause).__name__}: "
                            f"{cause}") from cause
        if value is None:
            return None
        tokens, numbers = response.num_tokens, np.asarray(value)
        if numbers.dtype.kind not in "biuf" or numbers.ndim != (self.axis == "T"):
            kind = "a list with a number for each of the last tokens" if self.axis == "T" else "one number"
            raise UserError(f"{_place(name, response)} is {value!r}; set {kind}, or None where there is none")
        if self.axis == "T" and len(numbers) > tokens:
            raise UserError(f"{_place(name, response)} has {len(numbers)} values for {tokens} tokens, prompt included; "
                            "give one for each of the last tokens")
        if not (fits := _fit(numbers, self.dtype)).all():
            raise UserError(f"{_place(name, response)} is {numbers[~fits].flat[0]}, which {self.dtype} cannot hold; "
                            f"declare number({name!r}, dtype=torch.float32), or set another value")
        return numbers.tolist()

    def pack_numbers(self, name: str, responses: Sequence[Episode], lens: Sequence[int]) -> Any:
        """Read the number ``name`` from responses, sequences of ``lens`` tokens."""
        values = [self.read(name, response) for response in responses]
        if self.axis == "T":  # the first tokens may have none
            lists = [value or [] for value in values]
            values = [[self.missing] * (length - len(last)) + last for last, length in zip(lists, lens)]
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


class Numbers(dict[str, Tensor]):
    """Declared numbers of a batch, by name. One that it does not have is an error that says which it has."""

    def __missing__(self, name: str) -> Tensor:
        check_declared([name])
        raise UserError(f"the number {name!r} is not in this batch, which did not come from responses of a rollout")


def check_declared(names: Iterable[str]) -> None:
    """Raise a UserError for a name that no :func:`number` declares."""
    for name in names:
        if name not in NUMBERS:
            raise UserError(
                f"{name!r} is no declared number of responses{did_you_mean(name, NUMBERS)}; declare it with "
                f"lightrft.types.number({name!r}) (docs/extending.md); "
                f"declared: {', '.join(NUMBERS) or 'none'}")


def _place(name: str, response: Episode) -> str:
    return f"the number {name!r} of response {response.index} to the prompt {response.prompt.uid!r}"


def _fit(numbers: np.ndarray, dtype: torch.dtype | None) -> np.ndarray:
    """True where a tensor of ``dtype`` can hold a number: any for a floating one, else what does not change."""
    if dtype is None or dtype.is_floating_point:
        return np.full(numbers.shape, True)
    with np.errstate(invalid="ignore"):
        return numbers.astype(torch.empty(0, dtype=dtype).numpy().dtype) == numbers


def _problem(name: str, field: Field, of: Any) -> str:
    """Return what is wrong with a declaration, and the remedy; empty if nothing is."""
    if field.axis not in ("B", "T"):
        return f"axis={field.axis!r}; write axis='B' for a number per response, or axis='T' for one per token"
    if not isinstance(field.dtype, torch.dtype):
        return f"dtype={field.dtype!r}; write a type of torch, such as torch.float32"
    if not isinstance(field.missing, (bool, int, float)):
        return f"missing={field.missing!r}; write a number, such as missing=0"
    if not _fit(np.asarray(field.missing), field.dtype).all():
        return f"missing={field.missing!r}, which {field.dtype} cannot hold; write another number, such as missing=0"
    if of is not None and not callable(of):
        return (f"of={of!r}; write a function of the response, such as of=lambda response: response.prompt_len, or "
                f"leave it out to read response.extra[{name!r}]")
    return ""


def number(name: str, axis: str = "B", dtype: torch.dtype = torch.float32, missing: float = math.nan,
           of: Callable[[Episode], Any] | None = None) -> None:
    """Declare a number of every response, or with axis "T" of every token.

    It arrives in ``extra[name]`` of the batch (``[B]`` of all ranks, or ``[T]``), in ``response/<name>/mean``, ``min``
    and ``max`` of the metrics, and, per response, in ``numbers`` of the rows of the log.

    Args:
        missing: value of a response or a token that has none; NaN enters no metric.
        of: reads it from a response; None: ``response.extra[name]``, which any stage of the rollout sets.

    Raises:
        UserError: an argument cannot be.
    """
    declared = Field(axis, dtype, missing, of=of or (lambda response: response.extra.get(name)))
    if problem := _problem(name, declared, of):
        raise UserError(f"number({name!r}): {problem}")
    NUMBERS.register(name)(declared)


def numbers_of(response: Episode) -> dict[str, float]:
    """Return the declared numbers that a response has."""
    declared = {name: NUMBERS.get(name) for name in NUMBERS}
    values = {name: entry.read(name, response) for name, entry in declared.items() if entry.axis == "B"}
    return {name: float(value) for name, value in values.items() if value is not None}
