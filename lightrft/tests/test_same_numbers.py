"""The script that compares the numbers of two commits sees a difference wherever one is."""
import json
import math

import pytest
import torch
from safetensors.torch import save_file

from lightrft.tests.support.launch import ROOT


@pytest.fixture(name="script")
def fixture_script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import same_numbers
    return same_numbers


def write(folder, loss=1.0, weight=0.5, answer="12", **more):
    """The folder of a run: an evaluation and two steps."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "hf").mkdir()
    lines = [{"eval/pass": 0.5, "time/all": loss}, {"loss": 1.0, **more}, {"loss": loss}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "rollouts" / "step_10.jsonl").write_text(json.dumps({"response": answer, "advantages": [1.0, 2.0]}))
    save_file({"weight": torch.tensor([weight])}, folder / "hf" / "model.safetensors")
    return folder


EQUAL = {"step 1": 0.0, "all steps": 0.0, "weights": 0.0, "rollouts": 0.0}


@pytest.mark.parametrize("change, expected", [
    ({}, {}),
    ({"loss": 1.5}, {"all steps": 0.5}),
    ({"weight": 1.0}, {"weights": 0.5}),
    ({"answer": "13"}, {"rollouts": math.inf}),
    ({"kl": 1.0}, {}),
])  # yapf: disable
def test_a_difference_is_found_where_it_is(script, tmp_path, change, expected):
    found = script.compare(write(tmp_path / "old"), write(tmp_path / "new", **change))
    assert found == EQUAL | expected
    assert script.fits(found, script.SCENARIOS["ppo"], None) == (not expected)
    assert script.fits(found, script.SCENARIOS["ppo"], 1e-5), "step 1 is equal"


def test_a_metric_that_is_gone_and_rounding_in_the_first_step(script, tmp_path):
    old = write(tmp_path / "old", kl=4.0)
    assert script.compare(old, write(tmp_path / "gone"))["step 1"] == math.inf
    rounded = script.compare(old, write(tmp_path / "rounded", kl=4.00002))
    assert rounded["step 1"] == pytest.approx(5e-6) and not script.fits(rounded, script.SCENARIOS["ppo"], 1e-6)
    assert script.fits(rounded, script.SCENARIOS["ppo"], 1e-5)


def test_a_pair_is_right_and_wrong_and_options_name_the_folder_of_the_data(script):
    row = {"prompt": [{"role": "user", "content": "What is 3+4?"}], "reward_model": {"ground_truth": "7"}}
    assert script.pair_of(row) == {"prompt": row["prompt"], "chosen": "\\boxed{7}", "rejected": "\\boxed{8}"}
    words = script.words_of(script.SCENARIOS["ranks_dpo"], "home", "save")
    assert words[2:6] == ["--standalone", "--nproc-per-node=2", "-m", "lightrft.cli.train_dpo"]
    assert words[words.index("--train_data") + 1] == "home/data/pairs.jsonl"
    assert words[-2:] == ["--save_path", "save"]
