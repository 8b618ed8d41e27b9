"""Training data of judges: two candidates in random order, as a chat whose answer is in ``<answer>`` tags.

Rows: ``{prompt, chosen, rejected[, judgement][, tie]}``, candidates as text or messages. The tools of a row stand
before its prompt, as in the requests of a reward. Pictures, videos and sounds are in columns, with ``<image>`` and its
like where they appear, those of the prompt first, then those of the chosen and of the rejected candidate.
"""
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from lightrft.config.rm_schema import JudgeDataConfig, JudgeFormat
from lightrft.datasets.media_rows import media_columns, part_media, rejected_media
from lightrft.datasets.preferences import is_tie, lacking
from lightrft.datasets.prompt_rows import check_named_columns, missing, text_of, to_messages, with_system
from lightrft.datasets.rendering import without_end
from lightrft.datasets.rows import DataError, Row, Rows
from lightrft.datasets.sft_dataset import SFTDataset, SFTExample
from lightrft.datasets.template_kwargs import template_kwargs
from lightrft.datasets.tool_texts import calls_of, shown_tools

if TYPE_CHECKING:  # a mistake in a row is found without torch
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from lightrft.datasets.media_store import MediaStore

NAMES = ("Response 1", "Response 2")
ANSWERS = (*(f"{name} is better" for name in NAMES), "Both are equally good")
TIE = 2  # index of the last answer
INSTRUCTION = f"""Which response to the prompt is better?

Prompt: {{prompt}}

{NAMES[0]}: {{first}}

{NAMES[1]}: {{second}}

End with one of <answer>{ANSWERS[0]}</answer>, <answer>{ANSWERS[1]}</answer>, <answer>{ANSWERS[TIE]}</answer>."""
_IN_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class Judgement:
    """A request to a judge, and the expected judgement.

    Attributes:
        request: text, with ``<image>`` and its like.
        text: the judgement, with the answer at its end.
        right: index in ``ANSWERS``; 0: the first candidate is better.
        media: columns of the media, in the order of their appearance.
    """
    request: str
    text: str
    right: int
    media: dict[str, Any]

    @property
    def answer(self) -> str:
        """The right answer."""
        return ANSWERS[self.right]


def verdict(text: str) -> str:
    """Return what a judgement has in its last ``<answer>`` tags; empty without any."""
    return next(reversed(_IN_TAGS.findall(text)), "").strip()


def judge_format(cfg: JudgeDataConfig) -> JudgeFormat:
    """Return the format of the requests of a training."""
    return JudgeFormat(cfg.task_instruction or INSTRUCTION, cfg.system_prompt, cfg.input_template,
                       cfg.chat_template_kwargs)


def request(instruction: str, prompt: str, first: str, second: str) -> str:
    """Fill the text of a request to compare two candidates."""
    return _filled(instruction, {"prompt": prompt, "first": first, "second": second})


def chosen_is_second(seed: int, uid: str) -> bool:
    """Draw the order of the candidates of a row: it depends on the seed and the name of the row alone."""
    return random.Random(f"{seed} {uid}").random() < 0.5


def to_judgement(row: Row, cfg: JudgeDataConfig, second: bool, where: str, ends: tuple[str, ...] = ()) -> Judgement:
    """Write one row as a request and its judgement; ``second``: the chosen candidate comes second. End tokens ``ends``
    behind the candidates are dropped.

    Raises:
        DataError: a text is missing, the candidates are equal in a row that is no tie, or end different chats, or the
            judgement ends with another answer.
    """
    prompt = shown_tools(template_kwargs(row, True, where)) + _text(row, cfg.prompt_key, where, ())
    chosen, rejected = (_text(row, name, where, ends, last=True) for name in (cfg.chosen_key, cfg.rejected_key))
    _check_question(row, cfg, where)
    media, tie = _media(row, cfg, (prompt, chosen, rejected), second, where), is_tie(row, where)
    if chosen == rejected and not tie and not media:
        raise DataError(
            f"{where}: the chosen and the rejected candidate are equal. Remove the row, or mark it with 'tie': true")
    first, last = (rejected, chosen) if second else (chosen, rejected)
    right = TIE if tie else int(second)
    names = {"chosen": NAMES[second], "rejected": NAMES[not second]}
    said = _filled(_said(row, cfg.judgement_key, where), names)
    if not verdict(said):
        said = f"{said}\n<answer>{ANSWERS[right]}</answer>".lstrip()
    if verdict(said) != ANSWERS[right]:
        raise DataError(f"{where}: the judgement ends with {verdict(said)!r}, and {ANSWERS[right]!r} is right in this "
                        "order. Write {chosen} and {rejected} for the names of the candidates")
    return Judgement(request(judge_format(cfg).instruction, prompt, first, last), said, right, media)


def _check_question(row: Row, cfg: JudgeDataConfig, where: str) -> None:
    """Raise a :class:`DataError` for candidates that end different chats, or chats of another prompt."""
    chosen, rejected = ([] if isinstance(row[name], str) else to_messages(row[name], where)[:-1]
                        for name in (cfg.chosen_key, cfg.rejected_key))  # yapf: disable
    if chosen != rejected and chosen and rejected:
        raise DataError(f"{where}: the candidates end different chats, so they answer different questions. Correct or "
                        "remove the row")
    before = chosen or rejected
    if lost := lacking(row[cfg.prompt_key], before, where) if before else "":
        raise DataError(f"{where}: the candidates end chats without the {lost} in the column {cfg.prompt_key!r}, so "
                        "they answer another question. Correct or remove the row")


