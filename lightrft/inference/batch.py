"""Batch inference from options to the output file: generate or read responses, score, post-process, write."""
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from lightrft.config.generate_schema import GenerateConfig
from lightrft.config.schema import DataConfig
from lightrft.datasets.answered import AnsweredRow, read_responses
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.preview import preview_sequence
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.template_variables import check_read
from lightrft.inference.loading import LoadedModel
from lightrft.inference.post_processing import normalise_rewards, post_process, truncated
from lightrft.inference.prompts import (check_rewards, check_scored, content_of, generate, identity, keeping, rehearse,
                                        scoring)
from lightrft.inference.responses import reward_input_of, score_responses
from lightrft.inference.row_files import refuse_other_run, Row, RowFiles, write_rows
from lightrft.models.tokenizer import load_tokenizer
from lightrft.rewards.base import RewardInput
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.placement import ScorerSetup
from lightrft.rewards.spec import may_compare, named_models
from lightrft.rewards.validation import check_references
from lightrft.strategy.base import StrategyBase
from lightrft.trainer.hub_files import fetch_once
from lightrft.trainer.prompt_trial import ReadPrompts
from lightrft.types import Prompt
from lightrft.utils.errors import UserError
from lightrft.utils.logging import get_logger

# options that change nothing in the rows of single responses
LATER = ("output_path", "post_processor", "normalize_reward", "reward_template", "keep_truncated", "min_reward_gap")


def run(config: GenerateConfig, strategy: StrategyBase) -> None:
    """Run the task of ``config`` to its end, or to a stop request; a collective."""
    rl = config.as_config()
    fetch_once(strategy, rl, rl.data)
    files, done = (_generated if config.generates else _scored)(config, strategy)
    files.close()
    if not done:
        get_logger().info(f"stopped; the same command resumes from {files.folder}")
    elif strategy.is_main:
        with keeping(files.folder):
            _finish(config, files.rows())
        files.finish()
    strategy.barrier()


def _generated(config: GenerateConfig, strategy: StrategyBase) -> tuple[RowFiles, bool]:
    """Answer the prompts that are not answered yet."""
    model = LoadedModel.open(config.as_config(), strategy, config.engine.repetition_penalty)
    prompts = _prompts(config, model)
    with _scorers(config, strategy, model.media) as rewards:
        if rewards is not None:
            check_rewards(rewards, prompts)
        files = _open_files(config, strategy, content_of(prompts))
        return files, generate(model, prompts, files, rewards, config.seed,
                               config.out.with_name(f"{config.out.name}.media"))


def _prompts(config: GenerateConfig, model: LoadedModel) -> Sequence[Prompt]:
    """Read the prompts of this run."""
    rl = model.config
    data = PromptsDataset(rl.data, model.tokenizer, rl.rollout.prompt_max_len, media=model.media,
                          suffix=config.data.wish, scored=bool(config.scoring.score), tools=model.tools,
                          compared=may_compare(rl.reward.reward))
    return _of_iteration(config, data)


def _scored(config: GenerateConfig, strategy: StrategyBase) -> tuple[RowFiles, bool]:
    """Score responses that the rows have; without ``--score`` they have rewards too."""
    rows = _rows(config)
    with _scorers(config, strategy) as rewards:
        files = _open_files(config, strategy, [one.row for one in rows])
        return files, score_responses(strategy, rows, config.data, files, rewards)


def _rows(config: GenerateConfig) -> Sequence[AnsweredRow]:
    """Read the rows whose responses this run scores."""
    return _of_iteration(config, read_responses(config.data, bool(config.scoring.score), _renderer(config)))


def plan(config: GenerateConfig, strategy: StrategyBase, reads: Sequence[ReadPrompts]) -> list[str]:
    """Rehearse :func:`run` with the prompts that are read, or with responses; return lines that show the first response
    as reward models read it.

    Raises:
        UserError: as :func:`run` does.
    """
    for read in reads:
        assert read.tokenizer is not None, "its prompts are made"
        prompts = _of_iteration(config, read.prompts["train"])
        rehearse(LoadedModel(config.as_config(), strategy, read.tokenizer, read.media), prompts,
                 _scorers(config, strategy, read.media), config.folder, _identity(config, content_of(prompts)))
    return [] if reads else _plan_scoring(config, strategy)


