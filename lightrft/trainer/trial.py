"""Trial of the data and the rewards of a run before it starts: rows are read, and one of them is scored."""
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, singledispatch
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.config.evaluate_schema import EvaluateConfig
from lightrft.config.generate_schema import GenerateConfig
from lightrft.config.schema import Config, DataConfig
from lightrft.config.stages import check_total, steps_of_data
from lightrft.config.inference_schema import ChatConfig
from lightrft.config.offline_schema import OfflineConfig
from lightrft.config.serve_schema import ServeConfig
from lightrft.config.shared_schema import Tree
from lightrft.datasets.columns import report_columns
from lightrft.datasets.decoding import decode
from lightrft.datasets.loader import apportion, check_batch, MixedDataset
from lightrft.datasets.media import KINDS, MediaError, MediaRules
from lightrft.datasets.media_prompts import with_media
from lightrft.datasets.media_rows import count_media, find_row_media, plain_marks
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.preview import GIVEN, preview, shown
from lightrft.datasets.prompts_dataset import load_specs, PromptsDataset
from lightrft.datasets.records import Message, Record, missing, to_records
from lightrft.datasets.rows import Rows
from lightrft.datasets.sft_dataset import Learning, PretrainingDataset
from lightrft.datasets.suites import load_suite, parse_suite
from lightrft.models.architectures import modality_of
from lightrft.models.loader import check_context, media_kinds, read_config
from lightrft.models.tokenizer import load_tokenizer, read_chat_template, set_chat_template, TOKENIZER_FILES
from lightrft.preflight.inputs import data_of, is_here
from lightrft.rewards.correctness import check_accuracy_part
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.placement import ScorerSetup
from lightrft.rewards.spec import parse_models
from lightrft.rollout.engines import check_rope
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.planned import PlannedStrategy
from lightrft.trainer.model_media import open_media
from lightrft.trainer.offline.offline_trainer import OfflineTrainer
from lightrft.trainer.rehearsal import models_are_here, rehearse_rows, rehearse_training
from lightrft.trainer.reward_trial import rendered, try_row
from lightrft.types import Prompt
from lightrft.utils.errors import UserError
from lightrft.utils.hub import model_is_here
from lightrft.utils.logging import silent

Found = dict[str, tuple[Rows, Record]]  # a row that was read, by its file and number


@dataclass(frozen=True)
class TrialContext:
    """Inputs of a trial besides the config of a run.

    Attributes:
        cuda: the run is for GPUs.
        elsewhere: it is for another machine, where the rows and the weights may be others.
        trainer: of fixed data.
        rehearse: builds all that a command builds before it starts, of one that trains nothing.
        functions: rewards of this program, by the names under which ``--reward`` selects them.
    """
    cuda: bool = False
    elsewhere: bool = False
    trainer: type[OfflineTrainer[Any]] | None = None
    rehearse: Callable[[StrategyBase], object] | None = None
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
    data, path = config.data, str(config.model.pretrain)
    train, held_out = ([one for one in entries if is_here(one)] for entries in (data.train_data, data.eval_data))
    yield from (_later(one) for one in [*data.train_data, *data.eval_data] if not is_here(one))
    tokenizer = yield from _tokenizer(path, data.chat_template, context)
    examples: dict[str, Sequence[Any]] = {"train": [], "eval": []}
    media = None if tokenizer is None else open_media(path, tokenizer, data.as_data_config())
    whole = train == data.train_data and tokenizer is not None
    probs = data.train_data_probs if whole else []
    local = replace(config, data=replace(data, train_data=train, train_data_probs=probs, eval_data=held_out))
    for split, entries in (("train", train), ("eval", held_out)):
        if entries and tokenizer is not None:
            examples[split] = context.trainer.read(local, tokenizer, split, media)
            yield _counted(len(examples[split]), ", ".join(entries), split)
            yield from _mixed(entries, examples[split])
            yield from preview(examples[split][0], tokenizer) if split == "train" else ()
    if media is not None and (first := media.try_first()):
        yield f"media: {first} can be read"
    fits = yield from _ends_at_its_start(partial(_check_rows, config,
                                                 len(examples["train"]) if whole else None), context)
    if (yield from models_are_here(config, context.elsewhere)):
        rows = examples["train"] if whole and fits else []
        rehearse_rows(config, context.trainer, tokenizer, rows, examples["eval"], media)