def _said(row: Row, key: str, where: str) -> str:
    """Return the judgement of a row, empty without one."""
    said = row.get(key)
    if not isinstance(said, str) and not missing(said):
        raise DataError(f"{where}: the column {key!r} is {said!r}: expected a text. Correct or remove it")
    return said if isinstance(said, str) else ""


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda name: values.get(name[1], name[0]), text)


def _text(row: Row, name: str, where: str, ends: tuple[str, ...], last: bool = False) -> str:
    """Return the turns of a column, or the ``last`` one alone, as text without the tokens ``ends`` behind it."""
    value = row.get(name) if last else with_system(row.get(name), row, where)
    turns = [] if isinstance(value, str) or missing(value) else to_messages(value, where)
    if last and turns and turns[-1]["role"] != "assistant":
        raise DataError(
            f"{where}: {name} ends with a turn of {turns[-1]['role']!r}: the candidate is the last turn, of "
            "'assistant'. Complete or remove the row")
    contents = [turn["content"] for turn in (turns[-1:] if last else turns)]
    if any(isinstance(part, dict) and part.get("type", "text") != "text"
           for content in contents if isinstance(content, list) for part in content):  # yapf: disable
        raise DataError(f"{where}: {name} has media inside its messages. Write <image>, <video> or <audio> there, and "
                        "put the media in columns")
    shown = [text_of(turn["content"]) + calls_of(turn) for turn in (turns[-1:] if last else turns)]
    text = without_end(value if isinstance(value, str) else "\n".join(shown), ends)
    if missing(text):
        raise DataError(f"{where}: the row has no {name} (it has {', '.join(row)}). Name its column with --prompt_key, "
                        "--chosen_key or --rejected_key, or remove the row")
    return text


def _media(row: Row, cfg: JudgeDataConfig, texts: tuple[str, ...], second: bool, where: str) -> dict[str, Any]:
    """Return the columns of the media; those of the rejected candidate come before those of the chosen with ``second``.

    Raises:
        DataError: the row has other media for the rejected candidate.
    """
    if other := rejected_media(row, cfg.as_data_config()):
        raise DataError(f"{where}: the row has other media for the rejected candidate (rejected_images or its like), "
                        "and a judge sees both candidates in one request. Write <image> and its like where media "
                        f"appear, and all of them in the column {next(iter(other))!r}")
    media = {name: row[name] for name in media_columns(cfg.as_data_config()) if not missing(row.get(name))}
    if second:
        parted = part_media(row, cfg, [[text] for text in texts])
        media |= {name: [*asked, *rejected, *chosen] for name, (asked, chosen, rejected) in parted.items()}
    return media


def find_judgements(entry: int, rows: Rows, cfg: JudgeDataConfig, seed: int,
                    ends: tuple[str, ...] = ()) -> dict[str, Judgement]:
    """Write the rows of an entry as :func:`to_judgement` does, by uid; ``seed``: of the order of the candidates."""
    check_named_columns(rows, cfg, ["prompt_key", "chosen_key", "rejected_key", "judgement_key"])
    uids = [f"{entry}:{rows.number(i)}" for i in range(len(rows))]
    return {uid: to_judgement(row, cfg, chosen_is_second(seed, uid), where, ends)
            for uid, (row, where) in zip(uids, rows.named)}  # yapf: disable


@dataclass(frozen=True)
class JudgedExample(SFTExample):
    """A judgement, tokenized; ``right`` as in :class:`Judgement`."""
    right: int = TIE


class JudgementDataset(SFTDataset):
    """Judgements of one split, tokenized at construction; arguments and errors as of :class:`SFTDataset`.

    Args:
        seed: of the order of the candidates.
    """
    NAME = "judgements"

    def __init__(self, cfg: JudgeDataConfig, tokenizer: "PreTrainedTokenizerBase", split: str = "train",
                 media: "MediaStore | None" = None, seed: int = 0) -> None:
        self._cfg, self._seed, self._right = cfg, seed, dict[str, int]()
        super().__init__(cfg.as_data_config(), tokenizer, cfg.max_len, split, media)

    def read(self, entry: int, rows: Rows) -> list[Any]:
        """Write the rows as chats, and read those."""
        chats: list[Row] = []
        judgements = find_judgements(entry, rows, self._cfg, self._seed, self._renderer.ends)
        for i, (uid, judgement) in enumerate(judgements.items()):
            self._right[uid] = judgement.right
            kwargs = template_kwargs(rows.rows[i], True, rows.where(i))
            kwargs.pop("tools", None)  # in the text of the request
            turns = [{"role": "user", "content": judgement.request}, {"role": "assistant", "content": judgement.text}]
            chats.append({"messages": turns, "chat_template_kwargs": kwargs, **judgement.media})
        return super().read(entry, replace(rows, rows=chats))

    def item(self, index: int) -> JudgedExample:
        """The judgement at ``index``."""
        one = super().item(index)
        return JudgedExample(**{field.name: vars(one)[field.name] for field in fields(one)}, right=self._right[one.uid])
