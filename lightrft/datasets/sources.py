"""Public data sets by name: conversion of published rows to rows in our schema."""
import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lightrft.datasets.rows import DataError, Row, load_rows
from lightrft.utils.logging import get_logger
from lightrft.utils.marked_answers import extract_answer
from lightrft.utils.registry import Registry

Source = Callable[[Row, str, int], Row]
SOURCES: Registry[Source] = Registry("data source")
"""Name -> ``(raw row, split, index) -> row``. Plugins may add entries."""


def raw_rows(spec: str, split: str) -> list[Row]:
    """Return the rows of one split: of a folder or hub id by file name, of a single file by its ``split`` column.

    Raises:
        DataError: the data is unreadable, or a single file has no such split.
    """
    rows = load_rows(spec, split)
    if not Path(spec).expanduser().is_file():
        return rows.rows
    chosen = [row for row in rows.rows if row.get("split") == split]
    if not chosen:
        raise DataError(f"{spec}: no row has split {split!r} in its column 'split'. Add the column, or give a folder "
                        "that holds one file per split")
    return chosen


def convert(source: str, spec: str, folder: Path, splits: tuple[str, ...] = ("train", "test")) -> dict[str, int]:
    """Write ``folder/<split>.parquet`` in our schema; return the number of rows of each split.

    Args:
        source: a name in ``SOURCES``.
        spec: the raw data: a file, a folder or a hub id, as for :func:`load_rows`.
    """
    to_row = SOURCES.get(source)
    tables = {split: [to_row(row, split, i) for i, row in enumerate(raw_rows(spec, split))] for split in splits}
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return {split: len(rows) for split, rows in tables.items()}


def command(source: str, description: str, spec: str) -> None:
    """Convert the source by the words of the command line, of which ``spec`` is the default of the raw data."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dataset_path", default=spec, help="raw file, folder or hub id")
    parser.add_argument("--local_save_dir", type=Path, default=Path("~/data", source),
                        help="where the parquet files go")
    args = parser.parse_args()
    folder = args.local_save_dir.expanduser()
    try:
        counts = convert(source, args.local_dataset_path, folder)
    except DataError as error:
        parser.error(str(error))
    for split, count in counts.items():
        get_logger().info("%s: %d rows", folder / f"{split}.parquet", count)


def _check_columns(row: Row, names: tuple[str, ...], split: str, index: int) -> None:
    missing = [name for name in names if not row.get(name)]
    if missing:
        raise DataError(f"row {index + 1} of split {split!r} has no {' and no '.join(missing)} (it has "
                        f"{', '.join(row)}). Name the raw data of the source, or remove the row")


INSTRUCTION = ("Reason step by step inside <think> and </think> tags, then give the final answer inside \\boxed{}, "
               "for example <think>6 * 7 = 42.</think>\\boxed{42}")


def _problem(source: str, question: str, answer: str, about: Row, media: Row | None = None, **more: Any) -> Row:
    """Write a problem of mathematics in our schema; ``about`` begins ``extra_info``, and ``more`` ends it."""
    prompt = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]
    info = about | {"reference": answer, "answer": answer, "question": question} | more
    return {"data_source": source, "prompt": prompt, **(media or {}), "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer}, "extra_info": info}  # yapf: disable


# -- GSM8K ------------------------------------------------------------------------------------------------------------
_FINAL = re.compile(r"####\s*(-?[\d.,]+)")


def final_answer(answer: str) -> str:
    """Return the number after ``####``, without thousands separators.

    Raises:
        DataError: there is no such number.
    """
    found = _FINAL.search(answer)
    if found is None:
        raise DataError(f"the answer does not end with '#### number': {answer[-80:]!r}")
    return found.group(1).replace(",", "").rstrip(".")


@SOURCES.register("gsm8k", "openai/gsm8k")
def gsm8k(row: Row, split: str, index: int) -> Row:
    """Convert one word problem (Cobbe et al. 2021, arXiv:2110.14168) whose ``answer`` ends with ``#### 42``.

    System instruction and question become the prompt, the final number the reference.
    """
    _check_columns(row, ("question", "answer"), split, index)
    solution = final_answer(row["answer"])
    about = {"split": split, "index": index, "label": "gsm8k_rule"}
    return _problem("openai/gsm8k", row["question"], solution, about, full_solution=row["answer"])


# -- Geometry3K -------------------------------------------------------------------------------------------------------
@SOURCES.register("geo3k", "hiyouga/geometry3k")
def geo3k(row: Row, split: str, index: int) -> Row:
    """Convert one problem (Lu et al. 2021, arXiv:2105.04165) with its figures.

    ``problem`` has an ``<image>`` for each of ``images``; ``answer`` is a number or an expression.
    """
    _check_columns(row, ("problem", "answer", "images"), split, index)
    about = {"split": split, "index": index, "label": "geo3k_rule"}
    return _problem("hiyouga/geometry3k", row["problem"], str(row["answer"]), about, {"images": row["images"]})


# -- MATH -------------------------------------------------------------------------------------------------------------
@SOURCES.register("math", "DigitalLearningGmbH/MATH-lighteval")
def math(row: Row, split: str, index: int) -> Row:
    r"""Convert one problem (Hendrycks et al. 2021, arXiv:2103.03874) whose ``solution`` ends with ``\boxed{answer}``.

    ``level`` and ``type`` become columns of ``extra_info``, where the row has them.
    """
    _check_columns(row, ("problem", "solution"), split, index)
    answer = extract_answer(row["solution"])
    if not answer:
        raise DataError(f"row {index + 1} of split {split!r}: the solution has no \\boxed answer: "
                        f"{row['solution'][-80:]!r}")
    about = {"split": split, "index": index, "label": "math_rule"}
    return _problem("DigitalLearningGmbH/MATH-lighteval", row["problem"], answer, about,
                    full_solution=row["solution"], level=row.get("level"), type=row.get("type"))  # yapf: disable
