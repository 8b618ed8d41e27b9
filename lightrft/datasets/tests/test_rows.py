import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightrft.datasets.rows import DataError, load_rows

ROWS = [{"prompt": f"question {i}", "answer": str(i)} for i in range(5)]


def as_csv(rows):
    return "prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in rows)


def save(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    else:
        text = {".json": json.dumps(rows), ".csv": as_csv(rows), ".jsonl": "\n".join(map(json.dumps,
                                                                                         rows))}[path.suffix]
        path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.json", "a.jsonl", "a.csv", "a.arrow"])
def test_every_file_format_gives_the_same_rows(tmp_path, name):
    assert load_rows(save(tmp_path / name, ROWS)).rows == ROWS


def test_arrow_streams_json_of_columns_and_lines_called_json(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(tmp_path / "s.arrow", table.schema) as file:
        file.write_table(table)
    (tmp_path / "data.json").write_text(json.dumps({"data": ROWS}))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, ROWS)))
    for name in ("s.arrow", "data.json", "lines.json"):
        assert load_rows(str(tmp_path / name)).rows == ROWS


def test_csv_keeps_leading_zeros(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\nx,007\n")
    assert load_rows(str(tmp_path / "a.csv")).rows[0]["answer"] == "007"


def test_folder_of_splits_and_data_dir(tmp_path):
    (tmp_path / "main").mkdir()
    save(tmp_path / "main" / "train-00000-of-00002.parquet", ROWS[:2])
    save(tmp_path / "main" / "train-00001-of-00002.parquet", ROWS[2:])
    save(tmp_path / "main" / "test.jsonl", ROWS[:1])
    rows = load_rows(f"{tmp_path}@main", "train")
    assert rows.rows == ROWS and rows.where(2).endswith("00001-of-00002.parquet, row 1")
    assert len(load_rows(str(tmp_path), "test")) == 1
    with pytest.raises(DataError, match="no file of split 'dev'.*test.jsonl.*--prompt_split"):
        load_rows(str(tmp_path), "dev")


def test_saved_to_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=one, test=one.select([0])).save_to_disk(tmp_path / "both")
    assert load_rows(str(tmp_path / "one")).rows == ROWS
    assert len(load_rows(str(tmp_path / "both"), "test")) == 1
    with pytest.raises(DataError, match="no split 'dev'; it has train, test"):
        load_rows(str(tmp_path / "both"), "dev")


def test_hub_id_without_a_network_is_a_clear_error():
    code = "from lightrft.datasets.rows import load_rows; load_rows('nobody/no-such-data')"
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert out.returncode != 0
    assert "DataError: nobody/no-such-data: no such file or folder, and it cannot be had from the hub" in out.stderr


@pytest.mark.parametrize("name", ["/nowhere/train.parquet", "nowhere.jsonl", "no/such/folder"])
def test_missing_file(name):
    with pytest.raises(DataError, match="no such file or folder. Check the path"):
        load_rows(name)


@pytest.mark.parametrize("name", ["a.parquet", "a.json", "a.jsonl", "a.csv", "a.arrow"])
def test_empty_file(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=f"{name}: the file is empty. Write the data again"):
        load_rows(str(tmp_path / name))


def test_file_without_rows(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\n")
    with pytest.raises(DataError, match="a.csv: holds no rows"):
        load_rows(str(tmp_path / "a.csv"))


@pytest.mark.parametrize("name", ["a.parquet", "a.json", "a.jsonl", "a.arrow"])
def test_truncated_file(tmp_path, name):
    path = tmp_path / name
    save(path, ROWS * 200 if path.suffix == ".arrow" else ROWS)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(DataError, match=f"(?s){name}.*cut off: copy or write it again"):
        load_rows(str(path))


def test_bad_line_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\nnot json\n{"prompt": "y"}\n')
    with pytest.raises(DataError, match="a.jsonl, line 2: not valid JSON"):
        load_rows(str(tmp_path / "a.jsonl"))
    (tmp_path / "b.jsonl").write_text('{"prompt": "x"}\n[1, 2]\n')
    with pytest.raises(DataError, match="b.jsonl, line 2: a row must be an object"):
        load_rows(str(tmp_path / "b.jsonl"))
    (tmp_path / "c.csv").write_text("prompt,answer\nx,1\ny,1,2\n")
    with pytest.raises(DataError, match="c.csv, line 3: more fields than the header"):
        load_rows(str(tmp_path / "c.csv"))


def test_not_utf8(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "x"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(DataError, match="a.jsonl, line 2: not UTF-8 .*0xe9.*iconv"):
        load_rows(str(tmp_path / "a.jsonl"))


def test_parquet_text_that_is_not_utf8(tmp_path):
    column = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\4\0\0\0"), pa.py_buffer(b"caf\xe9")])
    pq.write_table(pa.table({"prompt": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="a.parquet: a text column is not UTF-8"):
        load_rows(str(tmp_path / "a.parquet"))


def test_mixed_types(write):
    rows = [{"prompt": "x", "n": 1}, {"prompt": "y", "n": 1.5}, {"prompt": [{"role": "user", "content": "z"}]}]
    with pytest.raises(DataError, match="row 3: mixed schema: column 'prompt' holds list here, text in .* row 1"):
        load_rows(write(rows))


@pytest.mark.parametrize("column", ["id", "uid"])
def test_duplicate_ids(write, column):
    with pytest.raises(DataError, match=f"row 3: duplicate id: {column} '7' is also in .*row 1. Remove"):
        load_rows(write([{"prompt": "x", column: 7}, {"prompt": "y", column: 8}, {"prompt": "z", column: 7}]))


def test_duplicate_verl_index_within_one_file_only(tmp_path, write):
    row = {"data_source": "s", "prompt": "x", "extra_info": {"split": "train", "index": 3}}
    with pytest.raises(DataError, match="row 2: duplicate id: extra_info.index"):
        load_rows(write([row, row]))
    for name in ("train-0.jsonl", "train-1.jsonl"):
        write([row], f"folder/{name}")
    assert len(load_rows(str(tmp_path / "folder"))) == 2


def test_unknown_suffix(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="unknown kind of file '.txt'; known: .arrow"):
        load_rows(str(tmp_path / "a.txt"))