def _tokenizer(path: str, template: str | None,
               context: TrialContext) -> Generator[str, None, PreTrainedTokenizerBase | None]:
    """Load the tokenizer with its chat template. One that is not on this machine is no error in a plan: say so, and
    return None."""
    if template is not None:
        read_chat_template(template)  # an unknown one is an error without a tokenizer too
    try:
        tokenizer = load_tokenizer(path)
    except UserError as error:
        folder = Path(path).expanduser()
        if any((folder / name).is_file() for name in TOKENIZER_FILES) or folder.exists() and not context.elsewhere:
            raise
        yield f"data: not tokenized, for lack of a tokenizer: {error}"
        return None
    if template is not None:
        set_chat_template(tokenizer, template)
    return tokenizer


@try_inputs.register
def _try_evaluation(config: EvaluateConfig, context: TrialContext = DEFAULT) -> Iterator[str]:
    if config.evaluation.accuracy_part:
        rewards = RewardManager(config.score.as_reward_config())
        try:
            check_accuracy_part(config.evaluation.accuracy_part, rewards.part_names())
        finally:
            rewards.shutdown()
    for path in config.model.pretrain:
        yield from _generated(config.as_config(path), ["eval"], {}, context)
    yield from _rehearsed(config, context)


@try_inputs.register
def _try_generation(config: GenerateConfig, context: TrialContext = DEFAULT) -> Iterator[str]:
    if config.generates:
        yield from _generated(config.as_config(), ["train"], {}, context, bool(config.scoring.score))
    yield from _rehearsed(config, context)


@try_inputs.register(ChatConfig)
@try_inputs.register(ServeConfig)
def _rehearsed(config: Tree, context: TrialContext = DEFAULT) -> Iterator[str]:
    """Build what the command builds before it starts, where all that it reads is on this machine."""
    data = data_of(config)
    entries = [] if data is None else [*data.prompt_data, *data.eval_data]
    suites = [] if data is None else data.eval_suite
    if context.rehearse is None or not (yield from models_are_here(config, context.elsewhere)):
        return
    if all(map(is_here, entries)) and all(parse_suite(one)[1] for one in suites):
        with silent():  # the rows are reported above
            context.rehearse(PlannedStrategy(config.placement, False))


@try_inputs.register
def _try_training(config: Config, context: TrialContext = DEFAULT) -> Iterator[str]:
    found: Found = {}
    read = yield from _generated(config, ["train", "eval"], found, context)
    for entry in config.data.eval_suite:
        yield _counted(len(load_suite(entry, True, True)[0]), entry, "eval") if parse_suite(entry)[1] else _later(entry)
    ptx = config.ptx.as_data_config(config.data)
    lines, beside = _on_disk(ptx, "train")
    yield from lines
    fits = yield from _ends_at_its_start(partial(_check_start, config, read.rows["train"], sum(map(len, beside))),
                                         context)
    if read.tokenizer is not None and beside and not lines[:-len(beside)]:
        learning = Learning(whole=config.ptx.pretrain_mode)
        rows = PretrainingDataset(ptx, read.tokenizer, config.pretrain_len, media=read.media, learning=learning)
        yield from _mixed(ptx.prompt_data, rows)
        yield from preview(rows[0], read.tokenizer)
    here = yield from models_are_here(config, context.elsewhere)
    if not all(map(model_is_here, parse_models(config.reward.reward_pretrain).values())):
        return
    store = read.media if config.reward.reward_pretrain else None
    tried = {where: record if store is None else _known(rows, record, config.data, store)
             for where, (rows, record) in [*found.items()][:1]}  # yapf: disable
    rewards = RewardManager(config.reward, context.functions, ScorerSetup(media=store, data=config.data))
    try:
        check_accuracy_part(config.eval.accuracy_part, rewards.part_names())
        for where, record in tried.items():
            yield try_row(rewards, record, where, config, read.tokenizer)
        if here:
            complete = fits and not read.later and not lines[:len(lines) - len(beside)]
            rehearse_training(config, read.tokenizer, read.prompts if complete else {}, rewards, read.media)
    finally:
        rewards.shutdown()


