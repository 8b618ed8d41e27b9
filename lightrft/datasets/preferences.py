"""Preference data: pairs of a better and a worse answer to one prompt, from rows of any known schema.

Known schemas: ``{chosen, rejected[, prompt]}`` with texts or messages (TRL's explicit and implicit prompts, OpenRLHF's
keys), those with a prompt as in demonstrations (``messages``, ``input``, Alpaca's and ShareGPT's columns) or in
``question``, and ms-swift's ``messages`` with ``rejected_response``, ``rejected_messages``, or ``rejected_images`` (and
likewise for videos and audios). A row may have a ``margin``, ``tie: true`` if its answers are equally good, and
``heads``, by name which answer ("chosen", "rejected" or "tie") is better by other standards.
"""
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from lightrft.config.offline_schema import PairDataConfig
from lightrft.config.options import finite
from lightrft.datasets.media_rows import part_media, rejected_media
from lightrft.datasets.prompts_dataset import usable
from lightrft.datasets.prompt_rows import (as_chat, check_named_columns, Message, missing, normalise_prompt,
                                           prompt_column, silent, text_of, to_messages, truth, with_system)
from lightrft.datasets.rendering import unended, without_end
from lightrft.datasets.rows import DataError, Row, Rows, UnusableRow
from lightrft.datasets.sft_dataset import (answered, check_learnable, check_turns, Conversation, encode_all, SFTExample,
                                           shows_media, TokenizedDataset, with_media)
from lightrft.datasets.template_kwargs import template_kwargs, TemplateKwargs
from lightrft.datasets.turn_weights import check_unweighted, weigh
from lightrft.utils.logging import warn_of_all

if TYPE_CHECKING:  # a mistake in a row is found without torch
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from lightrft.datasets.media_store import MediaStore

Answer = str | list[Message]
_REMEDY = "Complete the row, remove it, or use --pair_policy skip"
_BETTER = {"chosen": 1.0, "rejected": 0.0, "tie": 0.5}  # probability that the chosen answer is better


class PairError(UnusableRow):
    """The answers of one row cannot be compared."""


@dataclass(frozen=True)
class Pair:
    """One row, tokenized. The sequences end with the last token of the answer, which alone is in the loss.

    Attributes:
        margin: by how much the chosen answer is better, on the scale of rewards; None where the row does not say.
        tie: the answers are equally good.
        heads: probability that the chosen answer is better by other standards, by their names.
        shown: an answer holds media itself.
    """
    uid: str
    chosen: SFTExample
    rejected: SFTExample
    margin: float | None = None
    tie: bool = False
    heads: dict[str, float] = field(default_factory=dict)
    shown: bool = False


@dataclass(frozen=True)
class PairRecord:
    """One row in our schema."""
    prompt: Answer
    chosen: Answer
    rejected: Answer
    margin: float | None
    tie: bool
    heads: dict[str, float]
    template_kwargs: TemplateKwargs


def to_pair(row: Row, cfg: PairDataConfig, where: str, ends: tuple[str, ...] = ()) -> PairRecord:
    """Recognise one row. ``where`` names it in messages; end tokens ``ends`` behind answers are dropped.

    Raises:
        PairError: an answer or a turn of it is missing or empty, both are equal, or there is no prompt that is common
            to both.
        DataError: an answer is text and the other one messages, the margin is no number, the tie neither true
            nor false, or messages are not valid.
    """
    tie, margin = is_tie(row, where), finite(row.get("margin"))
    if margin is None and row.get("margin") not in (None, ""):
        raise DataError(f"{where}: the margin {row['margin']!r} is not a number. Correct or remove it")
    answers = _answers(row, cfg, where, ends)
    texts = _parted(_asked(row, cfg.prompt_key, where), *answers)
    if answers[0] == answers[1] and not tie and not _other_media(row, cfg, texts):
        raise PairError(f"{where}: the chosen and the rejected answer are equal. Remove the row, mark it with 'tie': "
                        "true, or use --pair_policy skip")
    _check(texts, row, where)
    _check_asked(texts[0], row, cfg, where)
    prompt, chosen, rejected = with_system(texts[0], row, where), *texts[1:]
    kwargs = template_kwargs(row, cfg.apply_chat_template or not isinstance(prompt, str), where)
    return PairRecord(prompt, chosen, rejected, margin, tie, _heads(row, where), kwargs)


