"""Trial of the data and the rewards of a run before it starts: rows are read, and one of them is scored."""
from collections.abc import Iterator
from dataclasses import replace
from functools import singledispatch
from pathlib import Path

from lightrft.config.options import show
from lightrft.config.schema import Config, DataConfig
from lightrft.config.sft_schema import SFTConfig
from lightrft.config.shared_schema import Tree
from lightrft.datasets.prompts_dataset import load_specs
from lightrft.datasets.records import Record, missing, to_records
from lightrft.datasets.suites import load_suite, parse_suite
from lightrft.rewards.base import RewardInput, Score
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.validation import good_answers, quoted
from lightrft.utils.errors import UserError

EXCUSED = (None, "none", "unreachable")  # scored; the function declines to judge; the server does not run yet


@singledispatch
def try_out(config: Tree) -> Iterator[str]:
    """Yield a line for everything that is tried; each tree registers its own.

    Raises:
        UserError: the data or a reward of the run cannot be used.
    """
    yield from ()


@try_out.register
def _(config: SFTConfig) -> Iterator[str]:
    for split in ("train", "eval"):
        yield from _read(config.data.as_data_config(), split, {})


@try_out.register
def _(config: Config) -> Iterator[str]:
    found: dict[str, Record] = {}
    for split in ("train", "eval"):
        yield from _read(config.data, split, found)
    for entry in config.data.eval_suite:
        yield _counted(len(load_suite(entry, True, True)[0]), entry, "eval") if parse_suite(entry)[1] else _later(entry)
    rewards = RewardManager(config.reward)
    try:
        for where, record in list(found.items())[:1]:
            yield _scored(rewards, record, where)
    finally:
        rewards.shutdown()


def _read(cfg: DataConfig, split: str, found: dict[str, Record]) -> Iterator[str]:
    """Read the rows of a split that are on this machine; add the first that has a reference to ``found``, by place."""
    entries = cfg.prompt_data if split == "train" else cfg.eval_data
    here = [one for one in entries if one.startswith("memory:") or Path(one.rsplit("@", 1)[0]).expanduser().exists()]
    for entry in entries:
        if entry not in here:
            yield _later(entry)
    if not here:
        return
    parts, _ = load_specs(replace(cfg, prompt_data=here, prompt_data_probs=[], eval_data=here), split)
    for entry, rows in zip(here, parts):
        yield _counted(len(rows), entry, split)
        for i, record in enumerate(to_records(rows, cfg)):
            if not missing(record.reference) or i + 1 == len(rows):
                found.setdefault(rows.where(i), record)
                break


def _later(entry: str) -> str:
    return f"data: {entry} is read from the hub when the run starts"


def _counted(rows: int, entry: str, split: str) -> str:
    return f"data: {rows:,} rows of {entry} ({'training' if split == 'train' else 'evaluation'})"


def _scored(rewards: RewardManager, record: Record, where: str) -> str:
    """Score a stand-in for a response to one row; the time is bounded as in a run.

    Raises:
        UserError: it is left unscored for another reason than those of ``EXCUSED``.
    """
    chat = record.prompt if isinstance(record.prompt, list) else []
    prompt = "\n".join(str(turn["content"]) for turn in chat) if chat else str(record.prompt)
    row = RewardInput(prompt, "", chat, record.data_source, record.label, record.reference, record.columns)
    known = not missing(record.reference)
    row = replace(row, response=good_answers(row)[0] if known else "")
    (score, ) = rewards.wait(rewards.submit([row]))
    asked = (f"a stand-in for a response, {'its reference answer' if known else 'empty'} ({quoted(row.response)}), to "
             f"{where}")
    if score.error not in EXCUSED:
        raise UserError(
            f"--dry_run: {asked}, could not be scored: {score.error}, by {_failed(score)} (details in the log "
            "above). Correct the reward or the row")
    parts = ", ".join(f"{name} {'unscored' if value is None else show(value)} x {show(score.weights[name])}"
                      for name, value in score.parts.items() if name in score.weights)  # yapf: disable
    total = f"unscored: {score.error}" if score.total is None else f"{score.total:.6g}"
    return f"rewards: {asked}: {parts}; total {total}"


def _failed(score: Score) -> str:
    return ", ".join(name for name in score.weights if score.parts[name] is None)
