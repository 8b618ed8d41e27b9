"""RL of a judge: the trainer of :mod:`lightrft.cli.train` with the defaults of this task.

    torchrun --nproc-per-node 8 examples/grm_vl_rl/train_colocate.py --pretrain MODEL --prompt_data A

``run_grm_vl_rl.sh`` calls this; every option of the trainer works here.
"""
from pathlib import Path

from lightrft.cli.train import main

REWARD = Path(__file__).with_name("reward.py")
DEFAULTS = {
    "advantage_estimator": "group_norm",
    "kl_estimator": "k3",
    "n_samples_per_prompt": 8,
    "loss_agg_mode": "seq-mean-token-sum",
    "fps": 2.0,
    "max_pixels": 360 * 28 * 28,
    "reward": [f"{REWARD}:accuracy", f"{REWARD}:form"],
    "strategy": "fsdp",
}

if __name__ == "__main__":
    main(defaults=DEFAULTS, prog="train_colocate.py")
