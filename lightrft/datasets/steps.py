"""Solutions with a label for each step, as training data of process reward models, and their tokens.

Known schemas: ``{input, label}`` with a placeholder after every step and a list of labels (OpenRLHF), the same with the
labels written in place of the placeholders (Math-Shepherd), and ``{prompt, completions, labels}`` (TRL, PRM800K).
"""
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from lightrft.config.options import finite
from lightrft.config.rm_schema import single_token, StepDataConfig, StepFormat
from lightrft.datasets.prompts_dataset import usable
from lightrft.datasets.prompt_rows import check_named_columns, Message, missing, to_messages, with_system
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.rows import DataError, Row, Rows, UnusableRow
from lightrft.datasets.sft_dataset import Conversation, Encoded, SFTExample, TokenizedDataset, with_media
from lightrft.datasets.template_kwargs import template_kwargs, TemplateKwargs
from lightrft.datasets.token_texts import decode_behind

if TYPE_CHECKING:  # a mistake in a row is found without torch
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from lightrft.datasets.media_store import MediaStore

_ADVICE = "Correct or remove the row, or use --step_policy skip"


class StepError(UnusableRow):
    """The steps of one row and its labels do not match."""


@dataclass(frozen=True)
class Solution:
    """One row in our schema: the texts before the placeholders, and their labels.

    ``prompt`` comes before the first text; None: that holds it.
    """
    prompt: str | list[Message] | None
    steps: list[str]
    labels: list[Any]
    template_kwargs: TemplateKwargs = field(default_factory=dict)


@dataclass(frozen=True)
class StepExample(SFTExample):
    """One row, tokenized up to its last placeholder. ``loss_mask`` marks the placeholders; each has one of ``labels``:
    the probability that the step is good (:attr:`StepFormat.graded`), or the number of its class."""
    labels: tuple[float, ...] = ()


def to_solution(row: Row, cfg: StepDataConfig, where: str) -> Solution:
    """Recognise one row. ``where`` names it in messages.

    Raises:
        StepError: there is no step, a step is empty or no text, or steps and labels differ in number.
        DataError: the row has no solution, or no labels, or holds a whole one which options would change.
    """
    if not missing(row.get(cfg.input_key)):
        _check_text(row[cfg.input_key], f"{where}: the column {cfg.input_key!r}")
        _check_rendering(cfg, where)
        *steps, _ = row[cfg.input_key].split(str(cfg.placeholder_token))
        labels = row.get(cfg.label_key)
        labels = _written(labels, steps, cfg.reward_tokens, where) if isinstance(labels, str) else labels
        return _checked(Solution(None, steps, labels or [], template_kwargs(row, False, where)), cfg, where)
    prompt, texts, labels = row.get("prompt"), row.get("completions"), row.get("labels") or row.get(cfg.label_key)
    if missing(prompt) or not isinstance(texts, list):
        raise DataError(f"{where}: the row has no solution (it has {', '.join(row)}). A row needs {cfg.input_key} (see "
                        f"--input_key) and {cfg.label_key} (see --label_key), or prompt, completions and labels")
    for i, text in enumerate(texts):
        _check_text(text, f"{where}: step {i + 1} of {len(texts)}")
    if any(str(cfg.placeholder_token) in text for text in texts):
        raise StepError(f"{where}: a step holds {cfg.placeholder_token}, which marks the end of every step. Remove it, "
                        "or use another --placeholder_token")
    between = cfg.form.step_separator
    steps = [between * (i > 0) + text.removesuffix(between) for i, text in enumerate(texts)]
    prompt = with_system(prompt, row, where)
    asked = prompt if isinstance(prompt, str) else to_messages(prompt, where)
    kwargs = template_kwargs(row, cfg.apply_chat_template or not isinstance(asked, str), where)
    return _checked(Solution(asked, steps, labels or [], kwargs), cfg, where)


def find_solutions(rows: Rows, cfg: StepDataConfig) -> dict[int, Solution]:
    """Recognise the rows of one entry as :func:`to_solution` does, by index; those left out under ``--step_policy
    skip`` are counted in the log."""
    check_named_columns(rows, cfg, ["input_key", "label_key"])
    return usable(rows, lambda row, where: to_solution(row, cfg, where), cfg.step_policy,
                  "have no label for each of their steps")


