"""Folders of data files: hidden files, copies, several formats, and files that are named after two splits."""
import json
import re

import pytest

from lightrft.datasets.rows import DataError, load_rows
from lightrft.tests.support import field


def write(folder, *names):
    """Write a row into each file; its prompt is the name."""
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        text = f"prompt\n{name}\n" if name.endswith("csv") else f'{{"prompt": "{name}"}}\n'
        file.write_text(text, encoding="utf-8")


def prompts(folder, split="train"):
    return [row["prompt"] for row in load_rows(str(folder), split).rows]


def test_hidden_files_and_folders_are_left_out(tmp_path):
    folder = field.write_folder(tmp_path / "hidden" / ".cache" / "data")  # hidden above the folder that is named
    write(folder, "._train.jsonl", "__MACOSX/train.jsonl", "train/.a.jsonl", "train/~$b.csv", "_temporary/train.jsonl",
          ".git/train/c.json")
    assert prompts(folder) == ["new 0", "new 1", "new 2"]
    write(tmp_path / "only", "train/._a.jsonl")
    with pytest.raises(DataError, match="no file of split 'train' .it has no data file at all"):
        load_rows(str(tmp_path / "only"))


@pytest.mark.parametrize("second", ["train.csv", "train-00000-of-00001.json", "train/a.csv"])
def test_several_formats_may_be_the_same_rows(tmp_path, second):
    write(tmp_path, "train.jsonl", second, "test.csv")
    with pytest.raises(DataError, match=f"several formats .*{re.escape(second)}.*Name the files that you want"):
        load_rows(str(tmp_path))
    assert prompts(tmp_path, "test") == ["test.csv"]


def test_a_copy_of_a_file_is_refused(tmp_path):
    write(tmp_path, "train.jsonl", "train_other.jsonl", "old/train.jsonl")
    assert len(prompts(tmp_path)) == 3
    (tmp_path / "old" / "train.jsonl").write_bytes((tmp_path / "train.jsonl").read_bytes())
    with pytest.raises(DataError, match="old/train.jsonl and train.jsonl are the same bytes.*Remove one"):
        load_rows(str(tmp_path))


def rows(*numbers):
    return [{"prompt": f"{number}+1?", "answer": str(number + 1), "id": number} for number in numbers]


def jsonl(*numbers):
    return "".join(json.dumps(row) + "\n" for row in rows(*numbers))


def csv(*columns):
    lines = [columns, *([str(row[name]) for name in columns] for row in rows(1, 2, 3))]
    return "".join(",".join(line) + "\n" for line in lines)


WHOLE = {"train.jsonl": jsonl(1, 2, 3)}


