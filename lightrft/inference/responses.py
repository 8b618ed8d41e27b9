"""Scores rows that have their responses already (``--eval_task rm``)."""
from collections.abc import Sequence

from lightrft.config.generate_schema import GenerateDataConfig
from lightrft.datasets.answered import AnsweredRow, other_columns, reference_of
from lightrft.datasets.prompt_rows import find_label
from lightrft.inference.generation import score_groups
from lightrft.inference.row_files import RowFiles
from lightrft.rewards.base import RewardInput
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.validation import check_references
from lightrft.strategy.base import StrategyBase


def reward_input_of(answered: AnsweredRow, cfg: GenerateDataConfig) -> RewardInput:
    """Build the input of a reward from a row of :func:`~lightrft.datasets.answered.read_responses`."""
    row = answered.row
    return RewardInput(row["input"], row["output"], answered.messages, data_source=str(row.get("data_source") or ""),
                       label=find_label(row, cfg.label_key), reference=reference_of(answered, cfg),
                       columns=other_columns(answered, cfg), template_kwargs=answered.template_kwargs)  # yapf: disable


def score_responses(strategy: StrategyBase, rows: Sequence[AnsweredRow], cfg: GenerateDataConfig, files: RowFiles,
                    rewards: RewardManager | None) -> bool:
    """Score the rows that ``files`` does not have; see :func:`~lightrft.inference.generation.score_groups`."""
    todo = [number for number in range(len(rows)) if number not in files.done]
    if rewards is not None:
        check_references(rewards, (reward_input_of(rows[number], cfg) for number in todo))
    return score_groups(strategy, todo, lambda number: ([rows[number].row], [reward_input_of(rows[number], cfg)]),
                        files, rewards)
