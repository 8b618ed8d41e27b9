"""Data set of tokenized :class:`~lightrft.types.Prompt` of the wanted difficulty, from rows of any known schema."""
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lightrft.config.options import finite
from lightrft.config.schema import DataConfig
from lightrft.datasets.columns import report_columns
from lightrft.datasets.loader import MixedDataset, apportion, check_probs
from lightrft.datasets.media_prompts import with_media, with_tokens
from lightrft.datasets.prompt_rows import first_value, missing, no_reference, to_prompts
from lightrft.datasets.rendering import encode_all, Renderer
from lightrft.datasets.pair_sources import load_entry
from lightrft.datasets.rows import DataError, Row, Rows, UnusableRow
from lightrft.datasets.suites import load_suite
from lightrft.utils.logging import get_logger, warn_of_all
from lightrft.utils.prompt import Message, Prompt

if TYPE_CHECKING:  # a mistake in a row is found without torch
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from lightrft.datasets.media_store import MediaStore

Found = TypeVar("Found")


def load_specs(cfg: DataConfig, split: str) -> tuple[list[Rows], list[float]]:
    """Load the rows of each ``--prompt_data`` ("train") or ``--eval_data`` ("eval") entry, cut to the wanted number.

    Training rows outside the wanted difficulty are left out first. The limit is shared between the entries in
    proportion to their sizes. Returns the rows and the mixing probabilities.

    Raises:
        DataError: there is no entry, the data cannot be read, or no row has that difficulty.
    """
    training = split == "train"
    specs = cfg.prompt_data if training else cfg.eval_data
    probs = cfg.prompt_data_probs if training else []
    if not specs and (training or not cfg.eval_suite):
        raise DataError(f"no data: name some with --{'prompt_data' if training else 'eval_data'}")
    check_probs(probs, specs)
    parts = [load_entry(spec, cfg.prompt_split if training else cfg.eval_split) for spec in specs]
    if training and cfg.difficulty_key is not None:
        parts = of_difficulty(parts, cfg.difficulty_key, cfg)
    limit = cfg.max_samples if training else cfg.max_eval_samples
    sizes = [len(part) for part in parts]
    keep = apportion(limit, sizes) if 0 < limit < sum(sizes) else sizes
    return [part.pick(range(count)) for part, count in zip(parts, keep)], list(probs)


def usable(rows: Rows, read: Callable[[Row, str], Found], policy: str, fault: str) -> dict[int, Found]:
    """Read the rows of one entry with ``read(row, where)``, by index.

    Args:
        policy: "error", or "skip" for leaving out rows for which ``read`` raises :class:`UnusableRow`; they are
            counted in the log.
        fault: of such rows, for the log.
    """
    found: dict[int, Found] = {}
    errors: list[UnusableRow] = []
    for i, (row, where) in enumerate(rows.named):
        try:
            found[i] = read(row, where)
        except UnusableRow as error:
            if policy == "error":
                raise
            errors.append(error)
    if errors:
        warn_of_all(f"{len(errors)} of {len(rows)} rows {fault} (the first: {errors[0]}): left out")
    return found


def fitting(rows: Rows, lengths: list[int], max_len: int, policy: str, option: str) -> list[int]:
    """Return the indices of the rows of at most ``max_len`` tokens; the number of others is logged.

    Raises:
        DataError: a row is empty, or under the policy "error" too long.
    """
    if 0 in lengths:
        raise DataError(f"{rows.where(lengths.index(0))}: the row has no prompt: it renders to no token. Remove it")
    kept = [i for i, length in enumerate(lengths) if length <= max_len]
    if len(kept) == len(lengths):
        return kept
    first = next(i for i, length in enumerate(lengths) if length > max_len)
    found = (f"{len(lengths) - len(kept)} of {len(lengths)} rows are longer than {option} {max_len} (the first: "
             f"{rows.where(first)}, {lengths[first]} tokens; the longest has {max(lengths)})")
    if policy == "error":
        raise DataError(f"{found}. Raise {option}, or drop them with --overlong_prompt filter")
    warn_of_all(f"{found}: left out")
    return kept


