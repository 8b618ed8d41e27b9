import json
import os
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightrft.datasets.prompt_rows import to_message
from lightrft.datasets.rows import DataError, hold_rows, load_rows
from lightrft.tests.support.warm import warm_python

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


def test_other_marks_between_fields(tmp_path):
    """Those of spreadsheets whose decimal mark is a comma."""
    for name, mark in (("a.csv", ";"), ("b.csv", "\t"), ("c.tsv", "\t")):
        (tmp_path / name).write_text(f"prompt{mark}answer\nx, y{mark}3,5\n")
        assert load_rows(str(tmp_path / name)).rows == [{"prompt": "x, y", "answer": "3,5"}]
    (tmp_path / "d.csv").write_text("prompt;answer\nx;1;2\n")
    with pytest.raises(DataError, match="line 2: more fields than the header, which has 2. Quote fields that hold ';'"):
        load_rows(str(tmp_path / "d.csv"))


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


def test_hub_id_without_a_network_is_a_clear_error(tmp_path):
    pytest.importorskip("datasets")
    program = tmp_path / "program.py"
    program.write_text("from lightrft.datasets.rows import load_rows; load_rows('nobody/no-such-data')")
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    out = subprocess.run([warm_python(), program], env=env, capture_output=True, text=True, timeout=60)
    assert out.returncode != 0
    assert "nobody/no-such-data: no such file or folder, and it cannot be downloaded from the hub" in out.stderr


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


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_an_encoding_that_marks_itself_is_named(tmp_path, encoding):
    for name in ("a.jsonl", "b.csv"):
        (tmp_path / name).write_text('{"prompt": "é"}\n', encoding=encoding)
        with pytest.raises(DataError, match=f"{name}: {encoding.upper()}, not UTF-8.*iconv -f {encoding} -t utf-8"):
            load_rows(str(tmp_path / name))


@pytest.mark.parametrize("row", [{"prompt": "a \ud800"}, {"prompt": [{"role": "user", "content": ["\udfff"]}]},
                                 {"prompt": None, "tools": {"\udc80": 1}}])  # yapf: disable
def test_half_of_a_surrogate_pair(tmp_path, row):
    """JSON may hold it, and no tokenizer reads it; a whole pair is a character."""
    file, half = tmp_path / "a.jsonl", json.dumps(row)
    whole = re.sub(r"\\u....", r"\\ud83d\\ude00", half)
    file.write_text(whole)
    assert load_rows(str(file)).rows == [json.loads(whole)]
    file.write_text(f"{whole}\n{half}")
    with pytest.raises(DataError, match=f"a.jsonl, row 2: the column '{[*row][-1]}' has .*, half of a surrogate pair"):
        load_rows(str(file))


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


def test_responses_of_a_rollout_share_the_uid_of_their_prompt(write):
    rows = [{"prompt": "x", "uid": "7", "group_id": 0, "step": 1, "index": index} for index in (0, 1)]
    assert len(load_rows(write(rows))) == 2
    with pytest.raises(DataError, match="row 3: duplicate id: uid and index .*'7', 1, 1.* is also in .*row 2"):
        load_rows(write([*rows, rows[1]]))


def test_duplicate_verl_index_within_one_file_only(tmp_path, write):
    row = {"data_source": "s", "prompt": "x", "extra_info": {"split": "train", "index": 3}}
    with pytest.raises(DataError, match="row 2: duplicate id: extra_info.index"):
        load_rows(write([row, row]))
    for name in ("train-0.jsonl", "train-1.jsonl"):
        write([row | {"prompt": name}], f"folder/{name}")
    assert len(load_rows(str(tmp_path / "folder"))) == 2


def test_unknown_suffix(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="unknown kind of file '.txt'; known: .arrow"):
        load_rows(str(tmp_path / "a.txt"))


IN_MEMORY = """
import numpy as np
from PIL import Image
flat = Image.new("P", (8, 8), 1)
shown = [flat.copy() for _ in range(3)]
shown[1].putpalette([9, 9, 9] * 4)
shown[2].info["transparency"] = 1
turned = Image.new("RGB", (4, 4))
turned.info["exif"] = b"Exif..6"
sound = np.zeros(5000, np.float32)
loud = sound.copy()
loud[2500] = 1
nested = [np.array([[sound], [None]], object), np.array([[loud], [None]], object)]
VALUES = [
    sound, loud, sound.reshape(50, 100).astype(np.float64), sound.reshape(50, 100), {"array": sound}, {"array": loud},
    [sound, loud],
    [loud, sound], *nested, *shown, turned, Image.new("RGB", (4, 4)), Image.new("L", (4, 4)), Image.new("RGB", (8, 2)),
    b"one", b"two", "one", [b"one"], [1.0, 2.0], [1.0, 2.5], {"a": 1}, 1, True, None
]
"""


def names_in_memory():
    values = {}
    exec(IN_MEMORY, values)
    return [hold_rows([{"prompt": "?", "image": value}]) for value in values["VALUES"]]


def test_rows_in_memory_have_one_name_for_equal_content_and_another_for_other():
    """Also in another process, which resumes: arrays whose middle differs, pictures that are shown in other ways."""
    names = names_in_memory()
    assert len({*names}) == len(names) and names == names_in_memory()
    program = "from lightrft.datasets.tests.test_rows import names_in_memory; print(*names_in_memory())"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.split() == names


@pytest.mark.parametrize("role,ours", [("human", "user"), ("gpt", "assistant")])
def test_a_role_of_another_form_of_chats_is_refused(role, ours):
    with pytest.raises(DataError, match=f"a.jsonl, row 1: a chat message has the role '{role}'.*Write '{ours}'"):
        to_message({"role": role, "content": "1 + 1?"}, "a.jsonl, row 1")
    assert to_message({"from": role, "value": "1 + 1?"}, "")["role"] == ours
