"""Data set of demonstrations: token ids, and a loss mask of the assistant's text and its end-of-turn token."""
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, compress, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lightrft.config.schema import DataConfig
from lightrft.config.sft_schema import SFTDataConfig
from lightrft.datasets.columns import report_columns
from lightrft.datasets.conversations import Conversation, encode_all, Encoded
from lightrft.datasets.loader import Item, MixedDataset
from lightrft.datasets.media_prompts import pair_media
from lightrft.datasets.prompts_dataset import fitting, load_specs
from lightrft.datasets.prompt_rows import (as_chat, check_named_columns, continued, Message, missing, normalise_prompt,
                                           prompt_column, silent, to_messages, with_system)
from lightrft.datasets.rendering import Renderer, unended, without_end
from lightrft.datasets.rows import DataError, Row, Rows
from lightrft.datasets.template_kwargs import template_kwargs
from lightrft.datasets.turn_weights import weigh

if TYPE_CHECKING:  # a mistake in a row is found without torch
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from lightrft.datasets.media_store import MediaStore

ANSWER_COLUMNS = ("completion", "response", "output", "answer", "solution")


@dataclass(frozen=True)
class SFTExample:
    """One demonstration; ``loss_mask[t]`` is True if token t is in the loss; ``media`` are keys as in a prompt;
    ``weights[t]`` weighs the gradient of token t (empty: all are 1)."""
    uid: str
    token_ids: list[int]
    loss_mask: list[bool]
    media: tuple[str, ...] = ()
    weights: list[float] = field(default_factory=list, kw_only=True)