def _check_text(value: Any, name: str) -> None:
    if not isinstance(value, str):
        raise StepError(f"{name} is {repr(value):.80}, which is no text but {type(value).__name__}. {_ADVICE}")


def _check_rendering(cfg: StepDataConfig, where: str) -> None:
    """Raise a :class:`DataError` for options that change a prompt, which a whole solution does not have apart."""
    for name in ("system_prompt", "input_template"):
        if getattr(cfg, name) is not None:
            raise DataError(f"{where}: --{name} has no effect on {cfg.input_key!r}, which holds a whole solution. Drop "
                            "it, or write rows with prompt, completions and labels")


def _checked(solution: Solution, cfg: StepDataConfig, where: str) -> Solution:
    """Return the solution, with labels as numbers."""
    steps, labels = solution.steps, solution.labels
    if not steps:
        raise StepError(f"{where}: the solution has no step (no {cfg.placeholder_token} in it). {_ADVICE}")
    if not isinstance(labels, list) or len(labels) != len(steps):
        count = f"{len(labels)} labels" if isinstance(labels, list) else f"the label {labels!r}"
        raise StepError(f"{where}: {count} for {len(steps)} steps; each needs one. {_ADVICE}")
    for i, text in enumerate(steps):
        if missing(text):
            raise StepError(f"{where}: step {i + 1} of {len(steps)} is empty. {_ADVICE}")
    return solution


def _written(text: str, steps: list[str], words: list[str], where: str) -> list[str]:
    """Read labels that are written in a copy of the solution, in place of its placeholders."""
    either = "|".join(map(re.escape, words)) or r"\S+?"
    found = re.match("".join(f"{re.escape(step)}({either})" for step in steps), text) if steps else None
    if found is None:
        raise StepError(f"{where}: the label is a text, but not the solution with one of --reward_tokens "
                        f"({' '.join(words)}) in place of each placeholder. Give a list of labels")
    return list(found.groups())


