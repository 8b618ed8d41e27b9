"""The data that the examples ship or make."""
import importlib
import json
import random
import re
import runpy
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrft.config.schema import DataConfig
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.tests.support.launch import run_script

ROOT = Path(__file__).parents[2]
QUICKSTART, GSM8K = ROOT / "examples" / "quickstart", ROOT / "examples" / "gsm8k_geo3k"
PREPROCESS = ROOT / "examples" / "data_preprocess"  # by the names that LightRFT's documents print


def load(name, folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    run_script(QUICKSTART / "prepare.py", "--out", folder / "a", "--train_rows", 300, "--sft_rows", 300)
    return folder / "a"


@pytest.fixture
def task(monkeypatch):
    return load("task", QUICKSTART, monkeypatch)


@pytest.fixture
def reward(monkeypatch):
    return load("reward", QUICKSTART, monkeypatch)


def test_base_model_loads_through_the_auto_classes(prepared):
    tokenizer = AutoTokenizer.from_pretrained(prepared / "base")
    model = AutoModelForCausalLM.from_pretrained(prepared / "base")
    assert len(tokenizer) == model.config.vocab_size == 64 and sum(p.numel() for p in model.parameters()) == 135_872
    text = "What is 347+286?\n<think>7+6+0=13,4+8+1=13,3+2+1=06</think>\\boxed{633}"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids
    assert all(len(tokenizer(word).input_ids) == 1 for word in ("<think>", "</think>", "\\boxed{", "\n", " "))
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id


def test_quickstart_data_is_read(prepared, reward):
    tokenizer = AutoTokenizer.from_pretrained(prepared / "base")
    cfg = DataConfig(prompt_data=[str(prepared / "data" / "train.parquet")], max_eval_samples=0,
                     eval_data=[str(prepared / "data" / "test.parquet")])  # yapf: disable
    train, held_out = PromptsDataset(cfg, tokenizer, 32), PromptsDataset(cfg, tokenizer, 32, "eval")
    assert len(train) == 300 and len(held_out) == 1000 and train.dropped == 0
    assert not {p.text for p in train} & {p.text for p in held_out}
    assert all(len(p.token_ids) == 17 and p.label == "quickstart_rule" for p in train)
    problems = [re.findall(r"\d+", p.text) for p in held_out]
    assert [p.reference for p in held_out] == [str(int(a) + int(b)) for a, b in problems]
    sft = SFTDataset(DataConfig(prompt_data=[str(prepared / "data" / "sft.parquet")]), tokenizer, 64)
    said = [tokenizer.decode([i for i, keep in zip(e.token_ids, e.loss_mask) if keep]) for e in sft]
    assert len(sft) == 300 and all(text.startswith("<think>") and text.endswith("}<eos>") for text in said)
    assert 0.3 < sum(reward.carry_accuracy(text) == 1 for text in said) / 300 < 0.7


@pytest.mark.slow
def test_seed_decides_everything(prepared, tmp_path, monkeypatch):
    """In processes whose hashes differ, too: in this one, and in forks of a server."""
    words = ["--train_rows", "300", "--sft_rows", "300", "--seed"]
    monkeypatch.syspath_prepend(str(QUICKSTART))
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--out", str(tmp_path / "42"), *words, "42"])
    runpy.run_path(str(QUICKSTART / "prepare.py"), run_name="__main__")
    run_script(QUICKSTART / "prepare.py", "--out", tmp_path / "7", *words, 7)
    for name in ("base/model.safetensors", "data/train.parquet", "data/test.parquet", "data/sft.parquet"):
        first = (prepared / name).read_bytes()
        assert (tmp_path / "42" / name).read_bytes() == first != (tmp_path / "7" / name).read_bytes()


def test_numbers_may_have_more_digits(tmp_path):
    run_script(QUICKSTART / "prepare.py", "--out", tmp_path, "--digits", 5, "--train_rows", 9, "--test_rows", 9,
               "--sft_rows", 9)
    rows = pq.read_table(tmp_path / "data" / "train.parquet").to_pylist()
    assert all(re.fullmatch(r"What is \d{5}\+\d{5}\?", row["prompt"][0]["content"]) for row in rows)


def test_the_example_of_the_task(task):
    assert task.solution((347, 286), random.Random(0)) == "<think>7+6+0=13,4+8+1=13,3+2+1=06</think>\\boxed{633}"
    assert task.solution((347, 286), random.Random(0), 1.0) == "<think>7+6+0=13,4+8+0=12,3+2+0=05</think>\\boxed{523}"


def test_careful_solutions_are_right_and_careless_ones_often_wrong(task, reward):
    rng = random.Random(0)
    problems = task.distinct_problems(2000, rng, held_out=True)
    shares = [sum(reward.exact_answer(task.solution(p, rng, careless), task.answer(p)) for p in problems) / 2000
              for careless in (0.0, task.CARELESS, 1.0)]  # yapf: disable
    assert shares[0] == 1.0 and 0.45 < shares[1] < 0.6 and 0.25 < shares[2] < 0.35
    assert all(reward.carry_accuracy(task.solution(p, rng)) == 1.0 for p in problems)


def test_held_out_is_a_tenth_and_symmetric(task):
    numbers = range(100, 1000, 7)
    flags = [task.is_held_out((a, b)) for a in numbers for b in numbers]
    assert 0.09 < sum(flags) / len(flags) < 0.11
    assert all(task.is_held_out((a, 500)) == task.is_held_out((500, a)) for a in numbers)


@pytest.mark.parametrize("said, score, carries", [
    ("<think>7+6+0=13,4+8+1=13,3+2+1=06</think>\\boxed{633}", 1.0, 1.0),
    ("<think>7+6+0=13,4+8+0=12,3+2+1=06</think>\\boxed{623}", 0.0, 0.5),
    ("\\boxed{633}", 1.0, 0.0),
    ("633", 0.0, 0.0),
])  # yapf: disable
def test_reward_file(reward, said, score, carries):
    assert reward.accuracy("lightrft/quickstart", said, "633", {}) == {"score": score, "carries": carries}


def test_every_equation_of_the_word_problems_is_right():
    rows = [json.loads(line) for line in (GSM8K / "data" / "raw_200.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 200 and len({row["question"] for row in rows}) == 200
    assert {row["split"] for row in rows} == {"train", "test"}
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    for row in rows:
        *steps, last = row["answer"].split("\n")
        for step in steps:
            left, sign, right, value, written = re.search(r"<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)", step).groups()
            assert f"{left} {sign} {right} = <<" in step and written == value, row
            holds = int(value) * int(right) == int(left) if sign == "/" else operations[sign](int(left),
                                                                                              int(right)) == int(value)
            assert holds, row
        assert last == f"#### {value}", row


def test_shipped_problems_come_from_their_script(monkeypatch):
    make_raw = load("make_raw", GSM8K / "data", monkeypatch)
    shipped = (GSM8K / "data" / "raw_200.jsonl").read_text(encoding="utf-8").splitlines()
    assert make_raw.rows() == [json.loads(line) for line in shipped] and len(make_raw.STORIES) == 25


def test_gsm8k_preprocess_script(tmp_path, prepared):
    """Under LightRFT's name for it."""
    raw = GSM8K / "data" / "raw_200.jsonl"
    run_script(PREPROCESS / "gsm8k_lightrft.py", "--local_dataset_path", raw, "--local_save_dir", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(prepared / "base")
    cfg = DataConfig(prompt_data=[str(tmp_path / "train.parquet")], eval_data=[str(tmp_path / "test.parquet")])
    train, held_out = PromptsDataset(cfg, tokenizer, 1000), PromptsDataset(cfg, tokenizer, 1000, "eval")
    assert len(train) == 150 and len(held_out) == 50
    assert train[0].label == "gsm8k_rule" and train[0].messages[0]["role"] == "system" and train[0].reference.isdigit()


def test_math_preprocess_script(tmp_path, prepared):
    """On a folder in the layout of the hub; the reference is the last box, with its braces."""
    row = {"problem": "Find $x$ if $2x=1$.", "level": "Level 1", "type": "Algebra",
           "solution": r"As $\boxed{2x}=1$, $x=\boxed{\frac{1}{2}}$."}  # yapf: disable
    (tmp_path / "raw" / "data").mkdir(parents=True)
    for split, count in (("train", 3), ("test", 2)):
        pq.write_table(pa.Table.from_pylist([row] * count),
                       tmp_path / "raw" / "data" / f"{split}-00000-of-00001.parquet")
    run_script(PREPROCESS / "math_lightrft.py", "--local_dataset_path", tmp_path / "raw", "--local_save_dir", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(prepared / "base")
    cfg = DataConfig(prompt_data=[str(tmp_path / "train.parquet")], eval_data=[str(tmp_path / "test.parquet")])
    train, held_out = PromptsDataset(cfg, tokenizer, 1000), PromptsDataset(cfg, tokenizer, 1000, "eval")
    assert (len(train), len(held_out)) == (3, 2) and train[0].messages[1]["content"] == row["problem"]
    assert (train[0].label, train[0].reference) == ("math_rule", r"\frac{1}{2}")
    assert held_out[1].columns["extra_info"]["level"] == "Level 1"
