"""GRPO with the environment of an example: the trainer of :mod:`lightrft.cli.train` with the defaults of its module.

    AGENT=calculator torchrun --nproc-per-node 2 examples/agents/train_colocate.py --pretrain MODEL --prompt_data A

``run_agent.sh`` makes the data and the model and calls this; every option of the trainer works here.
"""
import os
import sys
from importlib import import_module
from pathlib import Path

from lightrft.cli.train import main

sys.path.append(str(Path(__file__).parents[1] / "quickstart"))
from defaults import DEFAULTS as SHARED  # noqa: E402

AGENT = import_module(os.environ["AGENT"])
DEFAULTS = SHARED | {
    "environment": AGENT.__file__,
    "apply_chat_template": True,
    "rollout_batch_size": 16,
    "train_batch_size": 128,
    "actor_learning_rate": 1e-3,
    "max_steps": 30,
} | AGENT.OPTIONS

if __name__ == "__main__":
    main(defaults=DEFAULTS, prog="train_colocate.py")
