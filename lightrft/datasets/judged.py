"""Judged answers for KTO: a prompt with one answer and a label, desirable or not."""
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from lightrft.config.preference_schema import JudgedDataConfig
from lightrft.datasets.prompt_rows import check_named_columns, silent, truth
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.rows import DataError, Row, Rows
from lightrft.datasets.sft_dataset import (check_learnable, check_turns, Conversation, encode_all, Learning, SFTExample,
                                           shows_media, to_conversation, TokenizedDataset, with_media)
from lightrft.datasets.turn_weights import check_unweighted
from lightrft.utils.logging import warn_of_all

if TYPE_CHECKING:  # a mistake in a row is found without torch
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from lightrft.datasets.media_store import MediaStore


@dataclass(frozen=True)
class Judged:
    """One row, tokenized; ``mismatched`` is its prompt with an answer to another prompt."""
    uid: str
    answer: SFTExample
    mismatched: SFTExample
    desirable: bool


def desirable(row: Row, key: str, where: str) -> bool:
    """Read the label of a row.

    Raises:
        DataError: it is missing, or neither true nor false.
    """
    label = truth(row.get(key))
    if label is None and key not in row:
        raise DataError(f"{where}: the row has no column {key!r} (it has {', '.join(row)}), which says whether its "
                        "answer is good. Name it with --label_key")
    if label is None:
        raise DataError(f"{where}: the column {key!r} is {row.get(key)!r}: expected true or false, or 1 or 0. Correct "
                        "it, or name another column with --label_key")
    return label


def last_answer(row: Row, cfg: JudgedDataConfig, renderer: Renderer, where: str) -> Conversation:
    """Recognise a row as supervised fine-tuning does; of a chat only the last turn is in the loss.

    Raises:
        DataError: the row has no prompt, or no answer at its end, or an empty one.
    """
    chat = to_conversation(row, renderer, where, Learning(cfg.output_key))
    if chat.messages and not chat.first:
        if chat.messages[-1]["role"] != "assistant" or silent(chat.messages[-1]):
            raise DataError(f"{where}: the chat does not end with an answer. Complete or remove the row")
        chat = replace(chat, first=len(chat.messages) - 1)
    check_turns(chat, where)
    check_unweighted(chat, where)
    return chat


def judged_answers(rows: Rows, cfg: JudgedDataConfig, renderer: Renderer) -> tuple[list[bool], list[Conversation]]:
    """Recognise the rows of one entry: whether their answers are desirable, and the chats that end with them.

    Raises:
        DataError: as :func:`desirable`, :func:`last_answer` and
            :func:`~lightrft.datasets.prompt_rows.check_named_columns`.
    """
    check_named_columns(rows, cfg, ["input_key", "output_key", "label_key"])
    good = [desirable(row, cfg.label_key, where) for row, where in rows.named]
    return good, [last_answer(row, cfg, renderer, where) for row, where in rows.named]


class JudgedDataset(TokenizedDataset[Judged]):
    """Judged answers; ``cfg`` also selects their columns.

    Raises:
        DataError: also if all prompts are the same, or an answer holds media.
    """
    NAME = "answers"

    def __init__(self, cfg: JudgedDataConfig, tokenizer: "PreTrainedTokenizerBase", split: str = "train",
                 media: "MediaStore | None" = None) -> None:
        self._cfg = cfg
        super().__init__(cfg.as_data_config(), tokenizer, cfg.max_len, split, media)
        self._others = others([answer for answer, _ in self._rows])
        if split == "train" and len({good for _, good in self._rows}) < 2:
            kind = "desirable" if self._rows[0][1] else "undesirable"
            warn_of_all(
                f"all {len(self)} answers are {kind}: KTO needs good and bad answers; add some of the other kind")

    def read(self, entry: int, rows: Rows) -> list[tuple[SFTExample, bool]]:
        """Return answers, and whether they are desirable."""
        good, chats = judged_answers(rows, self._cfg, self._renderer)
        found = with_media(rows, chats, self._renderer.cfg, self._media)
        drawn = next((i for i, chat in found.items() if shows_media(chat)), None)
        if drawn is not None:
            raise DataError(f"{rows.where(drawn)}: its answer holds media, which a policy of texts cannot write, and "
                            "which other prompts cannot be answered with. Write them in the prompt, or remove the row")
        rows, chats, good = rows.pick(found), [*found.values()], [good[i] for i in found]
        encoded = encode_all(chats, self._renderer, self._media)
        check_learnable(rows, encoded)
        return [(SFTExample(f"{entry}:{rows.number(i)}", *encoded[i], chats[i].media), good[i])
                for i in self.fitting(rows, [len(ids) for ids, _ in encoded])]  # yapf: disable

    def media_of(self, row: tuple[SFTExample, bool]) -> Iterable[tuple[str, ...]]:
        """Override: rows are answers with their labels."""
        return [row[0].media]

    def item(self, index: int) -> Judged:
        """The row at ``index``."""
        (answer, good), (other, _) = self._rows[index], self._rows[self._others[index]]
        return Judged(answer.uid, answer, mismatched(answer, other, self._max_len), good)


def prompt_len(row: SFTExample) -> int:
    """Count the tokens before the answer."""
    return row.loss_mask.index(True)


def mismatched(row: SFTExample, other: SFTExample, max_len: int) -> SFTExample:
    """Join the prompt of ``row`` with the answer of ``other``, up to ``max_len`` tokens."""
    start, answer = prompt_len(row), slice(prompt_len(other), None)
    ids, mask = row.token_ids[:start] + other.token_ids[answer], row.loss_mask[:start] + other.loss_mask[answer]
    return SFTExample(row.uid, ids[:max_len], mask[:max_len], row.media)


def others(rows: Sequence[SFTExample]) -> list[int]:
    """Return for each row one with another prompt, among the answers to the next prompt: those to a prompt are paired
    in order and start again where the next has fewer, so that each counts; after the last row comes the first.

    Raises:
        DataError: there is none.
    """
    prompts = [(tuple(row.token_ids[:prompt_len(row)]), row.media) for row in rows]
    groups = [[*group] for _, group in groupby(range(len(rows)), prompts.__getitem__)]
    if len(groups) > 1 and prompts[0] == prompts[-1]:  # neighbours, since the first row comes after the last
        groups[-1] += groups.pop(0)
    if len(groups) < 2:
        raise DataError(
            f"{len(rows)} judged answers to one prompt: KTO estimates its KL from answers to other prompts. "
            "Give rows of several prompts")
    following = zip(groups, [*groups[1:], groups[0]])
    found = {row: after[k % len(after)] for group, after in following for k, row in enumerate(group)}
    return [found[i] for i in range(len(rows))]
