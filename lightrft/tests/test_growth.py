"""The counts of the suite: who counts, in which processes, and when they fail it."""
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightrft.config.schema import RolloutConfig
from lightrft.rollout import engines
from lightrft.tests.support import growth, runs
from lightrft.tests.support.launch import finish

FIGURES = {"processes": 100, "engines": 10, "steps": 1000}


def test_steps_and_processes_are_counted_in_a_run_of_its_own(tmp_path: Path) -> None:
    """Two optimizer steps in a forked process, which starts a worker for its reward."""
    home, counts = runs.write_home(tmp_path / "home"), tmp_path / "counts"
    counts.mkdir()
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    paths = {"pretrain": home / "model", "prompt_data": home / "train.jsonl", "reward": reward}
    options = {**runs.BASE, **paths, "save_path": tmp_path / "out", "max_steps": 2}
    finish(tmp_path / "run", options, **{growth.VARIABLE: str(counts)})
    found = growth.counted_in(counts)
    assert (found["steps"], found["engines"], found["cold starts"]) == (2, 0, 0) and found["processes"] >= 1


def test_an_engine_counts_when_it_is_built_and_not_when_its_builder_is_looked_up(tmp_path: Path, monkeypatch) -> None:
    """The one of the trainer, hf, never does."""
    monkeypatch.setenv(growth.VARIABLE, str(tmp_path))
    growth.watch()
    actor, built = SimpleNamespace(hf_model=torch.nn.Linear(2, 2)), SimpleNamespace(shared_storage=dict)
    assert callable(engines.builder_of("vllm")) and growth.counted_in(tmp_path)["engines"] == 0
    for count, name in enumerate(("vllm", "sglang"), 1):
        engines.check_own_weights(RolloutConfig(engine_type=name), actor, built)
        assert growth.counted_in(tmp_path)["engines"] == count
    built.shared_storage = lambda: {"weight"}
    engines.check_own_weights(RolloutConfig(engine_type="hf"), actor, built)
    assert growth.counted_in(tmp_path)["engines"] == 2


def test_growth_names_what_has_grown() -> None:
    assert not growth.grown({"processes": 105, "engines": 1, "steps": 1050}, FIGURES)
    [sentence] = growth.grown({"processes": 106, "engines": 1, "steps": 1050}, FIGURES)
    assert sentence.startswith("106 processes are more than the 100 of growth.json and 5%: ")
    assert not growth.grown(FIGURES, {}), "before the first figures are committed"


PARTS = [{"keyword": "x"}, {"markexpr": "not engine"}, {"maxfail": 1}, {"paths": True}]


@pytest.mark.parametrize("given", [{}, *PARTS], ids=str)
def test_a_part_of_the_suite_is_not_judged(given: dict[str, object]) -> None:
    option = dict.fromkeys(("keyword", "deselect", "ignore", "ignore_glob", "collectonly", "maxfail"))
    sources = pytest.Config.ArgsSource
    config = SimpleNamespace(option=SimpleNamespace(**{**option, "markexpr": "not whole", **given}),
                             args_source=sources.ARGS if given.get("paths") else sources.TESTPATHS)
    assert growth.is_whole(config) == (given not in PARTS)


def test_a_suite_that_has_grown_fails(tmp_path: Path) -> None:
    """A suite of two tests: a part of it passes, all of it, on two workers, does not; then its figures are taken."""
    settings = 'testpaths = tests\naddopts = -m "not whole"\nmarkers = whole\n'
    (tmp_path / "setup.cfg").write_text("[tool:pytest]\n" + settings)
    (tmp_path / "tests").mkdir()
    (tmp_path / "conftest.py").write_text(
        "from pathlib import Path\nfrom lightrft.tests.support import growth\n"
        "growth.COMMITTED = Path(__file__).with_name('growth.json')\npytest_plugins = [growth.__name__]\n")
    for name in "ab":
        (tmp_path / "tests" / f"test_{name}.py").write_text("import subprocess\ndef test(): subprocess.run('true')\n")
    (figures := tmp_path / "growth.json").write_text('{"processes": 1, "engines": 0, "steps": 0}')
    environ = {key: value for key, value in os.environ.items() if key != growth.VARIABLE and "XDIST" not in key}

    def said(*words: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", *words], cwd=tmp_path, text=True,
                              env=environ, capture_output=True)  # yapf: disable
        return done.returncode, done.stdout

    code, text = said("-n", "2")
    assert code == 1 and "2 passed" in text
    assert "Counted: 2 processes, 0 engines, 0 steps, 0 cold starts\nCounted: 2 processes are more than the 1" in text
    assert said("-k", "test_a")[0] == 0
    assert said("--commit-counts")[0] == 0
    assert json.loads(figures.read_text()) == {"processes": 2, "engines": 0, "steps": 0, "cold starts": 0}
