"""The summary of a run, from its metrics."""
import pytest

from lightrft.utils import run_summary
from lightrft.utils.run_summary import Change, duration, RunSummary, shares, summary_lines


def rows():
    yield {"step": 0, "eval/all/pass@1": 0.25}
    for step in range(1, 21):
        row = {"step": step, "reward/mean": step / 20, "rollout/tokens": 100, "time/rollout_s": 3.0, "time/eval_s": 1.0,
               "time/step_s": 4.0, "time/update_s": 9.0, "eval/all/pass@1/low": 0.1}  # yapf: disable
        yield row | ({"eval/all/pass@1": 0.5 if step == 20 else 0.75} if step % 10 == 0 else {})


def test_numbers_before_and_after():
    """Evaluations are single ones; the reward of training is the mean over a tenth of the steps."""
    summary = RunSummary.of(list(rows()))
    assert summary.changes == [
        Change("eval/all/pass@1", 0.25, 0.5, 0.75, 10, "step 0 -> 20"),
        Change("reward/mean", pytest.approx(0.075), pytest.approx(0.975), 1.0, 20, "first 2 -> last 2 steps")
    ]
    assert (summary.steps, summary.tokens, summary.seconds) == (20, 2000, 80.0)
    assert summary.phases == {"rollout": 60.0, "eval": 20.0} and list(summary.phases) == ["rollout", "eval"]


def test_a_loss_is_best_where_it_is_lowest_and_one_number_has_no_before():
    summary = RunSummary.of([{"step": 1, "sft/loss": 2.0, "sft/tokens": 7, "eval/loss": None},
                             {"step": 2, "sft/loss": 1.0}, {"step": 3, "sft/loss": 1.5, "eval/loss": 1.0}])
    assert summary.changes == [
        Change("eval/loss", None, 1.0, 1.0, 3, "step 3"),
        Change("sft/loss", 2.0, 1.5, 1.0, 2, "step 1 -> 3")
    ]
    assert summary.tokens == 7 and RunSummary.of([]).changes == []


def test_the_lines_are_plain_without_a_terminal_and_coloured_on_one(monkeypatch):
    summary = RunSummary.of(list(rows()))
    lines = summary_lines(summary, {"model": "runs/[a]/hf"})
    assert [line.split() for line in lines[:2]] == [
        ["before", "after", "best", "measured"],
        ["eval/all/pass@1", "0.25", "0.5", "0.75", "(step", "10)", "step", "0", "->", "20"]]  # yapf: disable
    assert lines[3:] == ["time    1 min 20 s: rollout 75%, eval 25%", "tokens  2,000", "model   runs/[a]/hf"]
    monkeypatch.setattr(run_summary, "screen", lambda: (60, True))
    assert "\x1b[1m" in "".join(summary_lines(summary, {}))


def test_short_phases_are_one():
    phases = {"rollout": 60.0, "update_other": 14.0, "eval": 10.0, "other": 9.0, "log": 4.0, "gather": 3.0}
    assert shares(RunSummary(1, [], phases, 0, {})) == "rollout 60%, eval 10%, other 30%"
    assert shares(RunSummary(0, [], {}, 0, {})) == ""


def test_unscored_responses_are_counted_by_cause():
    some = [{"step": 1, "reward/unscored/none": 1, "reward/unscored/timeout": 1000}, {"step": 2},
            {"step": 3, "rollout/rounds": 1, "reward/generated_unscored/timeout": 200}]  # yapf: disable
    assert "unscored  1,201 responses: timeout 1,200, none 1" in summary_lines(RunSummary.of(some), {})
    assert not any(line.startswith("unscored") for line in summary_lines(RunSummary.of(list(rows())), {}))


def test_durations():
    texts = {4.21: "4.2 s", 59.96: "60.0 s", 200: "3 min 20 s", 3599.6: "1 h 0 min", 18420: "5 h 7 min"}
    assert {seconds: duration(seconds) for seconds in texts} == texts
