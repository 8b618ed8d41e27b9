"""Compare the step of the quickstart that sees with TRL's ``GRPOTrainer``: CPU seconds and tokens per CPU second.

    make peers && python benchmarks/vl_peer.py [--pairs 3] [--threads 1 2] [--out vl_peer.json]

Both trainers run in turn, as in ``peers.py``, on the warmed-up model of ``make quickstart-vl`` and its pictures: 64
prompts x 8 samples of about 11 tokens, one optimizer step per rollout. Both get the pictures as PNG files and decode
them in every step. TRL has the whole batch in one pass, the fastest of the settings that were tried.
"""
import sys
from pathlib import Path

from bare_loop import warm_example
from peers import Case, ROOT, exact, main

sys.path.insert(0, str(ROOT / "examples" / "quickstart_vl"))  # the reward of its task
CASES = {
    "pictures": Case(64, 16, 4e-4, 10, exact, {"per_device_train_batch_size": 512}, sees=True),
    "tiny": Case(2, 8, 1e-4, 1, exact, {"per_device_train_batch_size": 16}, sees=True),  # for the test
}


def prepare_model(home: Path, cases: list[str]) -> None:
    """Make the model and the pictures in ``home``, if it has none yet."""
    if not (home / "sft" / "hf").is_dir():
        warm_example(home, "quickstart_vl", [], "--max_epochs 4 --max_steps 400")


if __name__ == "__main__":
    main(__doc__, CASES, prepare_model, ["pictures"])
