"""Converts raw files of a registered source to ``train.parquet`` and ``test.parquet``."""
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from lightrft.datasets.loading import DataError, Row, load_rows
from lightrft.datasets.sources import SOURCES


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
