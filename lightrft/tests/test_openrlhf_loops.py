"""The loops of ``examples/openrlhf``, in OpenRLHF's commands: whole runs, after which answers to held-out prompts are
better by a rule. ``benchmarks/openrlhf_loops.py`` has the task, its models and its aims, and more seeds."""
import json
import os
import re
import sys
from pathlib import Path

import pytest

from lightrft.tests.support.runs import read_lines
from lightrft.tests.support.warm import warm_environ, warm_python

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "examples" / "openrlhf" / "README.md"
if not PAGE.exists():
    pytest.skip("installed without its repository", allow_module_level=True)
sys.path[:0] = [str(ROOT / "benchmarks")]

import openrlhf_loops as loops  # noqa: E402
from matrix_report import Outputs  # noqa: E402

SEED = 3  # none of those that are recorded


def test_the_page_shows_the_recorded_runs():
    """And all reach their aims on every seed; one that does not is named."""
    recorded = json.loads(loops.OUTPUTS.data.read_text(encoding="utf-8"))
    assert loops.section(recorded) in loops.OUTPUTS.page.read_text(encoding="utf-8")
    assert loops.missed(recorded) == [] and len(loops.of_run(recorded, "RAFT")) == 3
    for name, (_, _, judges) in loops.GAINS.items():
        for judge in judges:
            worse = [row | {judge: row[judge] | {"after": row[judge]["before"]}}
                     if (row["run"], row["seed"]) == (name, 2) else row for row in recorded]  # yapf: disable
            assert loops.missed(worse) == [f"{name}, {judge}: 0.0 standard errors, aim 3"]
    worse = [row | {"accuracy": 0.5} if row["run"] == "reward model" else row for row in recorded]
    assert loops.missed(worse) == ["reward model: 0.500 of held-out pairs, aim 0.9"]


def test_finished_seeds_are_read_and_published(tmp_path, monkeypatch, capsys):
    """And a missed aim ends the benchmark with an error."""
    recorded = json.loads(loops.OUTPUTS.data.read_text(encoding="utf-8"))
    for seed in (0, 1, 2):
        (tmp_path / f"seed_{seed}").mkdir()
        mine = [row for row in recorded if row["seed"] == seed]
        (tmp_path / f"seed_{seed}" / "results.json").write_text(json.dumps(mine), encoding="utf-8")
    (tmp_path / "page.md").write_text(f"# Loops\n{loops.START}\nold\n{loops.END}\n", encoding="utf-8")
    outputs = Outputs(tmp_path / "loops.json", tmp_path / "page.md", Path())
    monkeypatch.setattr(loops, "OUTPUTS", outputs)
    monkeypatch.setattr(sys, "argv", ["openrlhf_loops.py", "--out", str(tmp_path), "--docs"])
    loops.main()
    assert loops.table(recorded) in capsys.readouterr().out
    assert outputs.page.read_text(encoding="utf-8") == f"# Loops\n{loops.START}{loops.section(recorded)}{loops.END}\n"
    assert loops.section(json.loads(outputs.data.read_text(encoding="utf-8"))) == loops.section(recorded)
    monkeypatch.setattr(loops, "ERRORS", 1000.0)
    with pytest.raises(SystemExit, match="an aim was missed:\nRAFT, reward model: 18.0 standard errors, aim 1000"):
        loops.main()


def test_the_page_prints_the_scripts_that_are_measured():
    printed = re.findall(r"^bash examples/openrlhf/(\w+)\.sh", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert printed == list(loops.LOOPS)


@pytest.fixture(name="environ", scope="module")
def environ_fixture():
    """Python and the launcher of the scripts."""
    return os.environ | warm_environ() | {"LAUNCH": f"{warm_python()} -m", "OMP_NUM_THREADS": "1"}


@pytest.fixture(name="home", scope="module")
def home_fixture(tmp_path_factory, environ):
    """A policy with its answers to the held-out prompts, and a reward model that orders held-out pairs."""
    home = tmp_path_factory.mktemp("home")
    loops.prepare_seed(home, SEED, environ, chats=8, pairs=500)
    assert loops.ordered(home) >= loops.ORDERED
    loops.answers("policy", "policy", home, SEED, environ)
    return home


def check_gains(home, *names):
    """The gains of ``names`` reach their aims."""
    for name in names:
        row = loops.gain(name, home, SEED)
        assert all(loops.errors(row[judge]) >= loops.ERRORS for judge in loops.GAINS[name][2]), row


@pytest.mark.slow
def test_conditional_sft_answers_as_it_is_asked_to(home, environ):
    loops.conditioned(home, SEED, environ, EPOCHS=2)
    check_gains(home, *(name for name in loops.GAINS if name.startswith("conditional SFT")))


@pytest.mark.parametrize("name, script, iterations", [
    pytest.param("RAFT", "rejection_sampling", 1, marks=pytest.mark.slow),
    pytest.param("iterative DPO", "iterative_dpo", 2, marks=pytest.mark.whole),
])
def test_answers_improve(name, script, iterations, home, environ):
    """By the reward model, which the script reads, and by the rule, which it does not."""
    loops.improved(script, home, SEED, environ, TRAINING_ITERS=iterations)
    check_gains(home, name)
    assert len(read_lines(home / script / "rewards.jsonl")) == iterations