def _check(texts: tuple[Answer, Answer, Answer], row: Row, where: str) -> None:
    """Raise a :class:`PairError` for an answer without text or to another question, and for no prompt."""
    prompt, *answers = texts
    for key, answer in zip(("chosen", "rejected"), answers):
        turns = [turn for turn in answer if isinstance(turn, dict)]
        if turns and turns[0]["role"] != "assistant":
            raise PairError(f"{where}: the {key} answer begins with a turn of {turns[0]['role']!r}, which is not in "
                            f"the other one: they answer different questions. {_REMEDY}")
        if missing(answer) or any(turn["role"] == "assistant" and silent(turn) for turn in turns):
            raise PairError(f"{where}: the {key} answer has an empty turn, or nothing after the beginning that both "
                            f"share. {_REMEDY}")
    if missing(prompt) if isinstance(prompt, str) else all(map(silent, prompt)):
        raise PairError(f"{where}: the row has no prompt (it has {', '.join(row)}), and its answers do not begin with "
                        f"one. Name its column with --prompt_key. {_REMEDY}")


def _check_asked(prompt: Answer, row: Row, cfg: PairDataConfig, where: str) -> None:
    """Raise a :class:`PairError` for turns of the column of prompts that whole chats with their own ``prompt`` lack."""
    if isinstance(prompt, str) or missing(row.get(cfg.prompt_key)) or missing(row.get(cfg.chosen_key)):
        return
    if lost := lacking(row[cfg.prompt_key], prompt, where):
        raise PairError(f"{where}: the answers are whole chats without the {lost} in the column {cfg.prompt_key!r}. "
                        "Write the prompt in one of both, remove the row, or use --pair_policy skip")


def lacking(asked: Any, prompt: list[Message], where: str) -> str:
    """Name what the turns before an answer lack of a prompt that a row has apart from them; empty: nothing."""
    if isinstance(asked, (list, dict)):
        return next((f"turn of {turn['role']!r}" for turn in to_messages(asked, where) if turn not in prompt), "")
    return "" if _is_asked(str(asked), prompt) else "text"


def _is_asked(text: str, prompt: list[Message]) -> bool:
    """Return True if ``text`` is part of a turn, or holds all turns but those of the system."""
    said = [(turn["role"], text_of(turn["content"]).strip()) for turn in prompt]
    return any(text.strip() in each for _, each in said) or all(each in text for role, each in said if role != "system")


def is_tie(row: Row, where: str) -> bool:
    """Read the column ``tie`` of a row; without a value it is false.

    Raises:
        DataError: it is neither true nor false.
    """
    tie = False if row.get("tie") is None else truth(row["tie"])
    if tie is None:
        raise DataError(f"{where}: the column 'tie' is {row['tie']!r}: expected true or false, or 1 or 0. Correct it")
    return tie


def _heads(row: Row, where: str) -> dict[str, float]:
    found = row.get("heads") or {}
    wrong = [] if isinstance(found, dict) else [found]
    wrong = wrong or [f"{name}: {better}" for name, better in found.items() if better not in (None, *_BETTER)]
    if wrong:
        raise DataError(f"{where}: the column 'heads' has {wrong[0]!r}. Write {{name: one of {', '.join(_BETTER)}}}")
    return {name: _BETTER[better] for name, better in found.items() if better is not None}


def _answers(row: Row, cfg: PairDataConfig, where: str, ends: tuple[str, ...]) -> tuple[Answer, Answer]:
    """Return both answers, perhaps with the prompt before them."""
    chosen, rejected = row.get(cfg.chosen_key), row.get(cfg.rejected_key)
    if missing(chosen) and not missing(row.get("messages")):
        chosen, rejected = to_messages(row["messages"], where), row.get("rejected_messages")
        if missing(rejected) and not missing(row.get("rejected_response")):
            rejected = [*chosen[:-1], {"role": "assistant", "content": row["rejected_response"]}]
        if missing(rejected) and rejected_media(row, cfg):
            rejected = chosen
    if isinstance(chosen, str) != isinstance(rejected, str) and not (missing(chosen) or missing(rejected)):
        raise DataError(f"{where}: mixed schema: one answer is text, the other one messages. Write both in one form")
    found = [_answer(value, key, row, where, ends) for key, value in (("chosen", chosen), ("rejected", rejected))]
    return found[0], found[1]


