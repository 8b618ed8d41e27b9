"""Evaluation suites by name: rows as published, the question that is asked, the answer that is right."""
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightrft.config.reward_schema import SUITE_LABEL
from lightrft.config.schema import DataConfig
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.datasets.rows import DataError
from lightrft.datasets.suites import BOXED, CHOICE, load_suite, SUITES
from lightrft.preflight.paths import suites
from lightrft.rewards.base import RewardInput
from lightrft.rewards.rules import choice_score, math_score
from lightrft.rewards.spec import RECIPES
from lightrft.tests.support import tiny
from lightrft.tests.support.launch import ROOT
from lightrft.tests.support.warm import warm_python

GPQA = {"Pre-Revision Question": "Which lepton?", "Question": "Which particle is a lepton?\n",
        "Correct Answer": " muon\n", "Incorrect Answer 1": "pion", "Incorrect Answer 2": "kaon",
        "Incorrect Answer 3": "gluon", "Explanation": "by definition", "Record ID": "rec1"}  # yapf: disable
# columns of the data sets on the hub; the problems are ours
ROWS = {
    "math500": {"problem": "What is $\\frac12+\\frac14$?", "solution": "...", "answer": "\\frac{3}{4}",
                "subject": "Algebra", "level": 1, "unique_id": "test/algebra/1.json"},
    "aime24": {"id": 60, "problem": "Find $5^2$.", "solution": "...", "answer": "025", "url": "", "year": "2024"},
    "aime25": {"problem_idx": 1, "problem": "Find $5^2$.", "answer": 25, "problem_type": ["Algebra"]},
    "gpqa": GPQA,
    "gsm8k": {"question": "Ann has 1,000 apples and buys 2. How many?", "answer": "1000+2=<<1000+2=1002>>\n#### 1,002"},
}  # yapf: disable
RIGHT = {"math500": "\\frac{3}{4}", "aime24": "25", "aime25": "25", "gsm8k": "1002"}


def write(folder: Path, name: str) -> Path:
    """The layout of the repository on the hub: parquet files by configuration and split, or csv for gpqa."""
    suite, row = SUITES[name], ROWS[name]
    if name == "gpqa":
        for config in ("gpqa_diamond", "gpqa_main"):
            with open(folder / f"{config}.csv", "w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, row)
                writer.writeheader()
                writer.writerows([row] if config == "gpqa_diamond" else [row, row | {"Question": "?"}])
    for config in (suite.config, "socratic") if suite.config == "main" else ("data", ):
        if name != "gpqa":
            (folder / config).mkdir()
            pq.write_table(pa.Table.from_pylist([row]), folder / config / f"{suite.split}-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("name", SUITES)
def test_a_clone_of_the_repository_is_read_and_scored(tmp_path, name):
    rows, records = load_suite(f"{name}={write(tmp_path, name)}", chat=True, instructed=True)
    assert len(rows) == 1 == len(records), "another configuration was read too"
    record = records[0]
    text = record.messages[0]["content"]
    assert text.endswith(f"\n\n{CHOICE if name == 'gpqa' else BOXED}") and record.data_source == name
    assert load_suite(f"{name}={tmp_path}", False, False)[1][0].text == text.rpartition("\n\n")[0]
    right = record.reference if name == "gpqa" else RIGHT[name]
    score = choice_score if name == "gpqa" else math_score
    given = [score(RewardInput(text, f"So \\boxed{{{answer}}}", reference=record.reference)).value
             for answer in (right, "7")]  # yapf: disable
    assert given == [1.0, 0.0]


def test_the_choices_are_shuffled_the_same_way_in_every_process(tmp_path):
    (tmp_path / "g.jsonl").write_text("".join(
        json.dumps(GPQA | {"Question": f"Which is a lepton, case {i}?"}) + "\n" for i in range(64)))
    records = load_suite(f"gpqa={tmp_path / 'g.jsonl'}", False, True)[1]
    assert all(f"{record.reference}) muon\n" in record.text for record in records)
    counts = [sum(record.reference == letter for record in records) for letter in "ABCD"]
    assert min(counts) >= 6, f"the right letters are not spread: {counts}"
    code = (f"from lightrft.datasets.suites import load_suite\n"
            f"print(''.join(r.reference for r in load_suite({f'gpqa={tmp_path}/g.jsonl'!r}, False, True)[1]))")
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True,
                           env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)})  # yapf: disable
    assert again.stdout.strip() == "".join(record.reference for record in records)


