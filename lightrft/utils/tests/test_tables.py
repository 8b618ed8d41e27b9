"""The step table and the table of an evaluation, at the widths of real terminals."""
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from lightrft.cli.offline import OFFLINE
from lightrft.tests.support.launch import ROOT
from lightrft.utils import tables
from lightrft.utils.curve import panels, plot_curve
from lightrft.utils.report import write_report
from lightrft.utils.run_summary import RunSummary
from lightrft.utils.tables import evaluation_table, HEADER_EVERY, StepTable

TIMES = {
    "rollout": 100.0, "reward": 0.2, "old_logprobs": 2.0, "ref": 1.0, "forward": 8.0, "update": 20.0, "step": 123.45
}
RL = {
    "reward/mean": -12.3456, "reward/math/mean": 0.5, "rollout/response_len/mean": 16384.5, "policy/kl_old": 0.1,
    "policy/entropy": 0.345, "perf/tokens_per_s": 12345678.0,
    **{f"time/{name}_s": value for name, value in TIMES.items()}
}  # yapf: disable
SFT = {"sft/loss": 1.5, "perf/tokens_per_s": 5e4, "time/update_s": 1.0, "time/step_s": 1.5}
EVAL = {"eval/all/pass@1": 0.5, "eval/all/pass@1/low": 0.4}


@pytest.mark.parametrize("width", [50, 80, 120])
@pytest.mark.parametrize("metrics", [RL, RL | {"policy/kl_ref": 1.2e-5} | EVAL, SFT, SFT | {"eval/loss": 2.0}])
def test_every_line_fits_and_columns_are_aligned(width, metrics):
    table = StepTable(width)
    header, *rows = [line for step in (1, 20000) for line in table.lines(step, metrics)]
    assert len(rows) == 2 and {len(line) for line in (header, *rows)} == {len(header)} and len(header) <= width
    titles = header.replace("step s", "").replace("|", "").split()[1:]
    assert "…" not in header + rows[0] and {*titles} <= {one.title for one in (*tables._NUMBERS, *tables._PHASES)}
    ends = [{i for i, letter in enumerate(line) if letter == " " and line[i - 1:i].strip()} for line in rows]
    assert ends[0] == ends[1], "columns moved"
    assert ("KL" in header.split()) == ("policy/kl_ref" in metrics) if width >= 80 else True
    if "reward/mean" in metrics:
        assert ("| " in header) == (width == 120), "the phases are shown where there is room for all"


def test_the_phases_add_up_to_the_step():
    header, row = StepTable(120).lines(1, RL)
    names, seconds = (line.partition("|")[2].split() for line in (header, row))
    assert dict(zip(names, map(float, seconds))) == {"rollout": 100.0, "scoring": 0.2, "passes": 3.0, "update": 20.0,
                                                     "rest": 0.25}  # yapf: disable


def test_an_environment_has_columns_of_turns_calls_and_waiting():
    header, row = StepTable(160).lines(1,
                                       RL | {"env/turns/mean": 2.25, "env/calls/mean": 1.5, "env/wait_s/mean": 0.125})
    names, values = (line.replace("step s", "step_s").replace("wait s", "wait_s").split() for line in (header, row))
    shown = dict(zip(names, values))
    assert (shown["turns"], shown["calls"], shown["wait_s"]) == ("2.2", "1.5", "0.12") and "turns" not in \
        StepTable(160).lines(1, RL)[0]


def test_the_header_comes_again_every_so_often_and_with_a_new_column():
    table = StepTable(120)
    counts = [len(table.lines(step, RL)) for step in range(1, HEADER_EVERY + 2)]
    assert counts == [2] + [1] * (HEADER_EVERY - 1) + [2]
    more = table.lines(99, RL | EVAL)
    assert "held-out" in more[0] and "0.500" in more[1].split()
    alone = table.lines(100, EVAL)
    assert len(alone) == 1 and alone[0].split() == ["100", "0.500", "|"], alone


def test_the_accuracy_of_the_least_k_is_shown():
    header, row = StepTable(120).lines(1, {"eval/all/pass@16": 0.9, "eval/all/pass@4": 0.7, "eval/all/reward@16": 0.3})
    assert header.split()[1:2] == ["held-out"] and row.split()[1] == "0.700" and "reward" not in header


