"""The program of docs/python.md, as printed: it learns on one process, begins alike on two, and runs in a notebook."""
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from lightrft.tests.support.launch import ROOT
from lightrft.tests.support.warm import warm_environ, warm_python
from lightrft.tests.support.warmed_up import fixture_warmed_up

fixture_warmed_up = fixture_warmed_up  # pytest finds it here
PAGE = ROOT / "docs" / "python.md"
ENVIRON = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
pytestmark = [
    pytest.mark.dist, pytest.mark.slow,
    pytest.mark.skipif(not PAGE.exists(), reason="installed without its repository")
]


def python(*words: object, cwd: Path) -> str:
    """Run Python to its end; returns what it printed."""
    done = subprocess.run([warm_python(), *map(str, words)], cwd=cwd, env=ENVIRON | warm_environ(), text=True,
                          capture_output=True, timeout=500)  # yapf: disable
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    return done.stdout


def program() -> str:
    """The last code block of the page."""
    return re.findall(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[-1]


SHORT = program().replace("max_steps=40", "max_steps=2") if PAGE.exists() else ""


def accuracies(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"held-out accuracy ([\d.]+) -> ([\d.]+)", printed)[0]]


@pytest.fixture(name="home", scope="module")
def fixture_home(warmed_up, tmp_path_factory):
    """A folder with the data and the model after the warm-up where the quickstart puts them."""
    home = tmp_path_factory.mktemp("home")
    (home / "runs").mkdir()
    (home / "runs" / "quickstart").symlink_to(warmed_up)
    return home


def numbers(home: Path) -> list[float]:
    """What the run in the folder measured before its first update."""
    lines = [json.loads(line) for line in (home / "runs" / "ten_lines" / "metrics.jsonl").read_text().splitlines()]
    return [lines[0]["eval/all/pass@1"], lines[1]["reward/mean"], lines[1]["policy/grad_norm"]]


@pytest.fixture(name="alone", scope="module")
def fixture_alone(home):
    """The program on one process: what it printed, and its first numbers."""
    (home / "program.py").write_text(program(), encoding="utf-8")
    return python("program.py", cwd=home), numbers(home)


def test_one_process_reaches_the_accuracy_of_the_quickstart(alone):
    before, after = accuracies(alone[0])
    assert before < 0.6 and after > 0.9, (before, after)


def test_two_under_torchrun_begin_alike(home, alone):
    """Two steps are enough to compare, here and in the notebook."""
    (home / "short.py").write_text(SHORT, encoding="utf-8")
    printed = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "short.py", cwd=home)
    assert accuracies(printed)[0] == accuracies(alone[0])[0]
    assert numbers(home) == pytest.approx(alone[1], rel=1e-4)


def test_a_notebook_runs_the_program(home, alone, monkeypatch):
    """Its lambda is defined in the notebook and travels to the reward workers."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    first, second = re.split(r"\n(?=accuracy = )", SHORT)
    wrong = "GRPO('runs/quickstart/sft/hf', 'exact', [{'prompt': '1'}], num_generations=8)"
    cells = [nbformat.v4.new_code_cell(text) for text in (first, second, "run.model().config.vocab_size", wrong)]
    cells[3].metadata["tags"] = ["raises-exception"]
    notebook = nbformat.v4.new_notebook(cells=cells)
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    nbclient.NotebookClient(notebook, timeout=500, kernel_name="python3", resources={"metadata":
                                                                                     {"path": str(home)}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.outputs)
    assert accuracies(printed)[0] == accuracies(alone[0])[0] and numbers(home) == pytest.approx(alone[1], rel=1e-4)
    assert len((home / "runs" / "ten_lines" / "metrics.jsonl").read_text().splitlines()) == 3, "other steps"
    assert [one["data"]["text/plain"] for one in cells[2].outputs if "data" in one] == ["64"]
    ((mistake, ), ) = [one["traceback"] for one in cells[3].outputs]
    assert mistake == "ConfigError: num_generations is an option of another trainer; here: n_samples_per_prompt"
