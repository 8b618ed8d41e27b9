"""What a run leaves for a person."""
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrft.tests.support import runs


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    home = runs.write_home(tmp_path_factory.mktemp("home"))
    return runs.run(home,
                    tmp_path_factory.mktemp("runs") / "mine", max_steps=2, init_kl_coef=0.1, save_trajectories=True,
                    eval_data=[str(home / "test.jsonl")], eval_steps=-1)


def test_one_line_per_step_with_times_that_add_up(done):
    assert [line["step"] for line in done.lines] == [1, 2]
    for line in done.lines:
        spans = {name for name in line if name.startswith("time/")} - {"time/step_s", "time/update_s"}
        assert sum(line[name] for name in spans) == pytest.approx(line["time/step_s"])
        assert 0 < line["time/forward_s"] + line["time/backward_s"] + line["time/optimizer_s"] <= line["time/update_s"]
        training = line["time/step_s"] - line.get("time/eval_s", 0.0) - line.get("time/checkpoint_s", 0.0)
        assert line["perf/tokens_per_s"] == pytest.approx(line["rollout/tokens"] / training)
        assert line["perf/peak_mem_gib"] > 0
    assert "time/eval_s" not in done.lines[0] and done.lines[1]["time/eval_s"] > 0


def test_every_canonical_metric_is_there(done):
    wanted = """reward/mean reward/std reward/min reward/max reward/judge/mean reward/judge/std group/zero_spread_frac
        group/singletons advantage/mean advantage/std advantage/min advantage/max policy/loss policy/clip_frac_low
        policy/clip_frac_high policy/ratio_max policy/kl_old policy/kl_ref policy/entropy policy/grad_norm policy/lr
        rollout/prompts rollout/samples rollout/tokens rollout/tokens_per_s rollout/response_len/mean
        rollout/response_len/max rollout/truncated_frac rollout/mismatch/abs_dp_mean rollout/mismatch/abs_dp_max
        rollout/mismatch/kl_k3 rollout/mismatch/pearson rollout/mismatch/ess time/rollout_s time/reward_s
        time/old_logprobs_s time/ref_s time/weight_sync_s time/step_s perf/tokens_per_s perf/peak_mem_gib""".split()
    assert [name for name in wanted if name not in done.lines[0]] == []
    assert {"eval/all/pass@1", "eval/all/avg@1", "eval/odd/len"} <= done.lines[1].keys()


def test_rollouts_hold_what_was_said_and_what_it_was_worth(done):
    rows = done.rollout(2)
    assert len(rows) == 8 and rows[0]["step"] == 2
    for row in rows:
        assert row["prompt"] in runs.PROMPTS and row["parts"]["judge"] == row["reward"]
        prompt = len(done.trainer.tokenizer.encode(row["prompt"]))
        assert row["tokens"] >= prompt + 1 and row["finish_reason"] in ("stop", "length")
    first, second = rows[:2]
    better = first if first["reward"] > second["reward"] else second
    assert better["advantage"] >= 0 and first["advantage"] * second["advantage"] <= 0


def test_the_exported_model_is_the_trained_one(done):
    folder = done.folder / "hf"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    expected = done.weights
    assert all(torch.equal(value, expected[name]) for name, value in loaded.named_parameters())
    assert AutoTokenizer.from_pretrained(folder).encode("one") == done.trainer.tokenizer.encode("one")


def test_the_model_card_names_base_steps_numbers_and_options(done):
    card = (done.folder / "hf" / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: transformers\nbase_model: ") and "# mine\n" in card
    assert "after 2 steps of reinforcement fine-tuning with lightrft" in card
    assert f"| reward/mean | {done.metrics['reward/mean']:.4g} |" in card and "| eval/all/pass@1 |" in card
    assert "init_kl_coef: 0.1" in card


def test_there_is_a_curve(done):
    assert (done.folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_continuing_a_finished_run_keeps_its_card(tmp_path_factory, caplog):
    home, folder = runs.write_home(tmp_path_factory.mktemp("home")), tmp_path_factory.mktemp("runs") / "mine"
    options = {"disable_ckpt": False, "eval_data": [str(home / "test.jsonl")], "eval_steps": -1}
    runs.run(home, folder, max_steps=2, **options)
    card = folder / "hf" / "README.md"
    before = card.read_text(encoding="utf-8")
    assert "| reward/mean |" in before
    with caplog.at_level(logging.INFO):
        runs.run(home, folder, max_steps=2, load_checkpoint=True, **options)
    again = card.read_text(encoding="utf-8")
    assert again.replace("load_checkpoint: true", "load_checkpoint: false") == before
    assert "already at step 2 of 2: nothing to do" in caplog.text
    weights = (folder / "hf" / "model.safetensors").read_bytes()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        runs.run(home, folder, max_steps=1, load_checkpoint=True, **options)
    assert "already at step 2 of 1: nothing to do" in caplog.text and "model written" not in caplog.text
    assert card.read_text(encoding="utf-8") == again
    assert (folder / "hf" / "model.safetensors").read_bytes() == weights
