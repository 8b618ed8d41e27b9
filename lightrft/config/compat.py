"""Flags of the original LightRFT that are not options here: translated, or refused with the remedy."""
from typing import Any

# flag -> (option, value)
ALIASES: dict[str, tuple[str, Any]] = {
    "fsdp": ("strategy", "fsdp"),
    "disable_ds_ckpt": ("disable_ckpt", True),
    "enable_engine_sleep": ("engine_sleep", True),
    "disable_engine_sleep": ("engine_sleep", False),
}

_ALWAYS_PACKED = "batches are always packed, without padding; drop the flag"
_FLASH = "packed attention is always on and uses flash-attn when it is installed; drop the flag"
_MASTER = "master weights and optimizer state are always float32; use --bf16 for the compute dtype"
_RM_ENGINE = "reward models in an engine are not part of this release; serve the model and use --remote_rm_url"
_MULTIMODAL = "only language models are trained in this release; drop the flag"
_PRETRAIN_MIX = "mixing in a pretraining loss is not part of this release; drop the flag"
_ADVANTAGE = "it never had an effect; choose --advantage_estimator, and --advantages_norm to whiten"
_ANALYSIS = "use --save_trajectories and read SAVE_PATH/rollouts/step_N.jsonl"
_LENGTHS = "response lengths are in metrics.jsonl under rollout/response_len/*; drop the flag"

REFUSED: dict[str, str] = {
    # rollout engines
    "rm_use_engine": _RM_ENGINE,
    "rm_engine_cudagraph": _RM_ENGINE,
    "max_len": "use --prompt_max_len and --generate_max_len",
    # attention, packing, log-probs
    "packing_samples": _ALWAYS_PACKED,
    "flash_attn": _FLASH,
    "disable_logprobs_flashattn":
    "log-probs come from one fused, chunked kernel; use --logprob_chunk_mib to bound its memory",
    "fused_linear_logprob":
    "log-probs are always fused with the head and chunked; use --logprob_chunk_mib to bound their memory",
    "chunk_size": "use --logprob_chunk_mib",
    # distribution
    "sp_size": "sequence parallelism is not part of this release; use --max_tokens_per_micro_batch to bound memory",
    "grad_accum_dtype": "gradients are always accumulated in float32; drop the flag",
    "use_mp_opt": _MASTER,
    "meta_init": "models are always built without a spare copy; drop the flag",
    "actor_init_on_gpu": "models are placed by the strategy; drop the flag",
    "local_rank": "torchrun passes it in the environment (LOCAL_RANK); start with torchrun",
    "no_shard_vit": _MULTIMODAL,
    "mixed_mm_data": _MULTIMODAL,
    # models
    "text_only": _MULTIMODAL,
    "load_in_4bit": "4-bit weights are not part of this release; use --lora_rank with --bf16",
    "gradient_checkpointing_use_reentrant": "checkpointing is always non-reentrant; use --gradient_checkpointing",
    "enable_ema": "an averaged copy of the weights is not part of this release; use --best_metric to keep the best one",
    "disable_fast_tokenizer": "only fast tokenizers are supported; drop the flag",
    "use_ms": "download the model first and give its folder to --pretrain",
    # data
    "pretrain_data": _PRETRAIN_MIX,
    "pretrain_data_probs": _PRETRAIN_MIX,
    "pretrain_split": _PRETRAIN_MIX,
    "ptx_coef": _PRETRAIN_MIX,
    "aux_loss_coef": "the balance loss of mixture-of-experts models is not part of this release; drop the flag",
    "images_key": _MULTIMODAL,
    "limit_mm_image_per_prompt": _MULTIMODAL,
    "limit_mm_video_per_prompt": _MULTIMODAL,
    "fps": _MULTIMODAL,
    "max_pixels": _MULTIMODAL,
    "system_prompt_path": "use --system_prompt \"$(cat FILE)\"",
    # reward and algorithm
    "reward_pretrain": "reward models in the trainer are not part of this release; use --reward or --remote_rm_url",
    "normalize_reward_for_critic": "it never had an effect; use --reward_running_norm",
    "use_cpg_loss": "use --policy_loss cpgd, which has the drift term, or --recipe cpgd",
    "use_gspo": "it never had an effect; use --policy_loss gspo, or --recipe gspo",
    "normalize_advantages": _ADVANTAGE,
    "use_sequence_rewards": _ADVANTAGE,
    # output
    "log_dir": "everything is written below --save_path; use that",
    "ckpt_path_local": "use --ckpt_path",
    "plot_every": _LENGTHS,
    "mark_high_entropy_tokens": _ANALYSIS,
    "trajectory_analysis": _ANALYSIS,
    "print_replay_buffer_stats": "rollout statistics are in the step table and metrics.jsonl; use --logging_steps",
}


def refusal(name: str) -> str | None:
    """Explain why the original's flag ``name`` (without dashes) is refused, and what to use; ``None`` if it is not."""
    return f"--{name} is not an option here: {REFUSED[name]}" if name in REFUSED else None