def _answer(value: Any, key: str, row: Row, where: str, ends: tuple[str, ...]) -> Answer:
    """Return an answer as text or messages, of which the last one is the answer."""
    if isinstance(value, str):
        answer: Any = without_end(value, ends)
    else:
        answer = value if missing(value) else unended(to_messages(value, where), ends)
    if missing(answer) or isinstance(answer, list) and (answer[-1]["role"] != "assistant" or silent(answer[-1])):
        raise PairError(f"{where}: the {key} answer is missing or empty (the row has {', '.join(row)}). Name its "
                        f"column with --{key}_key, remove the row, or use --pair_policy skip")
    return answer


def _asked(row: Row, key: str, where: str) -> Answer | None:
    """Return the prompt that a row has apart from its answers: empty where column ``key`` is, None without any."""
    row = as_chat(row, key, where)
    column = prompt_column(row, key) or "question"
    if column == key and isinstance(row[key], list):
        return to_messages(row[key], where)
    if not missing(row.get(column)):
        return normalise_prompt(row[column], where, column)
    return "" if key in row else None


def _parted(prompt: Answer | None, chosen: Answer, rejected: Answer) -> tuple[Answer, Answer, Answer]:
    """Return prompt and answers; answers that hold the prompt are parted where they begin to differ."""
    if isinstance(chosen, list) and isinstance(rejected, list):
        if not prompt or chosen[0]["role"] != "assistant":
            last = min(len(chosen), len(rejected)) - 1
            at = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), last)
            return chosen[:at], chosen[at:], rejected[at:]
    elif prompt is None:
        at = len(re.sub(r"\S*\Z", "", commonprefix([str(chosen), str(rejected)])))  # words stay whole
        return chosen[:at], chosen[at:], rejected[at:]
    return prompt or "", chosen, rejected


def _contents(answer: Answer) -> list[Any]:
    return [answer] if isinstance(answer, str) else [turn.get("content") for turn in answer]


def _side_media(row: Row, cfg: PairDataConfig, texts: Sequence[Answer]) -> tuple[Row, Row]:
    """Return the columns of the media of the prompt with the chosen, and with the rejected answer, where that is not
    the whole column; ``texts``: the prompt, and both."""
    own, parts = rejected_media(row, cfg), part_media(row, cfg, [_contents(text) for text in texts])
    chosen, rejected = ({name: asked + media[side] for name, (asked, *media) in parts.items() if name not in own}
                        for side in (0, 1))  # yapf: disable
    return chosen, rejected | own


def _other_media(row: Row, cfg: PairDataConfig, texts: Sequence[Answer]) -> bool:
    """Return True if the answers of a row have different media in columns; ``texts``: its prompt, and both."""
    chosen, rejected = (row | media for media in _side_media(row, cfg, texts))
    return chosen != rejected


def side_rows(rows: Rows, pairs: dict[int, PairRecord], cfg: PairDataConfig) -> tuple[Rows, Rows]:
    """Return the rows ``pairs`` twice: with the media of the prompt and of the chosen answer, and of the rejected one.

    Columns with a medium for each placeholder of prompt and both answers are parted. Others belong to both sides,
    unless the rejected one has its own.
    """
    found = rows.pick(pairs)
    sides = [_side_media(row, cfg, (pair.prompt, pair.chosen, pair.rejected))
             for row, pair in zip(found.rows, pairs.values())]  # yapf: disable
    chosen, rejected = ([row | side[i] for row, side in zip(found.rows, sides)] for i in (0, 1))
    return replace(found, rows=chosen), replace(found, rows=rejected)