def _check_rows(config: OfflineConfig, rows: int | None) -> None:
    """Raise the errors of lengths and, where all rows are on this machine, of their number."""
    if Path(path := str(config.model.pretrain)).expanduser().exists():
        check_context(path, max_len=config.data.max_len)
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


def _known(rows: Rows, record: Record, cfg: DataConfig, store: MediaStore) -> Record:
    """Make the media of a row known to the store; return the record with their keys."""
    found = with_media(rows, [record], cfg, store)[1][0]
    store.keep([found.media])
    return found


def _on_disk(cfg: DataConfig, split: str) -> tuple[list[str], list[Rows]]:
    """Return a line for each entry of a split, and the rows of those that are on this machine."""
    entries = cfg.prompt_data if split == "train" else cfg.eval_data
    here = [one for one in entries if is_here(one)]
    later = [_later(entry) for entry in entries if entry not in here]
    if not here:
        return later, []
    parts, _ = load_specs(replace(cfg, prompt_data=here, prompt_data_probs=[], eval_data=here), split)
    return later + [_counted(len(rows), entry, split) for entry, rows in zip(here, parts)], parts


def _generated(config: Config, splits: list[str], found: Found, context: TrialContext,
               scored: bool = True) -> Generator[str, None, "ReadPrompts"]:
    """Read the prompts of a run that generates (:func:`_read`), tokenize them, and refuse an engine that cannot take
    their media."""
    data, path, most = config.data, str(config.model.pretrain), Counter[str]()
    read = ReadPrompts()
    for split in splits:
        read.rows[split] = yield from _read(data, split, found, path, most)
    _check_engine(config, most, context.cuda)
    read.tokenizer = yield from _tokenizer(path, data.chat_template, context)
    if read.tokenizer is None:
        return read
    read.media = open_media(path, read.tokenizer, data)
    for split in splits:
        prompts = _tokenized(config, split, read.tokenizer, read.media, scored)
        read.later |= prompts is None
        read.prompts[split] = prompts or []
        read.rows[split] = len(read.prompts[split]) or read.rows[split]
        yield from _mixed(data.prompt_data, read.prompts[split])
        if prompts and split == splits[0] and not most:
            yield from preview(prompts[0], read.tokenizer)
    for _, record in [*found.values()][:1] if most else ():
        yield "the first prompt, before its media become tokens:"
        yield from shown(rendered(record, config, read.tokenizer)[0], GIVEN)
    return read


@dataclass
class ReadPrompts:
    """Prompts of a run that generates, read on trial: the number of rows of each split that are on this machine and
    fit, their prompts, and the tokenizer and the media of these; ``later``: some rows are not on this machine."""
    rows: Counter[str] = field(default_factory=Counter)
    prompts: dict[str, Sequence[Prompt]] = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | None = None
    media: MediaStore | None = None
    later: bool = False


def _tokenized(config: Config, split: str, tokenizer: PreTrainedTokenizerBase, media: MediaStore | None,
               scored: bool) -> Sequence[Prompt] | None:
    """Make the prompts of a split as the run does, for its errors and warnings; None if not all their rows are on this
    machine."""
    data, training = config.data, split == "train"
    entries, suites = (data.prompt_data, []) if training else (data.eval_data, data.eval_suite)
    if not [*entries, *suites]:
        return []
    if not all(map(is_here, entries)) or not all(parse_suite(one)[1] for one in suites):
        return None
    return PromptsDataset(data, tokenizer, config.rollout.prompt_max_len, split, media, scored=scored)


