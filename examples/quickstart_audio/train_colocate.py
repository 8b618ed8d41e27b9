"""GRPO on the quickstart that hears: the trainer of :mod:`lightrft.cli.train` with the defaults of this task.

    torchrun --nproc-per-node 2 examples/quickstart_audio/train_colocate.py --pretrain MODEL --prompt_data A \\
        --eval_data B

``run_quickstart_audio.sh`` makes the data and the model and calls this; every option of the trainer works here.
"""
import sys
from pathlib import Path

from lightrft.cli.train import main

sys.path.append(str(Path(__file__).parents[1] / "quickstart"))
from defaults import DEFAULTS as SHARED  # noqa: E402

DEFAULTS = SHARED | {
    "reward": [str(Path(__file__).parents[1] / "quickstart_vl" / "reward.py") + ":accuracy"],
    "prompt_max_len": 96,
    "generate_max_len": 16,
    "actor_learning_rate": 4e-4,
    "max_steps": 30,
}

if __name__ == "__main__":
    main(defaults=DEFAULTS, prog="train_colocate.py")