class PromptsDataset(MixedDataset[Prompt]):
    """Prompts of one split, rendered and tokenized at construction.

    A prompt's ``uid`` is ``<entry>:<id column>`` or ``<entry>:<row>``: the same in every run over the same files. The
    entry of a suite is its name.

    Args:
        cfg: selects the data and the conversion of a row to a prompt.
        tokenizer: tokenizer of the policy.
        prompt_max_len: longest prompt, in tokens; ``cfg.overlong_prompt`` decides about longer ones.
        split: "train" or "eval"; it selects the options that apply.
        media: store for the pictures, videos and sounds of the rows; None: the model takes text only.
        suffix: text at the end of every prompt.
        scored: whether anything scores the responses.
        tools: schemas that the chat template shows in every prompt; those of a row win.
        compared: whether what scores may read reference answers, so that missing ones are worth a warning.

    Attributes:
        dropped: prompts left out because they are too long.

    Raises:
        DataError: data, rows or templates cannot be used, or all prompts are too long.
    """

    def __init__(self, cfg: DataConfig, tokenizer: "PreTrainedTokenizerBase", prompt_max_len: int, split: str = "train",
                 media: "MediaStore | None" = None, suffix: str = "", scored: bool = True,
                 tools: Sequence[dict[str, Any]] = (), compared: bool = True) -> None:
        parts, self.probs = load_specs(cfg, split)
        self._renderer, self._media, self._compared = Renderer(cfg, tokenizer, suffix), media, scored and compared
        if tools:  # the renderer has checked those of the option
            kwargs = cfg.chat_template_kwargs | {"tools": [*tools]}
            self._renderer.cfg = replace(cfg, chat_template_kwargs=kwargs)
        self._prompts: list[Prompt] = []  # without their tokens
        self._token_ids: list[np.ndarray] = []  # a tenth of the memory of lists
        self.sizes, self.dropped = [], 0
        for entry, rows in enumerate(parts):
            self._add(str(entry), rows, to_prompts(rows, cfg), cfg.overlong_prompt, prompt_max_len)
            report_columns(rows, self._read, "leaves to the rewards" if scored else "leaves alone")
        for suite in cfg.eval_suite if split == "eval" else ():
            rows, prompts = load_suite(suite, bool(tokenizer.chat_template), cfg.input_template is None)
            self._add(prompts[0].data_source, rows, prompts, "error", prompt_max_len)  # a suite is whole
        if media is not None:
            media.keep(prompt.media for prompt in self._prompts)
        if split == "train" or not cfg.prompt_data:
            self._check_bare_text(cfg)
        if not self._prompts:
            raise DataError(f"all {self.dropped} prompts are longer than --prompt_max_len {prompt_max_len}. Raise it")

    def _add(self, entry: str, rows: Rows, prompts: list[Prompt], overlong: str, max_len: int) -> None:
        """Tokenize the prompts of one entry and keep those that fit and whose media can be used."""
        before = len(rows)
        rows, prompts = self._encoded(rows, prompts)
        kept = fitting(rows, [len(prompt.token_ids) for prompt in prompts], max_len, overlong, "--prompt_max_len")
        self._prompts += [replace(prompts[i], uid=f"{entry}:{prompts[i].uid or rows.number(i)}", token_ids=[])
                          for i in kept]  # yapf: disable
        self._token_ids += [np.asarray(prompts[i].token_ids, dtype=np.int32) for i in kept]
        self.sizes.append(len(kept))
        self.dropped += before - len(kept)
        if self._compared and prompts and missing(prompts[0].reference):
            warn_of_all(no_reference(rows, self._renderer.cfg))

    def _encoded(self, rows: Rows, prompts: list[Prompt]) -> tuple[Rows, list[Prompt]]:
        """Tokenize the prompts whose media can be used."""
        rows, prompts = with_media(rows, prompts, cfg := self._renderer.cfg, self._media)
        if cfg.apply_chat_template:
            prompts = [replace(prompt, text="", messages=prompt.chat) for prompt in prompts]
        rendered = encode_all(self._renderer, [prompt.asked for prompt in prompts], cfg.data_workers,
                              [prompt.template_kwargs for prompt in prompts])
        return rows, with_tokens(prompts, rendered, self._media)

    def _read(self, rows: Rows) -> list[Any]:
        """Return what is read of rows, but for the columns that go to the rewards as they are."""
        cfg = self._renderer.cfg
        _, prompts = self._encoded(rows, to_prompts(rows, cfg))
        hard = [] if cfg.difficulty_key is None else [difficulty(row, cfg.difficulty_key, "") for row in rows.rows]
        bare = [replace(prompt, messages=[], columns={}, template_kwargs=self._renderer.reads(prompt.template_kwargs))
                for prompt in prompts]  # yapf: disable
        return [*bare, *hard]

    def _check_bare_text(self, cfg: DataConfig) -> None:
        """Log once that the tokenizer has a chat template that is not used; an option for it alone is refused."""
        any(self._messages(prompt) for prompt in self._prompts)  # worker processes may have rendered
        self._renderer.check_used()
        bare = not cfg.apply_chat_template and not all(prompt.messages for prompt in self._prompts)
        if bare and cfg.input_template is None and self._renderer.tokenizer.chat_template:
            warn_of_all("the tokenizer has a chat template, but text prompts are used as they are; a model that was "
                        "trained to chat needs --apply_chat_template")

    def __len__(self) -> int:
        return len(self._prompts)

    def _messages(self, prompt: Prompt) -> list[Message]:
        """Return the chat that is rendered of the messages of a row; none of a text."""
        return prompt.messages and self._renderer.messages(prompt.messages) or []

    def item(self, index: int) -> Prompt:
        """The prompt at ``index``."""
        prompt = self._prompts[index]
        return replace(prompt, token_ids=self._token_ids[index].tolist(), messages=self._messages(prompt),
                       template_kwargs=self._renderer.cfg.chat_template_kwargs | prompt.template_kwargs)


