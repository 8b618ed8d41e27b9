"""Rows of numpy, pandas and torch are those that the same file would give."""
import datetime

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lightrft.datasets.prompt_rows import missing
from lightrft.datasets.rows import hold_rows, load_rows
from lightrft.tests.support import field

CHAT = [{"role": role, "content": [{"type": "text", "text": "1+1?"}] * 2} for role in ("user", "assistant")]
ROWS = [{**row, "margin": margin, "labels": [0, 1], "chats": [CHAT]}
        for row, margin in zip(field.rows("reference_object"), (0.5, None, 1.5))]  # yapf: disable


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


def test_a_table_as_records_is_its_file(file):
    assert load_rows(hold_rows(pd.read_parquet(file).to_dict("records"))).rows == load_rows(str(file)).rows


@pytest.mark.parametrize("kind", ["numpy", "torch", "pandas", "iterator"])
def test_a_formatted_data_set_is_its_file(file, kind):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_parquet(str(file), cache_dir=str(file.parent / "cache"))
    given = iter(rows) if kind == "iterator" else rows.with_format(kind)
    if kind == "pandas":
        given = (table.to_dict("records")[0] for table in given)
    expected = load_rows(str(file)).rows
    loaded = load_rows(hold_rows(given)).rows
    assert [row["reward_model"] for row in loaded] == [row["reward_model"] for row in expected]
    assert [row["labels"] for row in loaded] == [[0, 1]] * 3 and not missing(loaded[0]["prompt"])


def test_scalars_beside_those_of_python():
    day = datetime.datetime(2024, 1, 2)
    rows = [{"n": 1, "x": 0.5, "flag": True, "text": "a", "when": pd.Timestamp(day), "more": (1, 2), 3: "b"},
            {"n": np.int64(2), "x": np.float32(1.5), "flag": np.bool_(False), "text": np.str_("b"), "when": pd.NaT},
            {"n": pd.NA, "x": float("nan"), "flag": None, "when": np.datetime64("2024-01-02", "ns"),
             "more": np.array([1, 2])},
            {"n": torch.tensor(3), "more": pd.Series([4])}]  # yapf: disable
    first, second, third, fourth = load_rows(hold_rows(rows)).rows
    assert first == {"n": 1, "x": 0.5, "flag": True, "text": "a", "when": day, "more": [1, 2], "3": "b"}
    assert second == {"n": 2, "x": 1.5, "flag": False, "text": "b", "when": None}
    assert [type(value) for value in second.values()] == [int, float, bool, str, type(None)]
    assert third == {"n": None, "x": None, "flag": None, "when": day, "more": [1, 2]}
    assert fourth == {"n": 3, "more": [4]}


def test_arrays_of_media_stay_arrays():
    picture, sound = np.zeros((2, 3, 3), np.uint8), np.zeros(8, np.float32)
    row = {"images": [picture], "audio": {"array": sound, "sampling_rate": np.int32(8000)}}
    (loaded, ) = load_rows(hold_rows([row])).rows
    assert loaded["images"][0] is picture and loaded["audio"]["array"] is sound
    assert loaded["audio"]["sampling_rate"] == 8000 and not missing(picture)
