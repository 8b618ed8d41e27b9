"""``examples/agents``, end to end: a model that was taught a bad habit learns from its environment."""
from pathlib import Path

import pytest

from lightrft.tests.test_examples import launch, lines

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "examples" / "agents"
pytestmark = [
    pytest.mark.dist, pytest.mark.slow,
    pytest.mark.skipif(not AGENTS.exists(), reason="installed without its repository")
]  # yapf: disable


@pytest.mark.timeout(600)
def test_calculator_learns_which_tool_to_call(tmp_path):
    """With the command of the docs, greedy answers are all wrong after the demonstrations, and many are right after
    twelve steps of GRPO."""
    pytest.importorskip("renderers", reason="needs Python 3.11")
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    _, script, name = next(line for line in page.splitlines() if line.startswith("bash examples/agents")).split()
    words = "--max_steps 12 --eval_steps 12 --max_eval_samples 60 --print_samples 0 --save_steps -1".split()
    launch("bash", ROOT / script, name, *words, cwd=tmp_path, timeout=500, OUT=str(tmp_path), NPROC="1")
    first, *_, last = lines(tmp_path / "metrics.jsonl")
    assert first["eval/all/pass@1"] <= 0.1 and last["eval/all/pass@1"] >= 0.3, (first, last)
    assert last["env/turns/mean"] > 1.5 and last["env/exception"] == 0
