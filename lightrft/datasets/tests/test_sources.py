import json

import pyarrow.parquet as pq
import pytest

from lightrft.config.schema import DataConfig
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.datasets.rows import DataError
from lightrft.datasets.sources import SOURCES, convert, final_answer

RAW = {"question": "How many?", "answer": "6*7 = <<6*7=42>>42\n#### 1,042"}


def test_final_answer():
    assert [final_answer(f"x\n#### {text}")
            for text in ("42", "1,042", "-3", "2.5", "70.")] == ["42", "1042", "-3", "2.5", "70"]
    with pytest.raises(DataError, match="does not end with '#### number'"):
        final_answer("42")


def test_gsm8k_row():
    row = SOURCES.get("gsm8k")(RAW, "train", 3)
    assert [turn["role"] for turn in row["prompt"]] == ["system", "user"]
    assert row["data_source"] == "openai/gsm8k" and row["reward_model"]["ground_truth"] == "1042"
    assert row["extra_info"]["label"] == "gsm8k_rule" and row["extra_info"]["full_solution"] == RAW["answer"]
    with pytest.raises(DataError, match="row 4 of split 'train' has no question"):
        SOURCES.get("gsm8k")({"answer": "#### 1"}, "train", 3)
    with pytest.raises(ValueError, match="unknown data source 'gsm9k' .did you mean gsm8k"):
        SOURCES.get("gsm9k")


def test_geo3k_row():
    raw = {"images": [{"bytes": b"png", "path": None}], "problem": "<image>Find x.", "answer": "2 \\sqrt { 221 }"}
    row = SOURCES.get("hiyouga/geometry3k")(raw, "test", 1)
    assert row["prompt"][1] == {"role": "user", "content": "<image>Find x."} and row["images"] == raw["images"]
    assert row["reward_model"]["ground_truth"] == row["extra_info"]["reference"] == "2 \\sqrt { 221 }"
    assert row["extra_info"]["label"] == "geo3k_rule" and row["prompt"][0]["role"] == "system"
    with pytest.raises(DataError, match="row 2 of split 'test' has no answer and no images"):
        SOURCES.get("geo3k")({"problem": "Find x."}, "test", 1)


def test_math_row():
    raw = {
        "problem": "Find $x$.", "solution": r"$\boxed{a}$, so \fbox{$\frac{1}{2}$}", "level": "Level 5", "type":
        "Algebra"
    }
    row = SOURCES.get("DigitalLearningGmbH/MATH-lighteval")(raw, "train", 2)
    assert row["reward_model"]["ground_truth"] == row["extra_info"]["reference"] == r"$\frac{1}{2}$"
    assert (row["extra_info"]["level"], row["extra_info"]["type"]) == ("Level 5", "Algebra")
    for solution in ("So it is 5.", r"\boxed{5"):
        with pytest.raises(DataError, match=r"row 3 of split 'train': the solution has no \\boxed answer: "):
            SOURCES.get("math")(raw | {"solution": solution}, "train", 2)
    with pytest.raises(DataError, match="row 3 of split 'train' has no solution"):
        SOURCES.get("math")({"problem": "Find $x$."}, "train", 2)


@pytest.mark.parametrize("layout", ["folder", "file"])
def test_convert_and_read(tmp_path, tokenizer, layout):
    if layout == "folder":
        for split in ("train", "test"):
            (tmp_path / f"{split}.jsonl").write_text(json.dumps(RAW))
        spec = str(tmp_path)
    else:
        (tmp_path /
         "raw.jsonl").write_text("\n".join(json.dumps(RAW | {"split": split}) for split in ("train", "test")))
        spec = str(tmp_path / "raw.jsonl")
    assert convert("gsm8k", spec, tmp_path / "out") == {"train": 1, "test": 1}
    assert pq.read_table(tmp_path / "out" / "test.parquet").num_rows == 1
    prompt = PromptsDataset(DataConfig(prompt_data=[str(tmp_path / "out")]), tokenizer, 500)[0]
    assert prompt.reference == "1042" and prompt.label == "gsm8k_rule" and "How many?" in prompt.text


def test_single_file_without_split_column(tmp_path):
    (tmp_path / "raw.jsonl").write_text(json.dumps(RAW))
    with pytest.raises(DataError, match="no row has split 'train'"):
        convert("gsm8k", str(tmp_path / "raw.jsonl"), tmp_path / "out")
