"""The difficulty filter: what it keeps, and what it refuses to guess."""
import json

import pytest

from lightrft.config.schema import DataConfig
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.datasets.rows import DataError
from lightrft.tests.support import tiny

RATES = [0.0, 0.5, 1.0, 0.25, 0.75, 0.5]


@pytest.fixture(name="build")
def build_fixture(tmp_path):

    def build(rows, split="train", **options):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        cfg = DataConfig(prompt_data=[str(path)], eval_data=[str(path)], difficulty_key="rate", **options)
        return PromptsDataset(cfg, tiny.tokenizer(), 64, split)

    return build


def rows(values=RATES):
    return [{"prompt": f"p{i}", "rate": value} for i, value in enumerate(values)]


@pytest.mark.parametrize("low,high", [(0.25, 0.75), (None, 0.5), (0.5, None), (0.25, 0.25)])
def test_rows_outside_are_left_out_and_counted(build, low, high, capsys):
    data = build(rows(), difficulty_min=low, difficulty_max=high)
    kept = [i for i, rate in enumerate(RATES) if (low is None or rate >= low) and (high is None or rate <= high)]
    assert [prompt.text for prompt in data] == [f"p{i}" for i in kept]
    assert [prompt.uid for prompt in data] == [f"0:{i}" for i in kept], "a row is called what it is called unfiltered"
    assert f"{len(RATES) - len(kept)} of {len(RATES)} rows" in capsys.readouterr().err
    assert len(build(rows(), "eval")) == len(RATES)


def test_the_limit_counts_what_is_left(build):
    assert [p.text for p in build(rows(), difficulty_min=0.5, max_samples=2)] == ["p1", "p2"]


@pytest.mark.parametrize("value", [0.5, 1, "0.5"])
def test_numbers_in_extra_info_and_as_text(build, value):
    assert len(build([{"prompt": "p", "extra_info": {"rate": value}}], difficulty_min=0.5)) == 1


@pytest.mark.parametrize("value,message", [(None, "the row has none"), ("", "the row has none"),
                                           ("hard", "'hard' is not a"), (True, "True is not a"), ([0.5], "is not a"),
                                           ("nan", "is not a")])
def test_a_row_without_a_number_stops_the_run(build, value, message):
    with pytest.raises(DataError, match=rf"rows.jsonl, row 1: --difficulty_key rate: .*{message}.*Complete or remove"):
        build(rows([value] * 2), difficulty_min=0.5)


def test_rows_keep_their_names_in_messages(build):
    with pytest.raises(DataError, match="rows.jsonl, row 3: "):
        build([*rows()[:2], {"prompt": [], "rate": 1}], difficulty_min=1.0)


def test_nothing_left(build):
    with pytest.raises(DataError, match=r"6 of 6 rows .*outside \[2, inf\].*largest 1.*--difficulty_min"):
        build(rows(), difficulty_min=2.0)