def difficulty(row: Row, key: str, where: str) -> float:
    """Return the number in column ``key``, else in ``extra_info[key]``. ``where`` names the row in messages.

    Raises:
        DataError: the value is missing or not a number.
    """
    found = first_value((row, key), (row.get("extra_info"), key))
    number = finite(found)
    if number is None:
        problem = "the row has none" if found is None else f"{found!r} is not a number"
        raise DataError(f"{where}: --difficulty_key {key}: {problem}. Complete or remove the row, or drop the option")
    return number


def of_difficulty(parts: list[Rows], key: str, cfg: DataConfig) -> list[Rows]:
    """Return the rows with a ``key`` from ``cfg.difficulty_min`` to ``cfg.difficulty_max``; the number of others is
    logged.

    Raises:
        DataError: as in :func:`difficulty`, or no row is left.
    """
    low = -math.inf if cfg.difficulty_min is None else cfg.difficulty_min
    high = math.inf if cfg.difficulty_max is None else cfg.difficulty_max
    values = [[difficulty(row, key, where) for row, where in rows.named] for rows in parts]
    kept = [rows.pick(i for i, value in enumerate(of) if low <= value <= high) for rows, of in zip(parts, values)]
    before, after, everything = sum(map(len, parts)), sum(map(len, kept)), [value for of in values for value in of]
    found = (f"{before - after} of {before} rows have a {key} outside [{low:g}, {high:g}] (the smallest is "
             f"{min(everything):g}, the largest {max(everything):g})")
    if not after:
        raise DataError(f"{found}: nothing is left to train on. Change --difficulty_min or --difficulty_max")
    get_logger().info("%s: left out", found)
    return kept


PromptDataset = PromptDatasetVL = PromptsDataset  # one path for all modalities
