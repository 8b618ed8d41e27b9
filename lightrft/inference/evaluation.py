"""Evaluation of checkpoints on the same prompts: answers of each, numbers with intervals, paired differences."""
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lightrft.config.evaluate_schema import EvaluateConfig
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.inference.accuracy import differences, group_answers, Measure, measures, parts_of, results
from lightrft.inference.loading import LoadedModel
from lightrft.inference.prompts import (check_rewards, check_scored, content_of, generate, identity, keeping, rehearse,
                                        scoring)
from lightrft.inference.row_files import Row, RowFiles, write_rows
from lightrft.rewards.correctness import check_accuracy_part, Correctness
from lightrft.rewards.placement import ScorerSetup
from lightrft.rewards.spec import may_compare
from lightrft.strategy.base import StrategyBase
from lightrft.trainer.hub_files import fetch_once
from lightrft.trainer.prompt_trial import ReadPrompts
from lightrft.types import Prompt
from lightrft.utils.logging import get_logger
from lightrft.utils.tables import fitting

LATER = ("output_path", "pass_k", "maj_k", "accuracy_part", "pretrain")  # options that change no answer of a model


def evaluate(config: EvaluateConfig, strategy: StrategyBase) -> None:
    """Evaluate every model, write and show the results; a stop request ends it early. A collective."""
    files: dict[str, RowFiles] = {}
    for path, name in zip(config.model.pretrain, model_names(config.model.pretrain)):
        files[name], done = answer(config, strategy, path, config.folder / f"{name}.parts")
        files[name].close()
        if not done:
            get_logger().info(f"stopped; the same command resumes from {config.folder}")
            return
    if strategy.is_main:
        e = config.evaluation
        rows = {name: one.rows() for name, one in files.items()}
        for name, found in rows.items():
            write_rows(config.folder / f"{name}.jsonl", found)
        rule = Correctness.of(config.score.as_reward_config(), e.accuracy_part)
        report(config.folder, rows, measures(config.engine.n_samples, e.pass_k, e.maj_k), rule)
        for name, found in rows.items():
            with keeping(files[name].folder):
                check_scored(found, name)
        for one in files.values():
            one.finish()
    strategy.barrier()


def model_names(paths: Sequence[str]) -> list[str]:
    """Return a name for each model, for its file and the tables: the end of its path that no other one has."""
    parts = [[part for part in Path(path).parts if part != "/"] for path in paths]
    names = list[str]()
    for count in range(1, max(map(len, parts)) + 1):
        names = ["-".join(one[-count:]) for one in parts]
        if len(set(names)) == len(names):
            break
    return names


def answer(config: EvaluateConfig, strategy: StrategyBase, path: str, folder: Path) -> tuple[RowFiles, bool]:
    """Generate and score the answers of the model at ``path`` that ``folder`` does not have; return the files, and
    False if a stop request has ended it."""
    rl = config.as_config(path)
    fetch_once(strategy, rl, rl.data)
    model = LoadedModel.open(rl, strategy, config.engine.repetition_penalty)
    prompts = _prompts(config, model)
    with scoring(config.score, ScorerSetup.of(rl, strategy.device, media=model.media)) as rewards:
        check_rewards(rewards, prompts, config.evaluation.accuracy_part)
        files = RowFiles(folder, _identity(config, prompts, path), strategy)
        todo = len(prompts) - len(files.done) - len(files.unscored)
        get_logger().info(f"{path}: {todo} of {len(prompts)} prompts to answer")
        return files, generate(model, prompts, files, rewards, config.seed, config.folder / "media")


def plan(config: EvaluateConfig, strategy: StrategyBase, reads: Sequence[ReadPrompts]) -> None:
    """Rehearse :func:`evaluate` with each model, of the prompts that are read for it."""
    for path, name, read in zip(config.model.pretrain, model_names(config.model.pretrain), reads):
        assert read.tokenizer is not None, "its prompts are made"
        model = LoadedModel(config.as_config(path), strategy, read.tokenizer, read.media)
        prompts, setup = read.prompts["eval"], ScorerSetup.of(model.config, strategy.device, media=model.media)
        rehearse(model, prompts, scoring(config.score, setup), config.folder / f"{name}.parts",
                 _identity(config, prompts, path), config.evaluation.accuracy_part)


