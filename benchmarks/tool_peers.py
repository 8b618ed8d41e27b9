"""Compare steps with tools with those of TRL's ``GRPOTrainer``: CPU and wall seconds, with quick and slow tools.

    make peers && python benchmarks/tool_peers.py [--pairs 3] [--threads 1] [--out tool_peers.json]

Both trainers run in turn, as in ``peers.py``, on the warmed-up model of ``examples/agents/run_agent.sh calculator``: 8
prompts x 8 samples, of which three quarters call one of its two tools once and read the result. A call sleeps for
``LATENCY_S`` seconds; the names of the cases have them. Every sample is trained.
"""
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from bare_loop import warm_example
from peers import _text, Case, main, ROOT

sys.path.insert(0, str(ROOT / "examples" / "agents"))


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    time.sleep(float(os.environ["LATENCY_S"]))
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    time.sleep(float(os.environ["LATENCY_S"]))
    return a * b


def varied(prompts: list, completions: list, **columns: object) -> list[float]:
    """Of which hardly two of a group are equal, so that every sample has an advantage."""
    return [sum(map(ord, _text(each))) % 97 / 97 for each in completions]


AT_ONCE = Case(8, 48, 1e-6, 3, varied, {"per_device_train_batch_size": 64}, sides=("trl", "lightrft"),
               tools=(add, multiply), environ={"LATENCY_S": "0"})  # yapf: disable
CASES = {
    "0 s": AT_ONCE,
    "0.5 s": replace(AT_ONCE, environ={"LATENCY_S": "0.5"}),
    "tiny": replace(AT_ONCE, prompts=2, steps=1, trl={"per_device_train_batch_size": 16}),  # for the test
}


def prepare_model(home: Path, cases: list[str]) -> None:
    """Make the model and the prompts in ``home``, if it has none yet."""
    if not (home / "sft" / "hf").is_dir():
        os.environ["AGENT"] = "calculator"
        warm_example(home, "agents", [], "--max_len 256")


if __name__ == "__main__":
    main(__doc__, CASES, prepare_model, ["0 s", "0.5 s"])