def _check_engine(config: Config, most: Mapping[str, int], cuda: bool) -> None:
    """Refuse an engine that would refuse the model, or rows with ``most`` media of each kind, when it starts. None of
    its packages is needed."""
    path, engine = str(config.model.pretrain), config.rollout.engine_type
    try:
        model = read_config(path)
        both_ways = modality_of(model, path).both_ways
    except UserError:  # an error elsewhere
        return
    check_rope(config.rollout, model)
    if engine == "vllm":
        from lightrft.rollout.vllm.engine import refuse_families as refused_by_vllm
        refused_by_vllm(model, most, both_ways and not cuda)
    elif engine == "sglang":
        from lightrft.rollout.sglang.media import refuse_families as refused_by_sglang
        refused_by_sglang(model, most)


def _read(cfg: DataConfig, split: str, found: Found, model: str | None,
          most: Counter[str]) -> Generator[str, None, int]:
    """Read the rows of a split that are on this machine; add the first that has a reference to ``found``, by file and
    number, and the most media of a row to ``most``. Return the number of rows."""
    lines, parts = _on_disk(cfg, split)
    yield from lines
    for rows in parts:
        records = to_records(rows, cfg)
        yield from _opened(rows, [_chat(record.prompt) for record in records], cfg, model, most)
        if most:  # else the prompts are tokenized, which reports it
            report_columns(rows, partial(_read_again, cfg, _takes(model)), "leaves to the rewards")
        for i, record in enumerate(records):
            if not missing(record.reference) or i + 1 == len(rows):
                found.setdefault(rows.where(i), (rows.pick([i]), record))
                break
    return sum(map(len, parts))


def _read_again(cfg: DataConfig, takes: Sequence[str], rows: Rows) -> list[Any]:
    """Return what a run reads of rows, with the number of their media."""
    records = to_records(rows, cfg)
    return [(replace(record, columns={}), count_media(row, cfg, _chat(record.prompt), rows.where(i), takes))
            for i, (row, record) in enumerate(zip(rows.rows, records))]  # yapf: disable


def _chat(prompt: str | list[Message]) -> list[Message]:
    return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]


def _takes(model: str | None) -> Sequence[str]:
    """Kinds of media that ``model`` takes; all of them if that is not known, which is an error elsewhere."""
    try:
        return media_kinds(model) if model else KINDS
    except UserError:
        return KINDS


def _opened(rows: Rows, chats: list[list[Message]], cfg: DataConfig, model: str | None,
            most: Counter[str]) -> Iterator[str]:
    """Compare the kinds of media of all rows with those that ``model`` takes, and decode those of the first row that
    has some; add the most of a row to ``most``."""
    takes, refused, seen = _takes(model), list[MediaError](), False
    yield from (f"warning: {notice}" for notice in plain_marks(rows, chats, cfg, takes))
    for i, chat in enumerate(chats):
        try:
            count = count_media(rows.rows[i], cfg, chat, rows.where(i), takes)
            if count and not seen:
                yield f"media: {_decoded(rows, i, chat, cfg)} of {rows.where(i)} can be read"
                seen = True
            most |= count
        except MediaError as error:
            if cfg.media_policy == "error":
                raise
            refused.append(error)
    if refused:
        yield f"media: at least {len(refused):,} of {len(rows):,} rows are left out (the first: {refused[0]})"


def _decoded(rows: Rows, index: int, chat: list[Message], cfg: DataConfig) -> str:
    """Decode the pictures, videos and sounds of a row; return their kinds."""
    rules = MediaRules.of(cfg).for_rows_of(rows.media_home(index))
    _, media = find_row_media(rows.rows[index], cfg, chat, rules, rows.where(index))
    for medium in media:
        decode(medium, rules)
    return ", ".join(medium.kind for medium in media)


def _later(entry: str) -> str:
    return f"data: {entry} is read from the hub when the run starts"


def _mixed(entries: Sequence[str], rows: Sequence[Any]) -> Iterator[str]:
    """Yield the rows of each entry that an episode draws, where probabilities mix them."""
    if not isinstance(rows, MixedDataset) or not rows.probs:
        return
    for entry, size, count in zip(entries, rows.sizes, apportion(len(rows), rows.probs)):
        yield f"data: {count:,} of the {len(rows):,} rows drawn in an epoch are of {entry}, which has {size:,}"


def _counted(rows: int, entry: str, split: str) -> str:
    return f"data: {rows:,} rows of {entry} ({'training' if split == 'train' else 'evaluation'})"