def test_unscored_responses_have_a_column_once_there_are_some():
    table, late = StepTable(120), RL | {"reward/unscored": 3, "reward/unscored/timeout": 1, "reward/unscored/none": 2}
    assert "unscored" not in table.lines(1, RL | {"reward/unscored": 0})[0]
    header, row = table.lines(2, late)
    assert row.split()[header.split().index("unscored")] == "3"
    rejected = RL | {"rollout/rounds": 2, "reward/generated_unscored/none": 7, "reward/unscored": 0}
    assert "7" in table.lines(3, rejected)[-1].split()


def test_terminal_codes_are_for_terminals():
    assert "\x1b" not in "".join(StepTable(120).lines(1, RL)) and "\x1b[1m" in StepTable(120, True).lines(1, RL)[0]


def test_a_run_on_a_terminal_uses_its_width():
    """The size and the codes are those of stderr, here a pseudo-terminal of 70 columns; a pipe gets plain lines."""
    code = f"from lightrft.utils.tables import StepTable\nprint(*StepTable().lines(1, {RL!r}), sep='\\n')"
    parent, child = pty.openpty()
    os.set_blocking(parent, False)
    import fcntl
    import struct
    import termios
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 70, 0, 0))
    environ = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")}
    environ |= {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    for stderr, width, codes in ((child, 70, True), (subprocess.PIPE, tables.PLAIN_WIDTH, False)):
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr,
                              stdin=subprocess.DEVNULL, text=True, env=environ, timeout=60, check=True)  # yapf: disable
        header, row = done.stdout.splitlines()
        assert ("\x1b" in header) is codes and len(row) <= width and ("|" in row) is not codes, (header, row)
    os.close(parent)
    os.close(child)


def test_an_evaluation_of_several_sources_has_a_table_with_intervals():
    numbers = {"prompts": 30, "pass@1": 0.5, "pass@1/low": 0.332, "pass@1/high": 0.668, "pass@16": 0.9,
               "pass@16/low": 0.7, "pass@16/high": 0.97, "len": 812.4, "unscored": 0}  # yapf: disable
    metrics = {f"eval/{source}/{name}": value for source in ("all", "openai/gsm8k", "aime24")
               for name, value in numbers.items()}  # yapf: disable
    lines = evaluation_table(metrics)
    assert [line.split()[0] for line in lines] == ["held-out", "aime24", "openai/gsm8k", "all"]
    assert "0.500 [0.33, 0.67]  0.900 [0.70, 0.97]" in lines[1] and len(lines[1]) <= 80
    assert lines[0].index("pass@1") < lines[0].index("pass@16")
    assert evaluation_table({name: value for name, value in metrics.items() if "aime24" not in name}) == []


@pytest.mark.parametrize("tree", [command.tree for command in OFFLINE.values()])
def test_trainers_on_fixed_data_show_what_they_learn(tree):
    name = tree.METRICS[0]
    metrics = {f"{name}/loss": 1.5, f"{name}/accuracy": 0.625, "eval/accuracy": 0.75, f"{name}/tokens": 30}
    text = "\n".join(StepTable(120).lines(1, metrics))
    assert "1.5" in text and "0.625" in text and "0.750" in text
    summary = RunSummary.of([{"step": step, **metrics} for step in (1, 2)])
    assert summary.tokens == 60
    assert {each.name for each in summary.changes} == {f"{name}/loss", f"{name}/accuracy", "eval/accuracy"}


@pytest.mark.parametrize("tree", [command.tree for command in OFFLINE.values()])
def test_curves_and_report_of_trainers_on_fixed_data_have_what_they_learn(tree, tmp_path):
    name = tree.METRICS[0]
    rows = [{"step": step, f"{name}/loss": 1 / step, f"{name}/accuracy": 0.5, f"{name}/grad_norm": 0.1 * step,
             f"{name}/lr": 1e-5, "eval/accuracy": 0.75} for step in (1, 2)]  # yapf: disable
    assert panels(rows) == [("loss", {f"{name}/loss": "training"}),
                            ("accuracy", {f"{name}/accuracy": "training", "eval/accuracy": "held-out"})]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png") is not None
    page = cast(Path, write_report(tmp_path)).read_text()
    assert f'"{name}/grad_norm": "{name}"' in page and f'"{name}/lr": "{name}"' in page
