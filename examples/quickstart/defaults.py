"""Options that the quickstarts share: small batches of a tiny model, and something to look at every few steps."""
DEFAULTS = {
    "rollout_batch_size": 64,
    "n_samples_per_prompt": 8,
    "train_batch_size": 512,
    "prompt_max_len": 64,
    "advantage_estimator": "group_norm",
    "lr_scheduler": "linear",
    "lr_warmup_ratio": 0.0,
    "eval_at_start": True,
    "eval_steps": 5,
    "print_samples": 5,
    "save_steps": 20,
    "save_trajectories": True,
    "use_tensorboard": True,
    "logging_steps": 5,
    "strategy": "fsdp",
}
