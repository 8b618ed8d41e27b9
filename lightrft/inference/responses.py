"""Rows that have their responses already: ``--eval_task rm`` scores them without generating."""
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightrft.config.generate_schema import GenerateDataConfig
from lightrft.config.options import finite
from lightrft.datasets.records import (find_label, find_reference, Message, missing, prompt_column, text_of,
                                       to_messages, with_system)
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.rows import DataError, load_rows, Row
from lightrft.datasets.template_kwargs import template_kwargs, TemplateKwargs
from lightrft.inference.generation import score_groups, unscored
from lightrft.inference.row_files import RowFiles
from lightrft.rewards.base import RewardInput
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.validation import check_references
from lightrft.strategy.base import StrategyBase


@dataclass(frozen=True)
class AnsweredRow:
    """A row with ``input`` and ``output`` as text, and its prompt as a chat, if it is one, with the keyword arguments
    of its chat template."""
    row: Row
    messages: list[Message]
    template_kwargs: TemplateKwargs = field(default_factory=dict)


def read_responses(cfg: GenerateDataConfig, rescored: bool, renderer: Renderer | None = None) -> list[AnsweredRow]:
    """Read the rows of ``--prompt_data``; their other columns stay.

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
        for i, row in enumerate(rows.rows):
            found.append(_response(row, cfg, rows.where(i), {} if rescored else _score(row, rows.where(i))))
    return [_rendered(answered, renderer) for answered in found[:cfg.max_samples or None]]


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
        output = text_of(last["content"])
    if not isinstance(output, str):  # it may be empty, as in rows of batch inference
        raise DataError(f"{where}: the row has no response to score (looked in {cfg.output_key}; it has "
                        f"{', '.join(row)}). Name its column with --output_key, or remove the row")
    text = value if isinstance(value, str) else "\n".join(text_of(turn["content"]) for turn in turns)
    chat = turns or ([{"role": "user", "content": text}] if cfg.apply_chat_template else [])
    kwargs = cfg.chat_template_kwargs | template_kwargs(row, True, where) if chat else {}
    return AnsweredRow(unscored(row) | {"input": text, "output": output} | added, chat, kwargs)


def reward_input_of(answered: AnsweredRow, cfg: GenerateDataConfig) -> RewardInput:
    """Build the input of a reward from a row of :func:`read_responses`."""
    row = answered.row
    columns: dict[str, Any] = {name: value for name, value in row.items() if name not in (cfg.output_key, "output")}
    return RewardInput(row["input"], row["output"], answered.messages, data_source=str(row.get("data_source") or ""),
                       label=find_label(row, cfg.label_key), reference=find_reference(columns, cfg.reference_key),
                       columns=columns, template_kwargs=answered.template_kwargs)  # yapf: disable


def score_responses(strategy: StrategyBase, rows: Sequence[AnsweredRow], cfg: GenerateDataConfig, files: RowFiles,
                    rewards: RewardManager | None) -> bool:
    """Score the rows that ``files`` does not have; see :func:`~lightrft.inference.generation.score_groups`."""
    todo = [number for number in range(len(rows)) if number not in files.done]
    if rewards is not None:
        check_references(rewards, (reward_input_of(rows[number], cfg) for number in todo))
    return score_groups(strategy, todo, lambda number: ([rows[number].row], [reward_input_of(rows[number], cfg)]),
                        files, rewards)