@pytest.mark.parametrize("files", [
    WHOLE | {"train_copy.jsonl": jsonl(1, 2, 3).replace("\n", "\r\n")},
    WHOLE | {"old/train.jsonl": jsonl(3, 1, 2) + "\n"},
    WHOLE | {"train_small.jsonl": jsonl(2).replace("}", ', "note": null}')},
    WHOLE | {"train-00000-of-00002.jsonl": jsonl(1, 2), "train-00001-of-00002.jsonl": jsonl(3)},
    {"train.csv": csv("id", "prompt", "answer"), "train_2.csv": csv("prompt", "answer", "id")},
], ids=["line ends", "order of rows", "some rows", "shards", "order of columns"])  # yapf: disable
def test_the_same_rows_in_other_bytes_are_refused(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    first, second, *_ = (re.escape(name) for name in files)
    with pytest.raises(DataError, match=f"({first} and {second}|{second} and {first}) have the same rows.*Remove one"):
        load_rows(str(tmp_path))
    (tmp_path / [*files][1]).write_text(files[[*files][1]].replace("+1?", "+1=?"), encoding="utf-8")
    assert {"1+1?", "2+1=?"} <= {*prompts(tmp_path)}, "other rows"


def test_shards_and_empty_files_are_no_copies(tmp_path):
    (tmp_path / "train-00000-of-00002.csv").write_text("prompt,answer\n1+1?,2\n", encoding="utf-8")
    (tmp_path / "train-00001-of-00002.csv").write_text("prompt,answer\n1+1?,2\n1+2?,3\n", encoding="utf-8")
    (tmp_path / "train_none.csv").write_text("prompt,answer\n", encoding="utf-8")
    assert len(prompts(tmp_path)) == 3


def test_a_configuration_of_a_clone_has_to_be_named(tmp_path):
    clone, parts = tmp_path / "gsm8k", tmp_path / "parts"
    write(clone, "main/train-00000-of-00001.jsonl", "socratic/train-00000-of-00001.jsonl", "main/test.jsonl")
    with pytest.raises(DataError, match=r"several folders have the split 'train': main, socratic.*gsm8k@main$"):
        load_rows(str(clone))
    assert prompts(f"{clone}@socratic") == ["socratic/train-00000-of-00001.jsonl"]
    assert prompts(clone, "test") == ["main/test.jsonl"]
    write(parts, "train/a/1.jsonl", "train/b/1.jsonl")
    assert len(prompts(parts)) == 2, "folders of one split"


def test_packed_files_are_not_passed_over(tmp_path):
    write(tmp_path, "train.jsonl.gz", "test.jsonl")
    with pytest.raises(DataError, match="train.jsonl.gz: unknown kind of file '.gz'.*Unpack it"):
        load_rows(str(tmp_path))
    write(tmp_path, "train.jsonl")
    with pytest.raises(DataError, match="several formats .train.jsonl and train.jsonl.gz.*"):
        load_rows(str(tmp_path))
    assert prompts(tmp_path, "test") == ["test.jsonl"]


def test_shards_are_whole_and_of_one_writing(tmp_path):
    write(tmp_path, "train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "more/train-00000-of-00001.jsonl")
    assert len(prompts(tmp_path)) == 3, "shards of two folders"
    write(tmp_path, "train-00000-of-00001.jsonl")
    with pytest.raises(DataError, match="train-00000-of-00001.jsonl and train-00000-of-00002.jsonl count their shards"):
        load_rows(str(tmp_path))
    (tmp_path / "train-00000-of-00001.jsonl").unlink()
    (tmp_path / "train-00001-of-00002.jsonl").unlink()
    with pytest.raises(DataError, match="has 1 of the 2 shards of train-00000-of-00002.jsonl.*Download the others"):
        load_rows(str(tmp_path))
    assert len(load_rows(str(tmp_path / "train-00000-of-00002.jsonl")).rows) == 1, "as an entry of its own"


@pytest.mark.parametrize("name,split", [("train/test.jsonl", "train"), ("train/test.jsonl", "test"),
                                        ("train/dev-0.jsonl", "train"), ("test/val/a.jsonl", "test"),
                                        ("train_eval.jsonl", "train"), ("test_train.jsonl", "test")])
def test_a_file_that_is_named_after_two_splits_is_refused(tmp_path, name, split):
    write(tmp_path, "train/a.jsonl", "test/b.jsonl", name)
    with pytest.raises(DataError, match=f"{name} is named after two splits, '.*' and '.*Rename or move it"):
        load_rows(str(tmp_path), split)


def test_names_that_say_one_split_twice_are_read(tmp_path):
    write(tmp_path, "train/train-0.jsonl", "train/training_a.jsonl", "eval/test.jsonl", "eval/dev/b.jsonl")
    assert len(prompts(tmp_path)) == 2 and len(prompts(tmp_path, "eval")) == 2


def test_saved_data_sets_in_folders_of_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"prompt": "saved"}]).save_to_disk(tmp_path / "train")
    write(tmp_path, "test.jsonl")
    assert prompts(tmp_path) == ["saved"] and prompts(tmp_path, "test") == ["test.jsonl"]
    write(tmp_path, "train.jsonl")
    with pytest.raises(DataError, match="is a saved data set, and has the file train.jsonl beside it.*Move one"):
        load_rows(str(tmp_path))
