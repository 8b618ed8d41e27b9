"""What a run leaves for a person."""
import logging
import os
import re
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrft.tests.support import runs
from lightrft.trainer import run_log
from lightrft.trainer.model_card import steps_of
from lightrft.utils import progress
from lightrft.utils.curve import plot_curve
from lightrft.utils.watchdog import clear_stop_request, signal_handlers


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    home = runs.write_home(tmp_path_factory.mktemp("home"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_log, "plot_curve", plot_curve)
        return runs.run(home,
                        tmp_path_factory.mktemp("runs") / "mine", max_steps=2, init_kl_coef=0.1, save_trajectories=True,
                        eval_data=[str(home / "test.jsonl")], eval_steps=-1)


def test_responses_to_training_prompts_are_printed(tmp_path, caplog):
    """Without held-out prompts in the first and the last step, or every so many steps; from different prompts."""
    home = runs.write_home(tmp_path / "home")
    logger = logging.getLogger("lightrft")
    logger.addHandler(caplog.handler)
    held_out = {"eval_data": [str(home / "test.jsonl")], "eval_steps": -1}
    for number, (options, steps) in enumerate((({}, [1, 3]), ({"print_steps": 2}, [2]), ({"print_steps": 0}, []),
                                               (held_out, []), (held_out | {"print_steps": 3}, [3]))):  # yapf: disable
        caplog.clear()
        runs.run(home, tmp_path / str(number), max_steps=3, print_samples=2, use_tensorboard=number == 0, **options)
        shown = [text for text in caplog.messages if text.startswith("responses to training prompts")]
        assert [text.partition("\n")[0]
                for text in shown] == [f"responses to training prompts of step {n}" for n in steps]
        for text in shown:
            prompts = re.findall(r"prompt: +(.+)", text)
            assert len(set(prompts)) == 2 and text.count("response:") == 2 and "reward" in text
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("interval,wanted", [(0.0, {"rollout", "passes", "update", "evaluation"}), (60.0, set())])
def test_long_phases_show_their_progress(tmp_path, caplog, monkeypatch, interval, wanted):
    """In a log file a line per minute, so the phases of a short step show nothing."""
    monkeypatch.setattr(progress, "PHASE_LOG_INTERVAL_S", interval)
    home = runs.write_home(tmp_path / "home")
    logger = logging.getLogger("lightrft")
    logger.addHandler(caplog.handler)
    runs.run(home, tmp_path / "run", init_kl_coef=0.1, eval_data=[str(home / "test.jsonl")], eval_steps=-1)
    logger.removeHandler(caplog.handler)
    found = {match[1]: match[2] for text in caplog.messages if (match := re.match(r"(\w+): .+\| (\d+/\d+) ", text))}
    assert found.keys() == wanted, caplog.messages
    assert not wanted or found == {"rollout": "4/4", "passes": found["passes"], "update": found["update"],
                                   "evaluation": "4/4"}  # yapf: disable


def test_the_curve_is_drawn_while_the_run_goes_on(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(run_log, "DRAW_S", 0.0)
    monkeypatch.setattr(run_log, "plot_curve", lambda path, png: drawn.append(len(runs.read_lines(path))))
    runs.run(runs.write_home(tmp_path / "home"), tmp_path / "run", max_steps=3)
    assert drawn[0] == 1 and drawn[-1] == 3, "in the first step, and after the last"


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
    assert {"eval/all/reward@1", "eval/odd/len"} <= done.lines[1].keys()


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
    assert f"| reward/mean | {done.metrics['reward/mean']:.4g} |" in card and "| eval/all/reward@1 |" in card
    assert "init_kl_coef: 0.1" in card and "| rewards |" not in card, "those of this test have no name"
    first, last = (line["reward/mean"] for line in done.lines)
    best = max((first, 1), (last, 2), key=lambda each: each[0])
    assert (f"| reward/mean | {first:.4g} | {last:.4g} | {best[0]:.4g} (step {best[1]}) | step 1 -> 2 |") in card
    assert f"| held-out data | `{done.trainer.config.data.eval_data[0]}` |" in card
    assert "| KL coefficient | `0.1` |" in card


def test_the_code_of_the_model_card_runs(done, capsys):
    """It prints what the model answers to a training prompt, as it was rendered."""
    card = (done.folder / "hf" / "README.md").read_text(encoding="utf-8")
    known = {}
    exec(card.split("```python\n")[1].split("```")[0], known)
    assert known["prompt"] in runs.PROMPTS and known["output"].shape[1] > known["inputs"]["input_ids"].shape[1]
    assert capsys.readouterr().out.strip("\n") == known["tokenizer"].decode(
        known["output"][0, known["inputs"]["input_ids"].shape[1]:], skip_special_tokens=True).strip("\n")


@pytest.mark.parametrize("count, text", [(1, "1 step"), (2, "2 steps")])
def test_steps_are_counted(count, text):
    assert steps_of(count) == text


def test_a_stopped_run_has_a_summary_too(tmp_path, caplog):
    """Ctrl-C in the second step."""
    home, asked = runs.write_home(tmp_path), []

    def score(item):
        asked.append(item)
        if len(asked) == 9:
            assert (tmp_path / "run" / "report.html").is_file(), "it can be read while the run is under way"
            os.kill(os.getpid(), signal.SIGINT)
        return runs.letters(item)

    config = runs.config_of(home, tmp_path / "run", max_steps=5, disable_ckpt=False)
    with caplog.at_level(logging.INFO), signal_handlers():
        runs.run(home, tmp_path / "run", runs.Judge(config.reward, score), max_steps=5, disable_ckpt=False)
    clear_stop_request()
    folder = tmp_path / "run"
    assert f"summary of {folder}, 2 steps" in caplog.text and (folder / "report.html").is_file()
    lines = dict(message.split(None, 1) for message in caplog.messages if len(message.split(None, 1)) == 2)
    assert lines["checkpoints"] == str(folder / "checkpoints") and lines["report"] == str(folder / "report.html")
    assert lines["model"] == f"not written, for the run was stopped; lightrft export {folder / 'checkpoints'} OUT"


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
