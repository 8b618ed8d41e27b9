"""``examples/agents``, end to end: a model that was taught a bad habit learns from its environment."""
from pathlib import Path

import pytest

from lightrft.tests.test_examples import launch, lines

AGENTS = Path(__file__).parents[2] / "examples" / "agents"
pytestmark = [
    pytest.mark.dist, pytest.mark.slow,
    pytest.mark.skipif(not AGENTS.exists(), reason="installed without its repository")
]  # yapf: disable


@pytest.mark.timeout(600)
def test_calculator_learns_which_tool_to_call(tmp_path):
    """Greedy answers are all wrong after the demonstrations, and many are right after twelve steps of GRPO."""
    pytest.importorskip("renderers", reason="needs Python 3.11")
    words = "--max_steps 12 --eval_steps 12 --max_eval_samples 60 --print_samples 0 --save_steps -1".split()
    launch("bash", AGENTS / "run_agent.sh", "calculator", *words, cwd=tmp_path, timeout=500, OUT=str(tmp_path),
           NPROC="1")
    first, *_, last = lines(tmp_path / "metrics.jsonl")
    assert first["eval/all/pass@1"] <= 0.1 and last["eval/all/pass@1"] >= 0.3, (first, last)
    assert last["env/turns/mean"] > 1.5 and last["env/exception"] == 0
