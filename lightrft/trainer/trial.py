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
from lightrft.config.options import show
from lightrft.config.schema import Config, DataConfig
from lightrft.config.stages import check_total, steps_of_data
from lightrft.config.offline_schema import OfflineConfig
from lightrft.config.shared_schema import Tree
from lightrft.datasets.columns import report_columns
from lightrft.datasets.decoding import decode
from lightrft.datasets.loader import check_batch
from lightrft.datasets.media import KINDS, MediaError, MediaRules
from lightrft.datasets.media_prompts import with_media
from lightrft.datasets.media_rows import count_media, find_row_media, plain_marks
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.preview import GIVEN, preview, shown
from lightrft.datasets.prompts_dataset import load_specs, PromptsDataset
from lightrft.datasets.records import Message, Record, missing, text_of, to_records
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.rows import Rows
from lightrft.datasets.sft_dataset import Learning, PretrainingDataset
from lightrft.datasets.suites import load_suite, parse_suite
from lightrft.models.architectures import modality_of
from lightrft.models.loader import check_context, media_kinds, read_config
from lightrft.models.tokenizer import load_tokenizer, read_chat_template, set_chat_template, TOKENIZER_FILES
from lightrft.preflight.inputs import is_here
from lightrft.rewards.base import RewardInput, Score
from lightrft.rewards.correctness import check_accuracy_part
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.placement import ScorerSetup
from lightrft.rewards.validation import check_references, good_answers, nothing_scored, quoted, score_answers
from lightrft.rollout.engines import check_rope
from lightrft.trainer.model_media import open_media
from lightrft.types import Prompt
from lightrft.utils.errors import UserError

Found = dict[str, tuple[Rows, Record]]  # a row that was read, by its file and number
Reader = Callable[[Any, PreTrainedTokenizerBase, str, MediaStore | None], Sequence[Any]]
EXCUSED = (None, "none", "unreachable", "no_rival")
"""Scored; the function declines to judge; the server does not run yet; a judge will compare it with others."""


@dataclass(frozen=True)
class TrialContext:
    """Inputs of a trial besides the config of a run.

    Attributes:
        cuda: the run is for GPUs.
        read: reads the rows of a split as the run does, of a trainer on fixed data.
        functions: rewards of this program, by the names under which ``--reward`` selects them.
    """
    cuda: bool = False
    read: Reader | None = None
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
    assert context.read is not None, "the trainer reads rows"
    data, path = config.data, str(config.model.pretrain)
    train, held_out = ([one for one in entries if is_here(one)] for entries in (data.train_data, data.eval_data))
    yield from (_later(one) for one in [*data.train_data, *data.eval_data] if not is_here(one))
    tokenizer = yield from _tokenizer(path, data.chat_template)
    if tokenizer is None:
        return
    local = replace(config, data=replace(data, train_data=train, eval_data=held_out))
    media = open_media(path, tokenizer, data.as_data_config())
    for split, entries in (("train", train), ("eval", held_out)):
        if entries:
            examples = context.read(local, tokenizer, split, media)
            rows = len(examples)
            yield _counted(rows, ", ".join(entries), split)
            yield from preview(examples[0], tokenizer) if split == "train" else ()
            if split == "train" and entries == data.train_data:
                yield from _ends_at_its_start(partial(check_batch, config.train.train_batch_size, rows, config.BATCH))
    if media is not None and (first := media.try_first()):
        yield f"media: {first} can be read"


def _tokenizer(path: str, template: str | None) -> Generator[str, None, PreTrainedTokenizerBase | None]:
    """Load the tokenizer with its chat template. One that is not on this machine is no error in a plan: say so, and
    return None."""
    if template is not None:
        read_chat_template(template)  # an unknown one is an error without a tokenizer too
    try:
        tokenizer = load_tokenizer(path)
    except UserError as error:
        if any((Path(path).expanduser() / name).is_file() for name in TOKENIZER_FILES):
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
        yield from _generated(config.as_config(path), ["eval"], {}, context.cuda)


@try_inputs.register
def _try_generation(config: GenerateConfig, context: TrialContext = DEFAULT) -> Iterator[str]:
    if config.generates:
        yield from _generated(config.as_config(), ["train"], {}, context.cuda, bool(config.scoring.score))


@try_inputs.register
def _try_training(config: Config, context: TrialContext = DEFAULT) -> Iterator[str]:
    found: Found = {}
    rows, tokenizer = yield from _generated(config, ["train", "eval"], found, context.cuda)
    for entry in config.data.eval_suite:
        yield _counted(len(load_suite(entry, True, True)[0]), entry, "eval") if parse_suite(entry)[1] else _later(entry)
    lines, beside = _on_disk(config.ptx.as_data_config(config.data), "train")
    yield from (*lines, *_ends_at_its_start(partial(_check_start, config, rows["train"], sum(map(len, beside)))))
    if tokenizer is not None and beside and not lines[:-len(beside)]:
        ptx = config.ptx.as_data_config(config.data)
        media = open_media(str(config.model.pretrain), tokenizer, config.data)
        yield from preview(
            PretrainingDataset(ptx, tokenizer, config.pretrain_len, media=media,
                               learning=Learning(whole=config.ptx.pretrain_mode))[0], tokenizer)
    store = None
    if tokenizer is not None and config.reward.reward_pretrain:
        store = open_media(str(config.model.pretrain), tokenizer, config.data)
    tried = {where: record if store is None else _known(rows, record, config.data, store)
             for where, (rows, record) in [*found.items()][:1]}  # yapf: disable
    rewards = RewardManager(config.reward, context.functions, ScorerSetup(media=store, data=config.data))
    try:
        check_accuracy_part(config.eval.accuracy_part, rewards.part_names())
        for where, record in tried.items():
            yield _scored(rewards, record, where, config, tokenizer)
    finally:
        rewards.shutdown()


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


