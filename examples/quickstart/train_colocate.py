"""GRPO on the quickstart task: the trainer of :mod:`lightrft.cli.train` with the defaults of this task.

    torchrun --nproc-per-node 2 examples/quickstart/train_colocate.py --pretrain MODEL --prompt_data A --eval_data B

``run_quickstart.sh`` makes the data and the model and calls this; every option of the trainer works here.
"""
from pathlib import Path

from lightrft.cli.train import main

DEFAULTS = {
    "reward": [str(Path(__file__).with_name("reward.py")) + ":accuracy"],
    "rollout_batch_size": 64,
    "n_samples_per_prompt": 8,
    "train_batch_size": 512,
    "prompt_max_len": 64,
    "generate_max_len": 48,
    "advantage_estimator": "group_norm",
    "actor_learning_rate": 3e-4,
    "lr_scheduler": "linear",
    "lr_warmup_ratio": 0.0,
    "max_steps": 40,
    "eval_at_start": True,
    "eval_steps": 5,
    "max_eval_samples": 1000,
    "print_samples": 5,
    "save_steps": 20,
    "save_trajectories": True,
    "use_tensorboard": True,
    "logging_steps": 5,
    "strategy": "fsdp",
}

if __name__ == "__main__":
    main(defaults=DEFAULTS, prog="train_colocate.py")