class PairDataset(TokenizedDataset[Pair]):
    """Pairs; ``cfg`` also selects their columns. ``dropped`` counts those of ``--pair_policy skip`` too."""
    NAME = "pairs"

    def __init__(self, cfg: PairDataConfig, tokenizer: "PreTrainedTokenizerBase", split: str = "train",
                 media: "MediaStore | None" = None) -> None:
        self._cfg = cfg
        super().__init__(cfg.as_data_config(), tokenizer, cfg.max_len, split, media)

    def read(self, entry: int, rows: Rows) -> list[Pair]:
        """Tokenize both sequences of each pair."""
        records = find_pairs(rows, self._cfg, self._renderer.ends)
        pairs, data, sides = [*records.values()], self._renderer.cfg, list[dict[int, Conversation]]()
        answers_of = [pair.chosen for pair in pairs], [pair.rejected for pair in pairs]
        for own, answers in zip(side_rows(rows, records, self._cfg), answers_of):
            chats = [replace(answered(pair.prompt, answer, self._renderer, own.where(i)),
                             template_kwargs=pair.template_kwargs)
                     for i, (pair, answer) in enumerate(zip(pairs, answers))]  # yapf: disable
            for i, chat in enumerate(chats):
                check_turns(chat, own.where(i))
                check_unweighted(chat, own.where(i))
            sides.append(with_media(own, chats, data, self._media))
        rows = rows.pick(records)
        both = [i for i in sides[0] if i in sides[1]]
        rows, pairs = rows.pick(both), [pairs[i] for i in both]
        shown = [any(shows_media(side[i]) for side in sides) for i in both]
        chosen, rejected = (self._encoded(entry, rows, [side[i] for i in both]) for side in sides)
        lens = [max(len(a.token_ids), len(b.token_ids)) for a, b in zip(chosen, rejected)]
        found = {i: Pair(chosen[i].uid, chosen[i], rejected[i], pairs[i].margin, pairs[i].tie, pairs[i].heads, shown[i])
                 for i in self.fitting(rows, lens)}  # yapf: disable
        return distinct(rows, found, self._cfg.pair_policy)

    def media_of(self, row: Pair) -> Iterable[tuple[str, ...]]:
        """Override: a pair is two sequences."""
        return row.chosen.media, row.rejected.media

    def _encoded(self, entry: int, rows: Rows, chats: list[Conversation]) -> list[SFTExample]:
        """Tokenize one side of all pairs, up to the last token of the answer."""
        weighted = weigh(chats, encode_all(chats, self._renderer, self._media),
                         lambda turns: encode_all(turns, self._renderer, self._media))
        encoded = [(ids, mask) for ids, mask, _ in weighted]
        check_learnable(rows, encoded)
        ends = [len(mask) - mask[::-1].index(True) for _, mask in encoded]
        return [SFTExample(f"{entry}:{rows.number(i)}", ids[:end], mask[:end], chat.media)
                for i, ((ids, mask), end, chat) in enumerate(zip(encoded, ends, chats))]  # yapf: disable


def distinct(rows: Rows, pairs: dict[int, Pair], policy: str) -> list[Pair]:
    """Return ties, and the pairs whose sequences differ in tokens or media; a template may trim what the texts differ
    in. The number of others is logged under the policy "skip".

    Raises:
        PairError: there is another one, under the policy "error".
    """
    sides = {i: [(side.token_ids, side.media) for side in (pair.chosen, pair.rejected)] for i, pair in pairs.items()}
    equal = [i for i, (chosen, rejected) in sides.items() if chosen == rejected and not pairs[i].tie]
    if equal and policy == "error":
        raise PairError(
            f"{rows.where(equal[0])}: the chosen answer has the same tokens as the rejected one: the chat template "
            "drops the difference. Remove the row, mark it with 'tie': true, or use --pair_policy skip")
    if equal:
        warn_of_all(f"{len(equal)} of {len(rows)} rows have answers that are the same tokens (the first: "
                    f"{rows.where(equal[0])}): left out")
    return [pairs[i] for i in sorted(pairs.keys() - equal)]


def find_pairs(rows: Rows, cfg: PairDataConfig, ends: tuple[str, ...] = ()) -> dict[int, PairRecord]:
    """Recognise the rows of one entry as :func:`to_pair` does, by index; those left out under ``--pair_policy skip``
    are counted in the log."""
    check_named_columns(rows, cfg, ["prompt_key", "chosen_key", "rejected_key"])
    return usable(rows, lambda row, where: to_pair(row, cfg, where, ends), cfg.pair_policy,
                  "have answers that cannot be compared")
