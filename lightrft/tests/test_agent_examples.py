"""``examples/agents``: each trains; end to end, a model that was taught a bad habit learns from its environment."""
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest

from lightrft.tests.support import runs
from lightrft.tests.support.printed import Program
from lightrft.tests.test_examples import launch, lines

no_picture = runs.no_picture
ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "examples" / "agents"
pytestmark = pytest.mark.skipif(not AGENTS.exists(), reason="installed without its repository")
TINY = "--max_steps 2 --rollout_batch_size 2 --train_batch_size 16 --eval_steps 0 --no_eval_at_start --save_steps -1"
GAINS = {"calculator": 0.8, "search": 0.6, "guess": 0.7, "spelling": 0.7}  # in held-out reward, at least


@pytest.fixture(name="agents")
def fixture_agents():
    """The folder as the start of the path; modules of examples are forgotten afterwards."""
    pytest.importorskip("renderers", reason="needs Python 3.11")
    with mock.patch.object(sys, "path", [str(AGENTS), *sys.path]):
        yield
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None) or "").startswith(str(AGENTS.parent)):
            del sys.modules[name]


@pytest.mark.parametrize("name", ["search", "guess", "spelling"])
def test_each_trains(name, agents, tmp_path, monkeypatch):
    """Two steps of a model without a warm-up: rows, environment, reward and options fit together."""
    if name == "spelling":
        pytest.importorskip("reasoning_gym")
    monkeypatch.setenv("AGENT", name)
    words = f"--out {tmp_path} --train_rows 8 --test_rows 4 --sft_rows 8"
    Program(str(AGENTS / "prepare.py"), []).run(words.split())
    data = f"--pretrain {tmp_path}/base --prompt_data {tmp_path}/data/train.parquet --save_path {tmp_path}"
    Program(str(AGENTS / "train_colocate.py"), []).run(f"{data} {TINY}".split())
    assert [line["reward/unscored"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 0]


@pytest.mark.parametrize("words, named", [([], "(no word)"), (["calculater", "--seed", "2"], "calculater")])
def test_the_script_names_the_examples_for_a_word_that_is_none(words, named):
    ended = subprocess.run(["bash", str(AGENTS / "run_agent.sh"), *words], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and f"run_agent.sh {named}: no such example" in ended.stderr
    assert "name calculator, search, guess or spelling first" in ended.stderr


def test_the_search_finds_every_fact_by_both_words_alone(agents):
    agent = import_module("search")
    for name, kind, what in agent.facts():
        assert agent.search(f"{name} {kind}") == agent.search(f"{kind} {name}") == f"{name} {kind} {what}"
    assert len({agent.search(kind) for kind in agent.FACTS}) == len(agent.FACTS), "one document for each kind"


def test_who_halves_what_is_left_finds_every_number(agents):
    agent, found = import_module("guess"), set()
    for seed in range(100):
        game = agent.Game()
        assert game.reset(None, seed) == f"1-{agent.LAST}"
        for number in range(agent.GUESSES):
            step = game.step(mock.Mock(text=str((game.low + game.high) // 2)))
            if step.done:
                found.add(game.number)
                break
        assert step.reward == 1.0
    assert found == {*range(1, agent.LAST + 1)}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", GAINS)
def test_each_learns(name, tmp_path):
    """The whole run of the docs."""
    if name == "spelling":
        pytest.importorskip("reasoning_gym")
    launch("bash", AGENTS / "run_agent.sh", name, cwd=tmp_path, timeout=1100, OUT=str(tmp_path), NPROC="1")
    first, *_, last = lines(tmp_path / "metrics.jsonl")
    assert last["eval/all/reward@1"] - first["eval/all/reward@1"] >= GAINS[name], (first, last)


def test_the_curves_of_the_docs_are_those_of_the_record():
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    record = json.loads((ROOT / "docs" / "data" / "agents.json").read_text(encoding="utf-8"))
    for name, curve in record["examples"].items():
        rows = re.search(rf"^\| `{name}` \|([ .\d|]+)\|\n\| reward \| – \|([ .\d|]+)\|$", page, re.MULTILINE)
        held_out, means = ([float(cell) for cell in cells.split("|")] for cells in rows.groups())
        assert held_out == pytest.approx([*curve["held_out"].values()], abs=0.0051)
        steps = len(curve["reward"]) // len(means)
        runs_of = [curve["reward"][i:i + steps] for i in range(0, len(curve["reward"]), steps)]
        assert means == pytest.approx([sum(run) / steps for run in runs_of], abs=0.0051)
    for name, seeds in record["seeds"].items():
        (row, ) = re.findall(rf"^\| `{name}` \|(.*→.*)\|$", page, re.MULTILINE)
        cells = [[float(value) for value in cell.split("→")] for cell in row.split("|")]
        assert cells == [pytest.approx(ends, abs=0.0051) for ends in seeds.values()]
        curve = record["examples"][name]["held_out"].values()
        assert seeds["42"] == [*curve][::len(curve) - 1]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_calculator_learns_which_tool_to_call(tmp_path):
    """With the command of the docs, greedy answers are all wrong after the demonstrations (fewer here), and many
    are right after eight steps of GRPO."""
    pytest.importorskip("renderers", reason="needs Python 3.11")
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    _, script, name = next(line for line in page.splitlines() if line.startswith("bash examples/agents")).split()
    words = "--max_steps 8 --eval_steps 8 --max_eval_samples 60 --print_samples 0 --save_steps -1".split()
    launch("bash", ROOT / script, name, *words, cwd=tmp_path, timeout=500, OUT=str(tmp_path), NPROC="1",
           PREPARE_ARGS="--sft_rows 9600")
    first, *_, last = lines(tmp_path / "metrics.jsonl")
    assert first["eval/all/pass@1"] <= 0.1 and last["eval/all/pass@1"] >= 0.3, (first, last)
    assert last["env/turns/mean"] > 1.5 and last["env/exception"] == 0
