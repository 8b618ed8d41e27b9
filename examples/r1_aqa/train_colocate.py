"""RL on AVQA: the trainer of :mod:`lightrft.cli.train` with the defaults of this task.

    torchrun --nproc-per-node 1 examples/r1_aqa/train_colocate.py --pretrain MODEL --prompt_data A --media_root AUDIO

``run_grpo_r1_aqa_qwen2_audio_7b.sh`` calls this; every option of the trainer works here.
"""
from lightrft.cli.train import main

DEFAULTS = {
    "advantage_estimator": "group_norm",
    "kl_estimator": "k3",
    "n_samples_per_prompt": 8,
    "prompt_max_len": 512,
    "max_eval_samples": 0,
    "strategy": "fsdp",
}

if __name__ == "__main__":
    main(defaults=DEFAULTS, prog="train_colocate.py")
