"""Shows one row of a data set as the model sees it: the text of its tokens, with what is learnt marked."""
from collections.abc import Iterator, Sequence
from functools import singledispatch
from itertools import groupby
from textwrap import wrap
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from lightrft.datasets.answered import AnsweredRow
from lightrft.datasets.judged import Judged
from lightrft.datasets.preferences import Pair
from lightrft.datasets.sft_dataset import SFTExample
from lightrft.datasets.steps import StepExample
from lightrft.datasets.token_texts import decode_behind
from lightrft.types import Prompt

WIDTH = 80  # columns of a line
SHOWN = 600  # most characters of a text
GIVEN, LEARNT = "  | ", "  > "  # what lines of text begin with
Tokenizer = PreTrainedTokenizerBase


@singledispatch
def preview(row: Any, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield lines of at most ``WIDTH`` columns that show a row; lines with ``>`` are learnt, those with ``|`` are
    not. Line breaks are ``\\n``, and the middle of a long text is left out."""
    yield from ()


@preview.register
def _preview_prompt(row: Prompt, tokenizer: Tokenizer) -> Iterator[str]:
    yield f"the first prompt, {len(row.token_ids)} tokens:"
    yield from shown(str(tokenizer.decode(row.token_ids)), GIVEN)


@preview.register
def _preview_example(row: SFTExample, tokenizer: Tokenizer) -> Iterator[str]:
    yield from _sequence(row, "the first row", tokenizer)


@preview.register
def _preview_steps(row: StepExample, tokenizer: Tokenizer) -> Iterator[str]:
    labels = ", ".join(f"{label:g}" for label in row.labels)
    yield from _sequence(row, f"the first row, with the labels {shortened(labels, 40)}", tokenizer)


@preview.register
def _preview_pair(row: Pair, tokenizer: Tokenizer) -> Iterator[str]:
    about = ([] if row.margin is None else [f"margin {row.margin:g}"]) + ["a tie"] * row.tie
    about += [f"{name} {probability:g}" for name, probability in row.heads.items()]
    yield from _sequence(row.chosen, ", ".join(["the first row, chosen", *about]), tokenizer)
    yield from _sequence(row.rejected, "the first row, rejected", tokenizer)


@preview.register
def _preview_judged(row: Judged, tokenizer: Tokenizer) -> Iterator[str]:
    yield from _sequence(row.answer, f"the first row, {'desirable' if row.desirable else 'undesirable'}", tokenizer)


@preview.register
def _preview_answered(row: AnsweredRow, tokenizer: Tokenizer | None) -> Iterator[str]:
    yield "the first row, a prompt and its response (marked >):"
    yield from shown(row.row["input"], GIVEN)
    yield from shown(row.row["output"], LEARNT)


def _sequence(row: SFTExample, name: str, tokenizer: Tokenizer) -> Iterator[str]:
    learnt = [bool(mark) for mark in row.loss_mask]
    weights = sorted({weight for weight, mark in zip(row.weights, learnt) if mark})
    about = f", with the weights {', '.join(f'{weight:g}' for weight in weights)}" if weights not in ([], [1]) else ""
    head = f"{name}: {len(learnt)} tokens, of which {sum(learnt)} are learnt (marked >){about}:"
    yield from preview_sequence(head, row.token_ids, learnt, tokenizer)


def preview_sequence(head: str, token_ids: Sequence[int], marks: Sequence[bool], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield ``head`` and the lines of a text; those of marked tokens begin with ``>``."""
    yield head
    start = 0
    for mark, run in groupby(marks):
        end = start + len([*run])
        text, = decode_behind(tokenizer, [(token_ids[:start], token_ids[start:end])])
        yield from shown(text, LEARNT if mark else GIVEN)
        start = end


def shown(text: str, start: str) -> Sequence[str]:
    """Return lines with a text, shortened in the middle, each after ``start``."""
    breaks = shortened(text).replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n\n")
    pieces = [piece for line in breaks.split("\n") for piece in wrap(
        line, WIDTH - len(start), drop_whitespace=False, expand_tabs=False, replace_whitespace=False)]  # yapf: disable
    return [f"{start}{piece}" for piece in pieces]


def shortened(text: str, most: int = SHOWN) -> str:
    """Return a text without its middle if it has more than ``most`` characters."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