def _plan_scoring(config: GenerateConfig, strategy: StrategyBase) -> list[str]:
    """Build what scores the responses of rows."""
    rows, lines = _rows(config), list[str]()
    with strategy.init_model_context(), _scorers(config, strategy) as rewards:
        if rewards is not None:
            items = [reward_input_of(row, config.data) for row in rows]
            check_references(rewards, items)
            lines += _as_read(rewards, items[0])
    refuse_other_run(config.folder, _identity(config, [row.row for row in rows]))
    return lines


def _identity(config: GenerateConfig, content: Sequence[Any]) -> dict[str, Any]:
    return identity(config, LATER, content, config.as_config())


def _as_read(rewards: RewardManager, item: RewardInput) -> Iterator[str]:
    """Yield lines that show a response as the reward models read it."""
    for name, model in rewards.neural.items():
        for ids, read in model.view([item]):
            head = f"the first row as {name} reads it: {len(ids)} tokens, it scores those marked >:"
            yield from preview_sequence(head, ids, read, model.reader.renderer.tokenizer)


def _renderer(config: GenerateConfig) -> Renderer | None:
    """Return what renders chats as the (first) reward model sees them; None without one.

    Raises:
        DataError: no template of a reward model reads a variable of ``--chat_template_kwargs``.
    """
    tokenizers = [load_tokenizer(path) for _, path in named_models(config.as_config().reward.reward_pretrain)]
    if not config.scoring.urls:  # a server has a template of its own
        check_read(config.data.chat_template_kwargs, tokenizers)
    return Renderer(DataConfig(), tokenizers[0]) if tokenizers else None


def _scorers(config: GenerateConfig, strategy: StrategyBase,
             media: MediaStore | None = None) -> AbstractContextManager[RewardManager | None]:
    """Return the rewards of ``--score``, None without it; reward models read prompts whose ``media`` are open."""
    setup = replace(ScorerSetup.of(config.as_config(), strategy.device, media=media), max_len=config.score.max_len,
                    head=config.score.value_head_prefix)
    return scoring(config.scoring, setup) if config.scoring.score else nullcontext()


def _of_iteration(config: GenerateConfig, rows: Sequence[Any]) -> Sequence[Any]:
    """Return the rows of ``--iter``; all without it.

    Raises:
        UserError: the data ends before this iteration.
    """
    number, size = config.data.iter, config.data.rollout_batch_size
    if number is None:
        return rows
    if number * size >= len(rows):
        raise UserError(f"--iter {number}: begins at row {number * size}, and the data has {len(rows)}; with "
                        f"--rollout_batch_size {size} the last one is --iter {(len(rows) - 1) // size}")
    return rows[number * size:(number + 1) * size]


def _open_files(config: GenerateConfig, strategy: StrategyBase, content: Sequence[Any]) -> RowFiles:
    """Open the files of this run, new or unfinished; ``content`` identifies its data."""
    files = RowFiles(config.folder, _identity(config, content), strategy)
    if files.done or files.unscored:
        again = f", the responses of {len(files.unscored)} are scored again" * bool(files.unscored)
        get_logger().info(f"resumed: {len(files.done)} of {len(content)} rows are done{again}")
    return files


def _finish(config: GenerateConfig, rows: list[Row]) -> None:
    """Write the output and its summary, and log it; an output without any score is an error."""
    counts, found = Counter[str](), rows
    summary = summarise(rows)
    if config.score.normalize_reward:
        found = normalise_rewards(found)
    if config.score.post_processor:
        found, counts = post_process(config.score.post_processor, found, config.score.reward_template, config.data.wish,
                                     config.score.keep_truncated, config.score.min_reward_gap)
    write_rows(config.out, found)
    summary |= {"rows": len(found)} | counts
    path = config.out.with_name(f"{config.out.name}.summary.json")
    path.write_text(json.dumps(summary, indent=1), encoding="utf-8")
    numbers = ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                        for name, value in summary.items())  # yapf: disable
    get_logger().info(f"written: {config.out} ({numbers})")
    check_scored(rows, str(config.out))


def summarise(rows: list[Row]) -> dict[str, float]:
    """Count responses, prompts, truncated and unscored responses; mean and deviation of the rewards."""
    rewards = [row["reward"] for row in rows if row.get("reward") is not None]
    prompts = {row.get("prompt_id", row["input"]) for row in rows}
    found: dict[str, float] = {"prompts": len(prompts), "responses": len(rows)}
    found["truncated responses"] = sum(map(truncated, rows))
    if any("reward" in row for row in rows):
        found["unscored responses"] = len(rows) - len(rewards)
    if rewards:
        found |= {"reward mean": statistics.fmean(rewards), "reward std": statistics.pstdev(rewards)}
    return found
