"""Rows that have their responses already: ``--eval_task rm`` scores them without generating."""
from dataclasses import dataclass, field, replace
from typing import Any

from lightrft.config.generate_schema import GenerateDataConfig
from lightrft.config.options import finite
from lightrft.datasets.columns import report_columns
from lightrft.datasets.media_rows import media_columns
from lightrft.datasets.prompt_rows import (find_label, find_reference, Message, missing, prompt_column, text_of,
                                           to_messages, with_system)
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.rows import DataError, load_rows, Row, Rows
from lightrft.datasets.template_kwargs import template_kwargs, TemplateKwargs

SCORE = ("reward", "reward_parts", "unscored")  # columns of a score


@dataclass(frozen=True)
class AnsweredRow:
    """A row with ``input`` and ``output`` as text, and its prompt as a chat, if it is one, with the keyword arguments
    of its chat template."""
    row: Row
    messages: list[Message]
    template_kwargs: TemplateKwargs = field(default_factory=dict)


def unscored(row: Row) -> Row:
    """Return the other columns of a row than those of a score."""
    return {name: value for name, value in row.items() if name not in SCORE}


def read_responses(cfg: GenerateDataConfig, rescored: bool, renderer: Renderer | None = None) -> list[AnsweredRow]:
    """Read the rows of ``--prompt_data``; their other columns stay. The columns that are read are logged.

    A chat (``--input_key chosen``, say) whose last turn is the assistant's is a prompt and its response.

    Args:
        rescored: the rows are scored now; else they have a ``reward``.
        renderer: of the reward model, which writes the ``input`` of a chat; without one a chat of several turns is in
            ``prompt`` too, which training reads in its place.

    Raises:
        DataError: a row has no prompt, no response, or no finite reward and nothing scores it.
    """
    found: list[AnsweredRow] = []
    for spec in cfg.prompt_data:
        rows = load_rows(spec, cfg.prompt_split)
        found += answered_rows(rows, cfg, rescored)
        if renderer is not None:
            _refuse_media(rows, media_columns(cfg))
        report_columns(rows, lambda some: [_observed(one, cfg, rescored) for one in answered_rows(some, cfg, rescored)],
                       "leaves to the rewards" if rescored else "leaves alone")
    return [_rendered(answered, renderer) for answered in found[:cfg.max_samples or None]]


def answered_rows(rows: Rows, cfg: GenerateDataConfig, rescored: bool) -> list[AnsweredRow]:
    """Recognise the rows of one entry; errors as of :func:`read_responses`."""
    return [_response(row, cfg, where, {} if rescored else _score(row, where)) for row, where in rows.named]


def _refuse_media(rows: Rows, columns: set[str]) -> None:
    """Raise a :class:`DataError` for media in columns, which a reward model would not see."""
    for i, row in enumerate(rows.rows):
        if media := sorted(name for name in columns if not missing(row.get(name))):
            raise DataError(
                f"{rows.where(i)}: the row has media ({', '.join(media)}), and --eval_task rm shows none to "
                "a reward model. Score while generating (--eval_task generate --score MODEL), or remove "
                "the column")


def reference_of(answered: AnsweredRow, cfg: GenerateDataConfig) -> Any:
    """Find the reference answer of a row, whose response is none."""
    return find_reference(other_columns(answered, cfg), cfg.reference_key)


def other_columns(answered: AnsweredRow, cfg: GenerateDataConfig) -> Row:
    """Return the columns of a row without its response."""
    return {name: value for name, value in answered.row.items() if name not in (cfg.output_key, "output")}


def _observed(answered: AnsweredRow, cfg: GenerateDataConfig, rescored: bool) -> list[Any]:
    """Return what is read of a row, but for the columns that go to the rewards as they are."""
    row, names = answered.row, ("input", "output") if rescored else ("input", "output", *SCORE)
    about = [find_label(row, cfg.label_key), reference_of(answered, cfg), row.get("data_source")] * rescored
    return [*(row.get(name) for name in names), answered.messages, answered.template_kwargs, *about]


def _rendered(answered: AnsweredRow, renderer: Renderer | None) -> AnsweredRow:
    """Write the prompt of a chat as the reward model sees it; of several turns keep the roles where there is none."""
    if renderer is None or renderer.tokenizer.chat_template is None:
        several = {"prompt": answered.messages} if len(answered.messages) > 1 else {}
        return replace(answered, row=answered.row | several)
    if not answered.messages:
        return answered
    text, = renderer.chat_text([answered.messages], True, [answered.template_kwargs])
    return replace(answered, row=answered.row | {"input": text})


def _score(row: Row, where: str) -> Row:
    """Return the reward that a row has, as a number; None with its cause where batch inference left it unscored."""
    value, cause = row.get("reward"), row.get("unscored")
    if missing(value):
        if missing(cause):
            raise DataError(f"{where}: the row has no reward, and nothing scores it; add --score, or remove the row")
        return {"reward": None, "unscored": cause}
    reward = finite(value)
    if reward is None:
        raise DataError(
            f"{where}: the reward {value!r} is not a finite number. Correct or remove the row, or add --score")
    return {"reward": reward}


def _response(row: Row, cfg: GenerateDataConfig, where: str, added: Row) -> AnsweredRow:
    column = prompt_column({name: value for name, value in row.items() if name != cfg.output_key}, cfg.input_key)
    if column is None:
        raise DataError(
            f"{where}: the row has no prompt (looked in {cfg.input_key}, prompt, messages and input; it has "
            f"{', '.join(row)}). Name its column with --input_key")
    value, output = with_system(row[column], row, where), row.get(cfg.output_key)
    turns = [] if isinstance(value, str) else to_messages(value, where)
    if output is None and turns and turns[-1]["role"] == "assistant":
        *turns, last = turns
        if last.get("tool_calls"):
            raise DataError(
                f"{where}: the response calls a tool (tool_calls), and a response to score is a text. Write "
                f"it in the column {cfg.output_key!r} as the model writes it, or remove the row")
        output = text_of(last["content"])
    if not isinstance(output, str):  # it may be empty, as in rows of batch inference
        raise DataError(f"{where}: the row has no response to score (looked in {cfg.output_key}; it has "
                        f"{', '.join(row)}). Name its column with --output_key, or remove the row")
    text = value if isinstance(value, str) else "\n".join(text_of(turn["content"]) for turn in turns)
    chat = turns or ([{"role": "user", "content": text}] if cfg.apply_chat_template else [])
    kwargs = cfg.chat_template_kwargs | template_kwargs(row, True, where) if chat else {}
    return AnsweredRow(unscored(row) | {"input": text, "output": output} | added, chat, kwargs)