def _ends_at_its_start(check: Callable[[], None]) -> Iterator[str]:
    """Yield a problem that would end the run before its first step. Here it is no error, because a plan may use a
    small model and a few rows in place of the real ones."""
    try:
        check()
    except UserError as error:
        yield f"warning: with this model and these rows the run would end at its start: {error}"


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


def _generated(config: Config, splits: list[str], found: Found, cuda: bool,
               scored: bool = True) -> Generator[str, None, tuple[Counter[str], PreTrainedTokenizerBase | None]]:
    """Read the prompts of a run that generates (:func:`_read`); refuse an engine that cannot take their media, and
    tokenize those without media.

    Returns:
        the rows of each split that are on this machine and fit, and the tokenizer of :func:`_tokenizer`.
    """
    most, rows = Counter[str](), Counter[str]()
    for split in splits:
        rows[split] = yield from _read(config.data, split, found, config.model.pretrain, most)
    _check_engine(config, most, cuda)
    tokenizer = yield from _tokenizer(str(config.model.pretrain), config.data.chat_template)
    if tokenizer is not None and not most:
        for split in splits:
            prompts = _tokenized(config, split, tokenizer, scored)
            rows[split] = len(prompts) or rows[split]
            yield from preview(prompts[0], tokenizer) if prompts and split == splits[0] else ()
    for _, record in [*found.values()][:1] if tokenizer is not None and most else ():
        yield "the first prompt, before its media become tokens:"
        yield from shown(_prompted(record, config, tokenizer)[0], GIVEN)
    return rows, tokenizer


def _tokenized(config: Config, split: str, tokenizer: PreTrainedTokenizerBase, scored: bool) -> Sequence[Prompt]:
    """Make the prompts of a split as the run does, for its errors and warnings; none if not all their rows
    are on this machine."""
    data, training = config.data, split == "train"
    entries, suites = (data.prompt_data, []) if training else (data.eval_data, data.eval_suite)
    if not [*entries, *suites] or not all(map(is_here, entries)) or not all(parse_suite(one)[1] for one in suites):
        return []
    return PromptsDataset(data, tokenizer, config.rollout.prompt_max_len, split, scored=scored)


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


def _counted(rows: int, entry: str, split: str) -> str:
    return f"data: {rows:,} rows of {entry} ({'training' if split == 'train' else 'evaluation'})"


def _prompted(record: Record, config: Config, tokenizer: Any) -> tuple[str, list[Message]]:
    """Render the prompt of a record as the run does: its text, and its messages if it is a chat. Without a tokenizer
    (None) the text of a chat is that of its turns."""
    renderer = Renderer(config.data, tokenizer)
    messages = renderer.messages(record.prompt)
    if messages is None:
        return renderer.text(str(record.prompt)), []
    if tokenizer is None:
        return "\n".join(text_of(turn["content"]) for turn in messages), messages
    return renderer.opened([messages], [record.template_kwargs])[0], messages


def _scored(rewards: RewardManager, record: Record, where: str, config: Config,
            tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Score a stand-in for a response to one row, its reference or nothing; the time is bounded as in a run.

    Raises:
        UserError: it is left unscored for another reason than those of ``EXCUSED``, or a function declines to judge
            every answer with which a run probes the rewards.
    """
    prompt, messages = _prompted(record, config, tokenizer)
    row = RewardInput(prompt, "", messages, record.data_source, record.label, record.reference, record.columns,
                      record.media, config.data.chat_template_kwargs | record.template_kwargs)
    check_references(rewards, [row])
    known = not missing(record.reference)
    row, score = _first_that_earns(rewards, row, good_answers(rewards, row) if known else [""])
    asked = f"{where}, {f'answered with its reference ({quoted(row.response)})' if known else 'with an empty response'}"
    if score.error not in EXCUSED:
        raise UserError(
            f"rewards: {asked}, could not be scored: {score.error}, by {_failed(score)} (details in the log "
            "above). Correct the reward or the row")
    if score.error == "none" and rewards.cfg.reward_probe:
        probed = score_answers(rewards, row)
        if all(one.error == "none" for one in probed):
            raise nothing_scored(row, probed)
    check_accuracy_part(config.eval.accuracy_part, rewards.part_names(), [score.parts])
    parts = ", ".join(f"{name} {'unscored' if value is None else show(value)} x {show(score.weights[name])}"
                      for name, value in score.parts.items() if name in score.weights)  # yapf: disable
    total = f"unscored: {score.error}" if score.total is None else f"{score.total:.6g}"
    return f"rewards: {asked}: {parts}; total {total}"


def _first_that_earns(rewards: RewardManager, row: RewardInput, answers: list[str]) -> tuple[RewardInput, Score]:
    """Score the first and the last of ``answers`` to a row, one by one, until one gets a reward or a reward is excused;
    else return the first, or the last if the first was an error."""
    tried = list[tuple[RewardInput, Score]]()
    for answer in dict.fromkeys((answers[0], answers[-1])):
        one = replace(row, response=answer)
        tried += [(one, score) for score in rewards.collect(rewards.submit([one]))]
        score = tried[-1][1]
        if score.total or score.total is None and score.error in EXCUSED:
            break
    failed = tried[0][1].error not in EXCUSED
    return tried[-1] if failed or (tried[-1][1].total or 0) > 0 else tried[0]


def _failed(score: Score) -> str:
    return ", ".join(name for name in score.weights if score.parts[name] is None)