@dataclass(frozen=True)
class Learning:
    """Selection of the part of a demonstration that is in the loss.

    Attributes:
        output_key: column of the answer; None: the first of ``ANSWER_COLUMNS`` that a row has.
        every_turn: all assistant turns of a chat, or the last alone.
        whole: every token but the first, which nothing predicts, and those of media.
    """
    output_key: str | None = None
    every_turn: bool = True
    whole: bool = False

    @classmethod
    def of(cls, data: SFTDataConfig) -> "Learning":
        """Return the selection of the options of demonstrations."""
        return cls(data.output_key, data.multiturn, data.pretrain_mode)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns in which the answer is looked up."""
        return ANSWER_COLUMNS if self.output_key is None else (self.output_key, )

    def answer(self, row: Row) -> Any:
        """Return the answer of a row, empty if the first of the columns that it has is; None: it has none of them."""
        return next((row[name] for name in self.columns if row.get(name) is not None), None)

    def narrowed(self, chat: Conversation) -> Conversation:
        """Return the conversation with the part to learn."""
        if self.whole:
            first = 0 if any("weight" in turn for turn in chat.messages or []) else chat.first
            return replace(chat, pair=("", "".join(chat.pair)), whole=True, first=first)
        turns = [i for i, turn in enumerate(chat.messages or []) if turn["role"] == "assistant"]
        if self.every_turn or not turns or turns[-1] == chat.first:
            return chat
        return replace(chat, first=turns[-1], prefill="")

    def masked(self, encoded: Encoded) -> Encoded:
        """Return token ids with the mask of the tokens to learn."""
        ids, mask = encoded
        return ids, [keep and not (self.whole and i == 0) for i, keep in enumerate(mask)]


ALL_TURNS = Learning()


def to_conversation(row: Row, renderer: Renderer, where: str, learning: Learning = ALL_TURNS) -> Conversation:
    """Recognise ``{messages}`` and what stands for it, or a prompt with its completion (text or messages); with
    ``learning.whole`` also a text alone. A named answer replaces those at the end of ``messages``.

    Raises:
        DataError: the row has no prompt, or no answer to learn.
    """
    chat = _conversation(row, renderer, where, learning)
    return replace(chat, template_kwargs=template_kwargs(row, chat.messages is not None, where))


def _conversation(row: Row, renderer: Renderer, where: str, learning: Learning) -> Conversation:
    row = as_chat(row, renderer.cfg.input_key, where)
    column = _demonstration(row, renderer.cfg.input_key, learning.whole, where)
    value, answer = row[column], learning.answer(row)
    if learning.whole and isinstance(value, str) and missing(answer):
        return Conversation(None, pair=("", without_end(renderer.text(value), renderer.ends)))
    value = with_system(value, row, where)
    turns = [] if isinstance(value, str) else unended(to_messages(value, where), renderer.ends)
    within = learning.output_key is None and turns and (answer is None or column == "messages")
    if within and any(turn["role"] == "assistant" for turn in turns):
        return Conversation(renderer.messages(turns))
    if within or missing(answer):
        raise DataError(f"{where}: the row has no answer to train on (looked for assistant messages and in "
                        f"{', '.join(learning.columns)}). Complete or remove it, or name its column with --output_key")
    asked = normalise_prompt(value, where, column) if column == "messages" else turns or value
    return answered(asked, answer, renderer, where)


def _demonstration(row: Row, input_key: str, whole: bool, where: str) -> str:
    """Return the column of the prompt or the chat; ``whole``: perhaps that of a text alone."""
    column = prompt_column(row, input_key)
    if whole and column is None and isinstance(row.get("text"), str):
        return "text"
    if column is None:
        raise DataError(
            f"{where}: the row has no demonstration (it has {', '.join(row)}). A row needs messages, "
            f"conversations, instruction and output, or prompt or input with one of "
            f"{', '.join(ANSWER_COLUMNS)}: name its columns with --input_key and --output_key, or remove it")
    return column


def answered(prompt: str | list[Message], answer: str | list[Message], renderer: Renderer, where: str) -> Conversation:
    """Join a prompt with its answer, which alone may be in the loss; end tokens behind it are dropped, since rendering
    adds one.

    Raises:
        DataError: a text prompt that is not rendered as a chat has a chat answer.
    """
    chat = renderer.messages(prompt)
    if chat is None and isinstance(answer, str):
        return Conversation(None, pair=(renderer.text(str(prompt)), without_end(answer, renderer.ends)))
    if chat is None:
        raise DataError(f"{where}: mixed schema: a text prompt with a chat answer. Use --apply_chat_template")
    said = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else to_messages(answer, where)
    chat, prefill, said = continued(chat, unended(said, renderer.ends))
    return Conversation(chat + said, first=len(chat), prefill=prefill)


def demonstrations(rows: Rows, renderer: Renderer, learning: Learning = ALL_TURNS,
                   named: Iterable[str] = ("input_key", )) -> list[Conversation]:
    """Recognise the rows of one entry with :func:`to_conversation`, and check their columns, of which the options
    ``named`` name some, and their turns."""
    check_named_columns(rows, renderer.cfg, named)
    check_named_columns(rows, learning, ["output_key"])
    chats = [learning.narrowed(to_conversation(row, renderer, rows.where(i), learning))
             for i, row in enumerate(rows.rows)]  # yapf: disable
    for i, chat in enumerate(chats):
        check_turns(chat, rows.where(i))
    return chats


def check_turns(chat: Conversation, where: str) -> None:
    """Raise a :class:`DataError` for an answer to learn that is empty, and for null in place of any answer."""
    if chat.messages is None and missing(chat.pair[1]):
        raise DataError(f"{where}: the answer is empty, or an end token alone. Complete or remove the row")
    for i, turn in enumerate(chat.messages or []):
        if turn["role"] == "assistant" and silent(turn) and (i >= chat.first or turn["content"] is None):
            raise DataError(f"{where}: the answer in turn {i + 1} of the chat is empty ({turn['content']!r}). Complete "
                            "or remove it, or remove the row")


def shows_media(chat: Conversation) -> bool:
    """Return True if the answer of a conversation holds media."""
    contents = [turn.get("content") for turn in (chat.messages or [])[chat.first:]]
    return any(isinstance(part, dict) and part.get("type", "text") != "text"
               for content in contents if isinstance(content, list) for part in content)  # yapf: disable


def with_media(rows: Rows, chats: list[Conversation], cfg: DataConfig,
               store: "MediaStore | None") -> dict[int, Conversation]:
    """Return by index of the row the conversations with their media; see :func:`pair_media` on those left out."""
    found = pair_media(rows, [chat.messages or [] for chat in chats], cfg, store, [chat.pair for chat in chats])
    return {i: replace(chats[i], messages=chats[i].messages and messages, media=keys)
            for i, (messages, keys) in found.items()}  # yapf: disable


class TokenizedDataset(MixedDataset[Item]):
    """Base of the data sets that tokenize the rows of one split at construction.

    Args:
        cfg: selects the data and the rendering of a row (as for prompts).
        tokenizer: tokenizer of the model.
        max_len: longest sequence in tokens; longer ones follow ``cfg.overlong_prompt``.
        split: "train" or "eval".
        media: store for the pictures, videos and sounds of the rows; None: the model takes text only.

    Attributes:
        dropped: rows left out because they are too long, or by a policy of the subclass.

    Raises:
        DataError: data, rows or templates cannot be used.
    """
    NAME: ClassVar[str]  # of its rows, in messages
    LIMIT: ClassVar[str] = "--max_len"  # option of the longest sequence

    def __init__(self, cfg: DataConfig, tokenizer: "PreTrainedTokenizerBase", max_len: int, split: str = "train",
                 media: "MediaStore | None" = None) -> None:
        parts, self.probs = load_specs(cfg, split)
        self._renderer, self._media, self._max_len = Renderer(cfg, tokenizer), media, max_len
        self._rows: list[Any] = []
        self.sizes, self.dropped = [], 0
        for entry, rows in enumerate(parts):
            found = self.read(entry, rows)
            self._rows += found
            self.sizes.append(len(found))
            self.dropped += len(rows) - len(found)
            report_columns(rows, partial(self._observed, entry), "leaves alone")
        self.check_options()
        if media is not None:
            media.keep(keys for row in self._rows for keys in self.media_of(row))
        if not self._rows:
            raise DataError(f"none of {self.dropped} {self.NAME} can be used: they are longer than {self.LIMIT} "
                            f"{max_len} tokens, or left out for another reason (see the log)")

    def _observed(self, entry: int, rows: Rows) -> list[Any]:
        """Return what is read of rows, nothing of those left out: also variables that the template looks up and has as
        their defaults."""
        variables = [self._renderer.reads(template_kwargs(row, True, where)) for row, where in rows.named]
        found = self.read(entry, rows)
        return [*found, *variables] if found else []

    def check_options(self) -> None:
        """Raise a :class:`DataError` for an option of rendering that no row is rendered with."""
        self._renderer.check_used()

    @abstractmethod
    def read(self, entry: int, rows: Rows) -> list[Any]:
        """Tokenize the rows of the data set with the number ``entry``, and leave out those that cannot be used."""

    def media_of(self, row: Any) -> Iterable[tuple[str, ...]]:
        """Return the keys of the media of each sequence of a row that :meth:`read` returned."""
        return [row.media]

    def fitting(self, rows: Rows, lengths: list[int]) -> list[int]:
        """Return the indices of the rows that are not too long."""
        return fitting(rows, lengths, self._max_len, self._renderer.cfg.overlong_prompt, self.LIMIT)

    def leave_out(self, unwanted: Callable[[Item], bool]) -> None:
        """Leave out the rows for which ``unwanted`` is true."""
        wanted, bounds = [not unwanted(row) for row in self], accumulate(self.sizes, initial=0)
        self.sizes = [sum(wanted[start:end]) for start, end in pairwise(bounds)]
        self._rows = [*compress(self._rows, wanted)]

    def __len__(self) -> int:
        return len(self._rows)

    def item(self, index: int) -> Item:
        """The row at ``index``."""
        return self._rows[index]


class SFTDataset(TokenizedDataset[SFTExample]):
    """Demonstrations; batches come from ``PromptLoader``.

    Rows: ``{messages}`` or one of :func:`lightrft.datasets.prompt_rows.as_chat` (every assistant turn is learnt), or
    ``{prompt, response}``, ``{input, output}``,
    ``{prompt, completion}`` with text or messages (only the answer is learnt). ``learning`` selects another part.
    """
    NAME = "demonstrations"
    NAMED: ClassVar[tuple[str, ...]] = ("input_key", )  # options of columns that rows must have where they are named

    def __init__(self, cfg: DataConfig, tokenizer: "PreTrainedTokenizerBase", max_len: int, split: str = "train",
                 media: "MediaStore | None" = None, learning: Learning = ALL_TURNS) -> None:
        self._learning = learning
        super().__init__(cfg, tokenizer, max_len, split, media)

    def read(self, entry: int, rows: Rows) -> list[Any]:
        """Keep uid, arrays of ids and mask, and media: lists of numbers take several times the memory."""
        learning, renderer = self._learning, self._renderer
        chats = demonstrations(rows, renderer, learning, self.NAMED)
        found = with_media(rows, chats, renderer.cfg, self._media)
        rows, chats = rows.pick(found), [*found.values()]
        encoded = [learning.masked(each) for each in encode_all(chats, renderer, self._media)]
        weighted = weigh(chats, encoded, lambda turns: encode_all(turns, renderer, self._media))
        check_learnable(rows, [(ids, mask) for ids, mask, _ in weighted])
        kept = self.fitting(rows, [len(ids) for ids, *_ in weighted])
        return [(f"{entry}:{rows.number(i)}", np.asarray(weighted[i][0], dtype=np.int32),
                 np.asarray(weighted[i][1], dtype=bool), chats[i].media, weighted[i][2]) for i in kept]  # yapf: disable

    def media_of(self, row: Any) -> Iterable[tuple[str, ...]]:
        """Override: rows are not yet examples."""
        return [row[3]]

    def item(self, index: int) -> SFTExample:
        """The demonstration at ``index``."""
        uid, ids, mask, media, weights = self._rows[index]
        return SFTExample(uid, ids.tolist(), mask.tolist(), media, weights=weights)


class PretrainingDataset(SFTDataset):
    """Texts and demonstrations whose loss joins that of a policy."""
    NAME, LIMIT = "rows of --pretrain_data", "--pretrain_max_len"
    NAMED = ()  # --input_key names a column of the prompts

    def check_options(self) -> None:
        """Override: options of rendering are for the prompts too."""


def check_learnable(rows: Rows, encoded: list[Encoded]) -> None:
    """Raise a :class:`DataError` for a conversation without a token in the loss."""
    for i, (_, mask) in enumerate(encoded):
        if not any(mask):
            raise DataError(f"{rows.where(i)}: no token of the row is the assistant's. Complete or remove it, "
                            "or give another template with --chat_template")
