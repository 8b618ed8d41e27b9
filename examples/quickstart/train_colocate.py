"""GRPO on the quickstart task: the trainer of :mod:`lightrft.cli.train` with the defaults of this task.

    torchrun --nproc-per-node 2 examples/quickstart/train_colocate.py --pretrain MODEL --prompt_data A --eval_data B

``run_quickstart.sh`` makes the data and the model and calls this; every option of the trainer works here.
"""
from pathlib import Path

from defaults import DEFAULTS as SHARED

from lightrft.cli.train import main

DEFAULTS = SHARED | {
    "reward": [str(Path(__file__).with_name("reward.py")) + ":accuracy"],
    "generate_max_len": 48,
    "actor_learning_rate": 3e-4,
    "max_steps": 40,
    "max_eval_samples": 1000,
}

if __name__ == "__main__":
    main(defaults=DEFAULTS, prog="train_colocate.py")
