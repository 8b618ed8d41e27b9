"""The quickstart with a hybrid model: a short run of its script, and what its page says of a whole one."""
import json
from pathlib import Path

import pytest

from lightrft.tests.test_examples import launch, lines

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "quickstart_hybrid" / "run_quickstart_hybrid.sh"
STORED = ROOT / "docs" / "data" / "quickstart_hybrid.json"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="installed without its repository")


@pytest.mark.slow
@pytest.mark.dist
def test_a_hybrid_model_goes_through_the_quickstart(tmp_path):
    """Warmed up, trained on one process, exported with the layers that it had."""
    out = tmp_path / "out"
    words = "--max_steps 1 --rollout_batch_size 2 --n_samples_per_prompt 4 --train_batch_size 8 --no_eval_at_start"
    launch("bash", SCRIPT, *words.split(), "--no_drop_zero_advantage", cwd=tmp_path, OUT=str(out), NPROC="1",
           PREPARE_ARGS="--train_rows 8 --test_rows 4 --sft_rows 64", SFT_ARGS="--max_steps 2")  # yapf: disable
    config = json.loads((out / "hf" / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "qwen3_5_text"
    assert config["layer_types"] == ["linear_attention", "full_attention"]
    step = lines(out / "metrics.jsonl")[-1]
    assert step["step"] == 1 and step["rollout/samples"] == 8 and step["policy/grad_norm"] >= 0
    assert step["rollout/mismatch/abs_logp_mean"] < 1e-4  # of the engine, which decodes with states


@pytest.mark.whole
def test_a_hybrid_model_learns(tmp_path):
    launch("bash", SCRIPT, "--disable_ckpt", cwd=tmp_path, timeout=900, OUT=str(tmp_path / "out"))
    held_out = [row["eval/all/pass@1"] for row in lines(tmp_path / "out" / "metrics.jsonl") if "eval/all/pass@1" in row]
    assert held_out[-1] > held_out[0] + 0.3, held_out


def test_the_page_shows_the_stored_run():
    found = json.loads(STORED.read_text(encoding="utf-8"))
    (_, before), (_, five), (_, after) = found["held_out"]
    page = " ".join((ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8").split())
    assert f"solved {before} of 500 held-out problems before GRPO, {five} after 5 steps and {after} after 10" in page
    assert f"took {found['cpu_seconds_of_grpo']} CPU seconds" in page
    assert all(f"{start} to {end} with seed {seed}" in page for seed, (start, end) in found["other_seeds"].items())
