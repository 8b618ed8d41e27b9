"""Rows of a run, read before torch is imported: a broken file, a wrong column or too few rows are answered at once.

The readers are those of the data sets, without a tokenizer; what they say is what the run would say. It reads the rows
again, and finds what only their tokens show.
"""
from collections.abc import Callable, Iterator
from functools import singledispatch
from pathlib import Path
from typing import Any

from lightrft.config.generate_schema import GenerateConfig
from lightrft.config.inference_schema import InferenceTree
from lightrft.config.offline_schema import OfflineConfig, PairConfig
from lightrft.config.preference_schema import KTOConfig
from lightrft.config.rm_schema import GRMConfig, PRMConfig
from lightrft.config.schema import Config, DataConfig
from lightrft.config.sft_schema import SFTConfig
from lightrft.config.shared_schema import Tree
from lightrft.config.tree import flatten
from lightrft.datasets.answered import answered_rows
from lightrft.datasets.judged import judged_answers
from lightrft.datasets.judgements import find_judgements
from lightrft.datasets.loader import check_batch
from lightrft.datasets.pair_sources import parse_source
from lightrft.datasets.preferences import find_pairs
from lightrft.datasets.prompts_dataset import load_specs
from lightrft.datasets.prompt_rows import to_prompts
from lightrft.datasets.rendering import BareRenderer
from lightrft.datasets.rows import has_no_file, Rows
from lightrft.datasets.sft_dataset import demonstrations, Learning
from lightrft.datasets.steps import find_solutions
from lightrft.datasets.suites import load_suite, parse_suite
from lightrft.utils.logging import silent

LARGEST = 64 << 20  # bytes of the files of a split; those of a larger one are read once, by the run
Reader = Callable[[int, Rows], Any]  # number of the entry and its rows


def refuse_rows(c: Tree, planned: bool = False) -> None:
    """Read the rows of a run that are in files of this machine, or in memory, and recognise them.

    Args:
        planned: nothing is trained, so a batch may be larger than the data.

    Raises:
        DataError: rows cannot be read or used, or are fewer than a batch.
    """
    with silent():  # the run says what it leaves out
        for option, size, cfg, split, read in _splits(c):
            if count := _read(cfg, split, read):
                if option and not planned:
                    check_batch(size, count, option)
        for suite in flatten(c).get("eval_suite", ()):
            if parse_suite(suite)[1]:
                load_suite(suite, True, True)


def _splits(c: Tree) -> Iterator[tuple[str, int, DataConfig, str, Reader]]:
    """Yield the rows that a run reads: the option and the size of their batches, where they are, and their reader."""
    if (cfg := data_of(c)) is None:
        return
    trains = isinstance(c, (Config, OfflineConfig))
    yield c.BATCH if trains else "", flatten(c)[c.BATCH] if trains else 0, cfg, "train", reader_of(c, cfg)
    yield "", 0, cfg, "eval", reader_of(c, cfg)
    if isinstance(c, Config):
        beside, learning = c.ptx.as_data_config(c.data), Learning(whole=c.ptx.pretrain_mode)
        bare = BareRenderer(beside)
        yield "ptx_batch_size", c.pretraining_rows, beside, "train", lambda _, rows: demonstrations(
            rows, bare, learning, ())


def _read(cfg: DataConfig, split: str, read: Reader) -> int:
    """Read the entries of a split; return the number of their rows, or 0 if not all can be read here."""
    entries = cfg.prompt_data if split == "train" else cfg.eval_data
    if not entries or not all(map(is_here, entries)) or sum(map(_bytes, entries)) > LARGEST:
        return 0
    parts, _ = load_specs(cfg, split)
    for entry, rows in enumerate(parts):
        read(entry, rows)
    return sum(map(len, parts))


def is_here(entry: str) -> bool:
    """Return True if the rows of an entry of the data are in memory, or on this machine."""
    return has_no_file(entry) or _path(entry).exists()


def _path(entry: str) -> Path:
    return Path(parse_source(entry)[1].rsplit("@", 1)[0]).expanduser()


def _bytes(entry: str) -> int:
    files = [_path(entry), *_path(entry).rglob("*")] if not has_no_file(entry) else []
    return sum(file.stat().st_size for file in files if file.is_file())


def data_of(c: Tree) -> DataConfig | None:
    """Return the data group of a tree as that of the RL trainer, which the data sets read; None: it reads no rows."""
    if isinstance(c, Config):
        return c.data
    if isinstance(c, OfflineConfig):
        return c.data.as_data_config()
    return c.as_config().data if isinstance(c, InferenceTree) else None


@singledispatch
def reader_of(c: Tree, cfg: DataConfig) -> Reader:
    """Return the function that recognises the rows of an entry; here those of prompts, and of responses."""
    if isinstance(c, GenerateConfig) and not c.generates:
        return lambda _, rows: answered_rows(rows, c.data, bool(c.scoring.score))
    return lambda _, rows: to_prompts(rows, cfg)


@reader_of.register
def _demonstrations(c: SFTConfig, cfg: DataConfig) -> Reader:
    bare, learning = BareRenderer(cfg), Learning.of(c.data)
    return lambda _, rows: demonstrations(rows, bare, learning)


@reader_of.register
def _pairs(c: PairConfig, cfg: DataConfig) -> Reader:
    return lambda _, rows: find_pairs(rows, c.data)


@reader_of.register
def _judged(c: KTOConfig, cfg: DataConfig) -> Reader:
    bare = BareRenderer(cfg)
    return lambda _, rows: judged_answers(rows, c.data, bare)


@reader_of.register
def _solutions(c: PRMConfig, cfg: DataConfig) -> Reader:
    return lambda _, rows: find_solutions(rows, c.data)


@reader_of.register
def _judgements(c: GRMConfig, cfg: DataConfig) -> Reader:
    return lambda entry, rows: find_judgements(entry, rows, c.data, c.train.seed)
