"""Trial of the prompts of a run before it starts: they are read, their media are tried, and one is shown."""
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.config.schema import Config, DataConfig
from lightrft.datasets.columns import report_columns
from lightrft.datasets.decoding import decode
from lightrft.datasets.loader import apportion, MixedDataset
from lightrft.datasets.media import KINDS, MediaError, MediaRules
from lightrft.datasets.media_rows import count_media, find_row_media, plain_marks
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.preview import GIVEN, preview, shown
from lightrft.datasets.prompts_dataset import load_specs, PromptsDataset
from lightrft.datasets.prompt_rows import missing, to_prompts
from lightrft.datasets.rows import Rows
from lightrft.datasets.suites import parse_suite
from lightrft.environments.opening import open_pool, player_of, tools_of
from lightrft.environments.play import Player
from lightrft.models.architectures import modality_of
from lightrft.models.config_json import media_kinds, read_config
from lightrft.models.tokenizer import load_tokenizer, read_chat_template, set_chat_template, TOKENIZER_FILES
from lightrft.preflight.inputs import is_here
from lightrft.rewards.spec import may_compare
from lightrft.rollout.engines import (builder_of, check_family_with_states, check_layers, check_media, check_rope,
                                      check_states)
from lightrft.trainer.environment_trial import try_environment
from lightrft.trainer.model_media import open_media
from lightrft.trainer.reward_trial import rendered
from lightrft.types import Prompt
from lightrft.utils.errors import UserError
from lightrft.utils.hub import is_no_model
from lightrft.utils.play import Play
from lightrft.utils.prompt import Message

Found = dict[str, tuple[Rows, Prompt]]  # a row that was read, by its file and number
USES = {"train": "training", "eval": "evaluation"}  # of the rows of a split


@dataclass
class ReadPrompts:
    """Prompts of a run that generates, read on trial: the number of rows of each split that are on this machine and
    fit, their prompts, and the tokenizer and the media of these; ``later``: some rows are not on this machine;
    ``environment``: that of the run, which has played an episode (``play``) and is over."""
    rows: Counter[str] = field(default_factory=Counter)
    prompts: dict[str, Sequence[Prompt]] = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | None = None
    media: MediaStore | None = None
    later: bool = False
    environment: Player | None = None
    play: Play | None = None


def tokenizer_of(path: str, template: str | None,
                 elsewhere: bool) -> Generator[str, None, PreTrainedTokenizerBase | None]:
    """Load the tokenizer with its chat template. One that is not on this machine is no error in a plan: say so, and
    return None."""
    if template is not None:
        read_chat_template(template)  # an unknown one is an error without a tokenizer too
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        read_config(path)  # which a run does first
    try:
        tokenizer = load_tokenizer(path)
    except UserError as error:
        if any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise
        if not elsewhere and (folder.exists() or is_no_model(path, error)):
            read_config(path)
            raise
        yield f"data: not tokenized, for lack of a tokenizer: {error}"
        return None
    if template is not None:
        set_chat_template(tokenizer, template)
    return tokenizer


def on_disk(cfg: DataConfig, split: str) -> tuple[list[str], list[Rows]]:
    """Return a line for each entry of a split, and the rows of those that are on this machine."""
    entries = cfg.prompt_data if split == "train" else cfg.eval_data
    here = [one for one in entries if is_here(one)]
    absent = [later(entry) for entry in entries if entry not in here]
    if not here:
        return absent, []
    parts, _ = load_specs(replace(cfg, prompt_data=here, prompt_data_probs=[], eval_data=here), split)
    return absent + [counted(len(rows), entry, split) for entry, rows in zip(here, parts)], parts


def read_prompts(config: Config, splits: list[str], found: Found, cuda: bool, elsewhere: bool, scored: bool = True,
                 suffix: str = "", objects: Mapping[str, Any] = {}) -> Generator[str, None, ReadPrompts]:
    """Read the prompts of a run that generates (:func:`_read`), refuse an engine that cannot take their media, and
    tokenize them, each with ``suffix`` behind it."""
    data, path, most, parts = config.data, str(config.model.pretrain), Counter[str](), list[Rows]()
    read = ReadPrompts()
    for split in splits:
        read.rows[split] = yield from _read(data, split, found, path, most, parts)
    most["image"] += config.rollout.env_images
    _check_engine(config, +most, cuda)
    pool = open_pool(config.rollout, objects)
    read.tokenizer = yield from tokenizer_of(path, data.chat_template, elsewhere)
    if read.tokenizer is None:
        if pool is not None:
            pool.shutdown()
        yield from _untokenized(config, parts, found, scored)
        return read
    read.media = open_media(path, read.tokenizer, data)
    read.environment = player_of(pool, config.rollout, read.tokenizer, path, read.media)
    for split in splits:
        prompts = read.prompts[split] = _tokenized(config, split, read, scored, suffix)
        read.rows[split] = len(prompts) or read.rows[split]
        yield from mixed(data.prompt_data, prompts)
        if prompts and split == splits[0]:
            yield from preview(prompts[0], read.tokenizer)
    if read.environment is not None:
        yield from _played(read, config.rollout.generate_max_len)
    return read