class Labels:
    """Reader of labels for steps in the format ``form``.

    Raises:
        UserError: a token of the format is not one token of the tokenizer.
    """

    def __init__(self, form: StepFormat, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.form, self.tokenizer = form, tokenizer
        form.reward_ids(tokenizer)
        words = form.reward_tokens
        self.known = {word: float(1 - i if form.graded else i) for i, word in enumerate(words)}

    def read(self, label: Any, where: str) -> float:
        """Convert one label.

        Raises:
            DataError: it is none of the reward tokens, and no number in [0, 1] that two of them could share.
        """
        number = finite(float(label)) if isinstance(label, (bool, int, float)) and self.form.graded else None
        if number is not None and 0 <= number <= 1:
            return number
        if isinstance(label, str) and not self.form.reward_tokens and label not in self.known:
            self.known[label] = float(single_token(self.tokenizer, label, f"{where}: the label"))
        if not isinstance(label, str) or label not in self.known:
            raise DataError(f"{where}: the label {label!r} is not {self._expected()}")
        return self.known[label]

    def _expected(self) -> str:
        words = self.form.reward_tokens
        if not words:
            return "a token: name the tokens of a good and a bad step for other labels, e.g. --reward_tokens + -"
        shared = ", nor true, false or a number from 0 to 1" if self.form.graded else ""
        return f"one of --reward_tokens {' '.join(words)}{shared}. Correct it"


def encode_steps(prompts: list[tuple[str, list[int]]], steps: list[list[str]], form: StepFormat,
                 renderer: Renderer) -> list[Encoded]:
    """Join the tokens of ``prompts``, (text, tokens) each, with those of their steps, each of which is followed by the
    placeholder.

    Texts are tokenized one by one: the first step behind its prompt, as an answer is, and the others without a blank
    that a tokenizer puts before every text. So the tokens of a step do not depend on what follows it, and the
    placeholder is always a token of its own; where its token has a blank, as in the Metaspace kind, a step does not end
    with that blank. The mask is True on these placeholders.
    """
    placeholder, examples = form.placeholder_id(renderer.tokenizer), list[Encoded]()
    if _has_blank(placeholder, form, renderer):
        steps = [[text.removesuffix(" ") for text in texts] for texts in steps]
    first = renderer.encode_after([text for text, _ in prompts], [(each or [""])[0] for each in steps])
    others = iter(renderer.encode_inside([text for texts in steps for text in texts[1:]]))
    for (_, head), (begun, _), texts in zip(prompts, first, steps):
        pieces = [begun, *(next(others) for _ in texts[1:])][:len(texts)]
        ids = [*head, *chain.from_iterable([*piece, placeholder] for piece in pieces)]
        ends = {len(head) + end for end in accumulate(len(piece) + 1 for piece in pieces)}
        examples.append((ids, [i + 1 in ends for i in range(len(ids))]))
    return examples


def _has_blank(placeholder: int, form: StepFormat, renderer: Renderer) -> bool:
    """Return True if the placeholder's token writes a blank that ``form.placeholder_token`` does not begin with."""
    (mark, ) = renderer.encode_inside(["="])
    (text, ) = decode_behind(renderer.tokenizer, [(mark, [placeholder])])
    return text.startswith(" ") and not form.placeholder_token.startswith(" ")


class StepDataset(TokenizedDataset[StepExample]):
    """Labelled solutions; ``cfg`` also selects their columns, and the tokens of steps and labels. ``dropped`` counts
    those of ``--step_policy skip`` too.

    Raises:
        UserError: the placeholder or a reward token is not one token.
    """
    NAME = "solutions"

    def __init__(self, cfg: StepDataConfig, tokenizer: "PreTrainedTokenizerBase", split: str = "train",
                 media: "MediaStore | None" = None) -> None:
        self._cfg, self._labels = cfg, Labels(cfg.form, tokenizer)
        cfg.form.placeholder_id(tokenizer)  # checked before the rows are read
        super().__init__(cfg.as_data_config(), tokenizer, cfg.max_len, split, media)

    def read(self, entry: int, rows: Rows) -> list[StepExample]:
        """Tokenize the solutions up to their last placeholder."""
        known = find_solutions(rows, self._cfg)
        rows, solutions = rows.pick(known), [*known.values()]
        labels = [
            tuple(self._labels.read(label, rows.where(i)) for label in each.labels) for i, each in enumerate(solutions)
        ]
        chats = [Conversation(None if each.prompt is None else self._renderer.messages(each.prompt),
                              pair=(each.prompt if isinstance(each.prompt, str) else "", "".join(each.steps)))
                 for each in solutions]  # yapf: disable
        found = with_media(rows, chats, self._renderer.cfg, self._media)
        rows, solutions, labels = rows.pick(found), [solutions[i] for i in found], [labels[i] for i in found]
        heads = [self._head(each, chat) for each, chat in zip(solutions, found.values())]
        encoded = encode_steps(heads, [each.steps for each in solutions], self._cfg.form, self._renderer)
        media = [chat.media for chat in found.values()]
        return [StepExample(f"{entry}:{rows.number(i)}", *encoded[i], media[i], labels[i])
                for i in self.fitting(rows, [len(ids) for ids, _ in encoded])]  # yapf: disable

    def _head(self, solution: Solution, chat: Conversation) -> tuple[str, list[int]]:
        """Return the text and the tokens before the steps; of a whole solution, the tokenizer's first token."""
        if chat.messages is None:
            text = "" if solution.prompt is None else self._renderer.text(str(solution.prompt))
            return text, self._renderer.encode_text([text])[0]
        (text, ), (ids, ) = self._renderer.encode_chats([chat.messages], [solution.template_kwargs])
        return text, self._media.encode(text, chat.media) if self._media is not None and chat.media else ids


def split_steps(response: str, form: StepFormat, separator: str) -> list[str]:
    """Split a response at ``separator`` into the texts that :func:`encode_steps` takes.

    Blank steps are left out. So is the placeholder where the response writes it: it judges nothing itself.
    """
    texts: Sequence[str] = response.replace(form.placeholder_token, "").split(separator)
    return [form.step_separator * (i > 0) + text
            for i, text in enumerate(text for text in texts if text.strip())]  # yapf: disable


def step_ends(response: str, form: StepFormat, separator: str) -> list[int]:
    """Return for each step of :func:`split_steps` the number of characters of ``response`` up to its end, without the
    white space that follows it."""
    pieces = response.split(form.placeholder_token)
    cuts, ends, start = [*accumulate(map(len, pieces[:-1]))], [], 0  # in the response without placeholders
    for text in "".join(pieces).split(separator):
        if text.strip():
            end = start + len(text.rstrip())
            ends.append(end + len(form.placeholder_token) * sum(cut < end for cut in cuts))
        start += len(text) + len(separator)
    return ends
