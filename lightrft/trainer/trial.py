"""Trial of the data and the rewards of a run before it starts: rows are read, and one of them is scored."""
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, singledispatch
from pathlib import Path
from typing import Any

from lightrft.config.evaluate_schema import EvaluateConfig
from lightrft.config.generate_schema import GenerateConfig, GenerateDataConfig
from lightrft.config.schema import Config, DataConfig
from lightrft.config.stages import check_total, steps_of_data
from lightrft.config.inference_schema import ChatConfig
from lightrft.config.offline_schema import OfflineConfig
from lightrft.config.serve_schema import ServeConfig
from lightrft.config.shared_schema import Tree
from lightrft.datasets.answered import read_responses
from lightrft.datasets.loader import check_batch
from lightrft.datasets.media_prompts import with_media
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.preview import preview
from lightrft.datasets.rows import Rows
from lightrft.datasets.sft_dataset import Learning, PretrainingDataset
from lightrft.datasets.suites import load_suite, parse_suite
from lightrft.models.config_json import check_context
from lightrft.preflight.inputs import data_of, is_here
from lightrft.rewards.correctness import check_accuracy_part
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.placement import ScorerSetup
from lightrft.rewards.spec import parse_models
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.optimizer_contract import check_contract
from lightrft.strategy.optimizers import OPTIMIZERS
from lightrft.strategy.planned import PlannedStrategy
from lightrft.trainer.model_media import open_media
from lightrft.trainer.offline.offline_trainer import OfflineTrainer
from lightrft.trainer.prompt_trial import (counted, Found, later, mixed, on_disk, read_prompts, ReadPrompts,
                                           tokenizer_of)
from lightrft.trainer.rehearsal import models_are_here, rehearse_rows, rehearse_training
from lightrft.trainer.reward_trial import try_row
from lightrft.utils.errors import UserError
from lightrft.utils.prompt import Prompt
from lightrft.utils.hub import model_is_here
from lightrft.utils.logging import silent


@dataclass(frozen=True)
class TrialContext:
    """Inputs of a trial besides the config of a run.

    Attributes:
        cuda: the run is for GPUs.
        elsewhere: it is for another machine, where the rows and the weights may be others.
        trainer: of fixed data.
        rehearse: builds all that a command builds before it starts, of one that trains nothing, by a strategy of a
            plan, of the prompts that are read for each model; it may return lines to show.
        functions: rewards of this program, by the names under which ``--reward`` selects them.
    """
    cuda: bool = False
    elsewhere: bool = False
    trainer: type[OfflineTrainer[Any]] | None = None
    rehearse: Callable[[StrategyBase, Sequence[ReadPrompts]], Iterable[str] | None] | None = None
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


DEFAULT = TrialContext()


@singledispatch
def try_inputs(config: Tree, context: TrialContext = DEFAULT) -> Iterator[str]:
    """Yield a line for everything that is tried; each tree registers its own.

    Raises:
        UserError: the data or a reward of the run cannot be used, or its engine cannot take the media of the data.
    """
    yield from ()


@try_inputs.register
def _try_offline(config: OfflineConfig, context: TrialContext = DEFAULT) -> Iterator[str]:
    assert context.trainer is not None, "it reads the rows"
    check_contract(OPTIMIZERS.get(config.train.optim), config.train)
    data, path = config.data, str(config.model.pretrain)
    train, held_out = ([one for one in entries if is_here(one)] for entries in (data.train_data, data.eval_data))
    yield from (later(one) for one in [*data.train_data, *data.eval_data] if not is_here(one))
    tokenizer = yield from tokenizer_of(path, data.chat_template, context.elsewhere)
    examples: dict[str, Sequence[Any]] = {"train": [], "eval": []}
    media = None if tokenizer is None else open_media(path, tokenizer, data.as_data_config())
    whole = train == data.train_data and tokenizer is not None
    probs = data.train_data_probs if whole else []
    local = replace(config, data=replace(data, train_data=train, train_data_probs=probs, eval_data=held_out))
    for split, entries in (("train", train), ("eval", held_out)):
        if entries and tokenizer is not None:
            examples[split] = context.trainer.read(local, tokenizer, split, media)
            yield counted(len(examples[split]), ", ".join(entries), split)
            yield from mixed(entries, examples[split])
            yield from preview(examples[split][0], tokenizer) if split == "train" else ()
    if media is not None and (first := media.try_first()):
        yield f"media: {first} can be read"
    fits = yield from _ends_at_its_start(partial(_check_rows, config,
                                                 len(examples["train"]) if whole else None), context)
    if (yield from models_are_here(config, context.elsewhere)):
        rows = examples["train"] if whole and fits else []
        rehearse_rows(config, context.trainer, tokenizer, rows, examples["eval"], media)


@try_inputs.register
def _try_evaluation(config: EvaluateConfig, context: TrialContext = DEFAULT) -> Iterator[str]:
    if config.evaluation.accuracy_part:
        rewards = RewardManager(config.score.as_reward_config())
        try:
            check_accuracy_part(config.evaluation.accuracy_part, rewards.part_names())
        finally:
            rewards.shutdown()
    reads = list[ReadPrompts]()
    for path in config.model.pretrain:
        reads.append((yield from read_prompts(config.as_config(path), ["eval"], {}, context.cuda, context.elsewhere,
                                              suffix=config.data.wish)))
    yield from _rehearsed(config, context, reads)