def _played(read: ReadPrompts, max_new_tokens: int) -> Iterator[str]:
    """Play an episode of the environment from the first prompt that is on this machine, and end its workers."""
    assert read.environment is not None, "the caller has seen it"
    first = next((prompts[0] for prompts in read.prompts.values() if prompts), None)
    try:
        if first is not None:
            read.play = yield from try_environment(read.environment, first, max_new_tokens)
    finally:
        read.environment.shutdown()


def _untokenized(config: Config, parts: Sequence[Rows], found: Found, scored: bool) -> Iterator[str]:
    """Report the columns of rows for which there is no tokenizer, and show the text of one."""
    reader = partial(_read_again, config.data, _takes(config.model.pretrain))
    for rows in parts:
        report_columns(rows, reader, "leaves to the rewards" if scored else "leaves alone")
    for _, record in [*found.values()][:1]:
        yield "the first prompt, before a template renders it:"
        yield from shown(rendered(record, config, None)[0], GIVEN)


def _tokenized(config: Config, split: str, read: ReadPrompts, scored: bool, suffix: str) -> Sequence[Prompt]:
    """Make the prompts of a split that are on this machine as the run does, for its errors and warnings; note in
    ``read`` that others are not."""
    assert read.tokenizer is not None, "they are tokenized"
    data = config.data
    local = replace(data, prompt_data=[*filter(is_here, data.prompt_data)],
                    eval_data=[*filter(is_here, data.eval_data)],
                    eval_suite=[one for one in data.eval_suite if parse_suite(one)[1]])
    entries = (("prompt_data", ), ("eval_data", "eval_suite"))[split == "eval"]
    complete = all(getattr(local, name) == getattr(data, name) for name in entries)
    read.later |= not complete
    if not any(getattr(local, name) for name in entries):
        return []
    return PromptsDataset(data if complete else replace(local, prompt_data_probs=[]), read.tokenizer,
                          config.rollout.prompt_max_len, split, read.media, suffix, scored,
                          tools_of(None if read.environment is None else read.environment.pool),
                          may_compare(config.reward.reward))


def _check_engine(config: Config, most: Mapping[str, int], cuda: bool) -> None:
    """Refuse an engine without a builder, or one that would refuse the model, or rows with ``most`` media of each kind,
    when it starts. None of its packages is needed."""
    builder_of(config.rollout.engine_type)
    path = str(config.model.pretrain)
    try:
        model = read_config(path)
        both_ways = modality_of(model, path).both_ways
    except UserError:  # an error elsewhere
        return
    check_rope(config.rollout, model)
    check_states(config.rollout, model)
    check_family_with_states(config.rollout, model, cuda, bool(config.model.bf16))
    check_layers(config.rollout, model)
    check_media(config.rollout, model, most, both_ways and not cuda)


def _read(cfg: DataConfig, split: str, found: Found, model: str | None, most: Counter[str],
          entries: list[Rows]) -> Generator[str, None, int]:
    """Read the rows of a split that are on this machine into ``entries``; add the first that has a reference to
    ``found``, by file and number, and the most media of a row to ``most``. Return the number of rows."""
    lines, parts = on_disk(cfg, split)
    entries += parts
    yield from lines
    for rows in parts:
        prompts = to_prompts(rows, cfg)
        yield from _opened(rows, [prompt.chat for prompt in prompts], cfg, model, most)
        for i, prompt in enumerate(prompts):
            if not missing(prompt.reference) or i + 1 == len(rows):
                found.setdefault(rows.where(i), (rows.pick([i]), prompt))
                break
    return sum(map(len, parts))


def _read_again(cfg: DataConfig, takes: Sequence[str], rows: Rows) -> list[Any]:
    """Return what a run reads of rows, with the number of their media."""
    return [(replace(prompt, columns={}), count_media(row, cfg, prompt.chat, where, takes))
            for (row, where), prompt in zip(rows.named, to_prompts(rows, cfg))]  # yapf: disable


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


def later(entry: str) -> str:
    return f"data: {entry} is read from the hub when the run starts"


def counted(rows: int, entry: str, split: str) -> str:
    return f"data: {rows:,} rows of {entry} ({USES.get(split, split)})"


def mixed(entries: Sequence[str], rows: Sequence[Any]) -> Iterator[str]:
    """Yield the rows of each entry that an episode draws, where probabilities mix them."""
    if not isinstance(rows, MixedDataset) or not rows.probs:
        return
    for entry, size, count in zip(entries, rows.sizes, apportion(len(rows), rows.probs)):
        yield f"data: {count:,} of the {len(rows):,} rows drawn in an epoch are of {entry}, which has {size:,}"