def _prompts(config: EvaluateConfig, model: LoadedModel) -> PromptsDataset:
    rl = model.config
    return PromptsDataset(rl.data, model.tokenizer, rl.rollout.prompt_max_len, "eval", model.media, config.data.wish,
                          tools=model.tools, compared=may_compare(rl.reward.reward))


def _identity(config: EvaluateConfig, prompts: Sequence[Prompt], path: str) -> dict[str, Any]:
    return identity(config, LATER, content_of(prompts), config.as_config(path)) | {"the model": path}


def report(folder: Path, rows: Mapping[str, list[Row]], wanted: Mapping[str, Measure], rule: Correctness) -> None:
    """Write ``results.jsonl`` and ``differences.jsonl``, and print their tables."""
    scored = [parts_of(row) for found in rows.values() for row in found if row["reward"] is not None]
    check_accuracy_part(rule.accuracy_part, (), scored)
    rule.observe(scored)
    undefined = [parts for parts in scored if rule.is_right(parts) is None]
    if undefined:
        get_logger().warning(f"pass@k, avg@n and maj@k of {len(undefined)} of {len(scored)} answers are not defined, "
                             f"only their mean reward is: {rule.remedy(undefined)}")
    answers = {name: group_answers(found, rule) for name, found in rows.items()}
    first, *others = answers
    found = [{"model": name, **row} for name, one in answers.items() for row in results(one, wanted)]
    compared = [{"model": name, "baseline": first, **row} for name in others
                for row in differences(answers[first], answers[name], wanted)]  # yapf: disable
    write_rows(folder / "results.jsonl", found)
    write_rows(folder / "differences.jsonl", compared)
    for line in table(found, compared):
        sys.stdout.write(f"{line}\n")


def table(found: Sequence[Row], compared: Sequence[Row]) -> list[str]:
    """Return the lines of a table: a row per source, number and model, with intervals, and its difference to the first.

    On a narrow terminal columns are left out: a source that is the only one, and counts.

    Args:
        found: the rows of ``results.jsonl``.
        compared: those of ``differences.jsonl``.
    """
    titles = ["source", "metric", "model", "prompts", "value"]
    titles += [f"minus {compared[0]['baseline']}", "better", "worse", "p"] if compared else []
    of = {_place(row): row for row in compared}
    order = list(dict.fromkeys(_place(row)[:2] for row in found))
    ordered = sorted(found, key=lambda row: order.index(_place(row)[:2]))  # models stay in their order
    cells = [(*_place(row), str(row.get("prompts", "")), _cell(row), *_difference(of.get(_place(row))))
             for row in ordered]  # yapf: disable
    columns = dict(zip(titles, zip_longest(*cells, fillvalue="")))
    alone = ("source", ) * (len({row["source"] for row in found}) == 1)
    return fitting(columns, ("source", "metric", "model"), (*alone, "prompts", "better", "worse"))


def _place(row: Row) -> tuple[str, str, str]:
    return row["source"], row["metric"], row["model"]


def _difference(row: Row | None) -> tuple[str, ...]:
    if row is None:
        return ()
    return (_with_interval(row["difference"], row, "+.3f"), str(row["better"]), str(row["worse"]), f"{row['p']:.2g}")


def _cell(row: Row) -> str:
    return _with_interval(row["value"], row, ".3f") if "low" in row else f"{row['value']:.4g}"


def _with_interval(value: float, row: Row, form: str) -> str:
    if row["low"] is None:
        return f"{value:{form}}"
    return f"{value:{form}} [{row['low']:.2f}, {row['high']:.2f}]"