@try_inputs.register
def _try_generation(config: GenerateConfig, context: TrialContext = DEFAULT) -> Iterator[str]:
    reads, scored = list[ReadPrompts](), bool(config.scoring.score)
    if config.generates:
        reads.append((yield from read_prompts(config.as_config(), ["train"], {}, context.cuda, context.elsewhere,
                                              scored, config.data.wish)))
    else:
        yield from _answered(config.data, scored)
    yield from _rehearsed(config, context, reads)


def _answered(data: GenerateDataConfig, scored: bool) -> Iterator[str]:
    """Read the rows with responses that are on this machine, and show the first."""
    here = [entry for entry in data.prompt_data if is_here(entry)]
    yield from (later(entry) for entry in data.prompt_data if entry not in here)
    rows = read_responses(replace(data, prompt_data=here), scored)
    if here:
        yield counted(len(rows), ", ".join(here), "responses")
    for row in rows[:1]:
        yield from preview(row, None)


@try_inputs.register(ChatConfig)
@try_inputs.register(ServeConfig)
def _rehearsed(config: Tree, context: TrialContext = DEFAULT, reads: Sequence[ReadPrompts] = ()) -> Iterator[str]:
    """Build what the command builds before it starts, of the prompts of ``reads``, where all that it reads is on this
    machine."""
    data = data_of(config)
    entries = [] if data is None else [*data.prompt_data, *data.eval_data]
    suites = [] if data is None else data.eval_suite
    if context.rehearse is None or not (yield from models_are_here(config, context.elsewhere)):
        return
    here = all(map(is_here, entries)) and all(parse_suite(one)[1] for one in suites)
    if here and all(read.tokenizer is not None for read in reads):
        with silent():  # the rows are reported above
            lines = context.rehearse(PlannedStrategy(config.placement, False), reads)
        yield from lines or ()


@try_inputs.register
def _try_training(config: Config, context: TrialContext = DEFAULT) -> Iterator[str]:
    check_contract(OPTIMIZERS.get(config.train.optim), config.train)
    found: Found = {}
    read = yield from read_prompts(config, ["train", "eval"], found, context.cuda, context.elsewhere,
                                   objects=context.functions)  # yapf: disable
    for entry in config.data.eval_suite:
        yield counted(len(load_suite(entry, True, True)[0]), entry, "eval") if parse_suite(entry)[1] else later(entry)
    ptx = config.ptx.as_data_config(config.data)
    lines, beside = on_disk(ptx, "train")
    yield from lines
    fits = yield from _ends_at_its_start(partial(_check_start, config, read.rows["train"], sum(map(len, beside))),
                                         context)
    if read.tokenizer is not None and beside and not lines[:-len(beside)]:
        learning = Learning(whole=config.ptx.pretrain_mode)
        rows = PretrainingDataset(ptx, read.tokenizer, config.pretrain_len, media=read.media, learning=learning)
        yield from mixed(ptx.prompt_data, rows)
        yield from preview(rows[0], read.tokenizer)
    here = yield from models_are_here(config, context.elsewhere)
    if not all(map(model_is_here, parse_models(config.reward.reward_pretrain).values())):
        return
    store = read.media if config.reward.reward_pretrain else None
    tried = {where: prompt if store is None else _known(rows, prompt, config.data, store)
             for where, (rows, prompt) in [*found.items()][:1]}  # yapf: disable
    rewards = RewardManager(config.reward, context.functions, ScorerSetup(media=store, data=config.data))
    try:
        check_accuracy_part(config.eval.accuracy_part, rewards.part_names())
        for where, prompt in tried.items():
            yield try_row(rewards, prompt, where, config, read.tokenizer, read.play)
        if here:
            complete = fits and not read.later and not lines[:len(lines) - len(beside)]
            rehearse_training(config, read.tokenizer, read.prompts if complete else {}, rewards, read.media,
                              read.environment)  # yapf: disable
    finally:
        rewards.shutdown()


def _check_rows(config: OfflineConfig, rows: int | None) -> None:
    """Raise the error of the number of rows, where all are on this machine."""
    if rows is not None:
        check_batch(config.train.train_batch_size, rows, config.BATCH)


def _check_start(config: Config, rows: int, beside: int) -> None:
    """Raise the errors that end a run before its first step."""
    path, rollout = str(config.model.pretrain), config.rollout
    if Path(path).expanduser().exists():
        check_context(path, prompt_max_len=rollout.prompt_max_len, generate_max_len=rollout.generate_max_len)
    if all(map(is_here, config.data.prompt_data)):
        check_batch(rollout.rollout_batch_size, rows, config.BATCH)
        check_total(config, steps_of_data(config, rows))
    if config.ptx.pretrain_data and all(map(is_here, config.ptx.pretrain_data)):
        check_batch(config.pretraining_rows, beside, "ptx_batch_size")


def _ends_at_its_start(check: Callable[[], None], context: TrialContext) -> Generator[str, None, bool]:
    """Raise the problem that ends the run before its first step. For another machine it is no error, because such a
    plan may use a small model and a few rows in place of the real ones: say so, and return False."""
    try:
        check()
    except UserError as error:
        if not context.elsewhere:
            raise
        yield f"warning: with this model and these rows the run would end at its start: {error}"
        return False
    return True


def _known(rows: Rows, prompt: Prompt, cfg: DataConfig, store: MediaStore) -> Prompt:
    """Make the media of a row known to the store; return the prompt with their keys."""
    found = with_media(rows, [prompt], cfg, store)[1][0]
    store.keep([found.media])
    return found
