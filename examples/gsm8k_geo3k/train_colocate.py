"""RL on GSM8K and Geometry3K: the trainer of :mod:`lightrft.cli.train` with the defaults of this task.

    torchrun --nproc-per-node 8 examples/gsm8k_geo3k/train_colocate.py --pretrain MODEL --prompt_data TRAIN

The ``run_*.sh`` call this; every option of the trainer works here. A row's label chooses its reward (``gsm8k_rule`` and
``geo3k_rule``: 0.9 x right answer + 0.1 x format); ``--reward`` replaces it.
"""
from lightrft.cli.train import main

DEFAULTS = {
    "advantage_estimator": "group_norm",
    "n_samples_per_prompt": 5,
    "generate_max_len": 2048,
    "max_eval_samples": 0,
    "strategy": "fsdp",
}

if __name__ == "__main__":
    main(defaults=DEFAULTS, prog="train_colocate.py")