@pytest.mark.parametrize("response,value", [
    ("\\boxed{B}", 1), ("\\boxed{(B)}", 1), ("\\boxed{\\text{B}}", 1), ("\\boxed{b}", 1), ("\\boxed{B) kaon}", 1),
    ("The answer is (B).", 1), ("**Answer: B**", 1), ("<answer>B</answer>", 1), ("\\boxed{C} no, \\boxed{B}", 1),
    ("\\boxed{C}", 0), ("\\boxed{kaon}", 0), ("Boron", 0), ("answer is between A and B", 0), ("", 0)])  # yapf: disable
def test_letters(response, value):
    assert choice_score(RewardInput("", response, reference="B")).value == value
    assert choice_score(RewardInput("", response)).value is None


def test_every_suite_has_its_recipe():
    assert {f"{SUITE_LABEL}{name}" for name in SUITES} == {key for key in RECIPES if key.startswith(SUITE_LABEL)}


def test_rows_of_something_else_are_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "hello"}\n')
    for name in SUITES:
        with pytest.raises(DataError, match=f"--eval_suite {name}: .*row 1: not a row of {SUITES[name].hub}.*has text"):
            load_suite(f"{name}={tmp_path / 'x.jsonl'}", True, True)


def test_names_and_paths_are_checked_before_the_run(tmp_path):
    found = list(suites("eval_suite", ["math5000", f"gsm8k={tmp_path}/none", "aime24", f"aime24={tmp_path}"]))
    assert "did you mean math500?" in found[0] and "known: math500, aime24" in found[0]
    assert "no such file or folder" in found[1] and "gsm8k alone is read from the hub" in found[1]
    assert any("aime24 is named twice" in text for text in found)
    assert not list(suites("eval_suite", ["math500", f"gsm8k={tmp_path}"]))


def test_suites_join_the_held_out_prompts_whole(tmp_path):
    """Beside ``--eval_data``, under names of their own, without its limit; a suite is never cut by length."""
    tokenizer = tiny.tokenizer()
    write(tmp_path, "gsm8k")
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"prompt": str(i), "answer": "1"}) + "\n" for i in range(9)))
    cfg = DataConfig(eval_data=[str(tmp_path / "own.jsonl")], eval_suite=[f"gsm8k={tmp_path}"], max_eval_samples=2)
    prompts = list(PromptsDataset(cfg, tokenizer, 400, "eval"))
    assert [prompt.data_source for prompt in prompts] == ["", "", "gsm8k"] and prompts[2].uid == "gsm8k:0"
    cfg.eval_data = []
    assert len(PromptsDataset(cfg, tokenizer, 400, "eval")) == 1
    with pytest.raises(DataError, match="--prompt_max_len 8 .*Raise"):
        PromptsDataset(cfg, tokenizer, 8, "eval")


def test_the_hub_is_read_by_its_own_library(tmp_path, monkeypatch):
    """``datasets.load_dataset`` reads the configuration and the split from the repository, whose layout is on disk."""
    pytest.importorskip("datasets")
    repository = tmp_path / "openai" / "gsm8k"
    repository.mkdir(parents=True)
    write(repository, "gsm8k")
    (repository / "README.md").write_text("---\nconfigs:\n- config_name: main\n  data_files:\n  - split: test\n"
                                          "    path: main/test-*\n- config_name: socratic\n  data_files:\n"
                                          "  - split: test\n    path: socratic/test-*\n---\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows, records = load_suite("gsm8k", False, True)
    assert len(rows) == 1 and records[0].reference == "1002"


def test_without_a_network_the_remedy_is_named(tmp_path):
    pytest.importorskip("datasets")
    code = "from lightrft.datasets.suites import load_suite\nload_suite('gpqa', True, True)"
    (tmp_path / "program.py").write_text(code)
    done = subprocess.run([warm_python(), "program.py"], capture_output=True, text=True, timeout=100, cwd=tmp_path,
                          env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)})  # yapf: disable
    last = done.stderr.strip().splitlines()[-1]
    assert "--eval_suite gpqa: Idavidrein/gpqa: it cannot be downloaded from the hub" in last
    assert "hf download --repo-type dataset Idavidrein/gpqa" in last and "--eval_suite gpqa=gpqa" in last
