"""GRPO on the quickstart with a hybrid model: the trainer of :mod:`lightrft.cli.train` with the defaults of this task.

    torchrun --nproc-per-node 2 examples/quickstart_hybrid/train_colocate.py --pretrain MODEL --prompt_data A \\
        --eval_data B

``run_quickstart_hybrid.sh`` makes the data and the model and calls this; every option of the trainer works here.
"""
import sys
from pathlib import Path

from lightrft.cli.train import main

sys.path.append(str(Path(__file__).parents[1] / "quickstart"))
from defaults import DEFAULTS as SHARED  # noqa: E402

DEFAULTS = SHARED | {
    "reward": [str(Path(__file__).parents[1] / "quickstart" / "reward.py") + ":accuracy"],
    "generate_max_len": 48,
    "actor_learning_rate": 3e-4,
    "max_steps": 10,
    "max_eval_samples": 500,
}

if __name__ == "__main__":
    main(defaults=DEFAULTS, prog="train_colocate.py")
