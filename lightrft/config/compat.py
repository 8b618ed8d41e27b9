"""Flags of LightRFT, TRL, ms-swift and verl that are not options here: translated, or refused with the remedy."""
import re
from collections.abc import Container
from typing import Any

# flag -> (option, value)
ALIASES: dict[str, tuple[str, Any]] = {
    "fsdp": ("strategy", "fsdp"),
    "disable_ds_ckpt": ("disable_ckpt", True),
    "enable_engine_sleep": ("engine_sleep", True),
    "disable_engine_sleep": ("engine_sleep", False),
}

_ALWAYS_PACKED = "batches are always packed, without padding; drop the flag"
_SEQUENCES = "sequence parallelism is not part of this release; use --max_tokens_per_micro_batch to bound memory"
_FLASH = "packed attention is always on and uses flash-attn when it is installed; drop the flag"
_MASTER = "master weights and optimizer state are always float32; use --bf16 for the compute dtype"
_RM_ENGINE = "reward models in an engine are not part of this release; serve the model and use --remote_rm_url"
_MULTIMODAL = "the model says whether it sees or hears, and rows with and without media may be mixed; drop the flag"
_ADVANTAGE = "it never had an effect; choose --advantage_estimator, and --advantages_norm to whiten"
_ANALYSIS = "use --save_trajectories and read SAVE_PATH/rollouts/step_N.jsonl"
_LENGTHS = "response lengths are in metrics.jsonl under rollout/response_len/*; drop the flag"
_CARD = "the model card is written from the run; drop the flag"
_WORKERS = "the data of a run are prepared before it, in as many threads as help; drop the flag"
_OWN_ENGINE = "the engine shares the GPUs of training, and is started by it; use --engine_type"
_STUDENT = "distillation on the student's own answers is reinforcement learning: lightrft train with --teacher_model"

REFUSED: dict[str, str] = {
    # rollout engines
    "rm_use_engine": _RM_ENGINE,
    "rm_engine_cudagraph": _RM_ENGINE,
    "max_len": "use --prompt_max_len and --generate_max_len",
    "enable_prefix_caching": "vLLM and SGLang keep the prefixes that prompts share; drop the flag",
    "micro_batch_size": "the engine decides how many sequences it runs at once; --engine_max_seqs bounds them",
    "repetition_penalty": "responses are drawn from the model's own distribution; drop the flag",
    # attention, packing, log-probs
    "packing_samples": _ALWAYS_PACKED,
    "flash_attn": _FLASH,
    "attn_implementation": _FLASH,
    "disable_logprobs_flashattn":
    "log-probs come from one fused, chunked kernel; use --logprob_chunk_mib to bound its memory",
    "fused_linear_logprob":
    "log-probs are always fused with the head and chunked; use --logprob_chunk_mib to bound their memory",
    "chunk_size": "use --logprob_chunk_mib",
    "packing": _ALWAYS_PACKED,
    "padding_free": _ALWAYS_PACKED,
    "attn_impl": _FLASH,
    # distribution
    "sp_size": _SEQUENCES,
    "ring_attn_size": _SEQUENCES,
    "ring_head_stride": _SEQUENCES,
    "sequence_parallel_size": _SEQUENCES,
    "ds_tensor_parallel_size": "training shards parameters and not single layers; use --strategy with --zero_stage 3",
    "deepcompile": "graphs are not compiled; drop the flag",
    "grad_accum_dtype": "gradients are always accumulated in float32; drop the flag",
    "use_mp_opt": _MASTER,
    "move_model_batches": "weights go to the engine in parts of --sync_bucket_mib; drop the flag",
    "gc_collect_after_offload": "memory is handed back whenever it is offloaded; drop the flag",
    "meta_init": "models are always built without a spare copy; drop the flag",
    "actor_init_on_gpu": "models are placed by the strategy; drop the flag",
    "use_ds_universal_ckpt": "a checkpoint loads on any number of ranks and with any --strategy; drop the flag",
    "full_determinism":
    "--seed fixes data, samples and dropout, and GPU kernels may still round otherwise; drop the flag",
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
    "use_hf": "a hub id is one of Hugging Face, or of its mirror in HF_ENDPOINT; drop the flag",
    "model_author": _CARD,
    "model_name": _CARD,
    # data
    "system_prompt_path": "use --system_prompt \"$(cat FILE)\"",
    "streaming": "rows are tokenized once, at the start; --max_samples bounds them",
    "load_from_cache_file": "rows are tokenized at every start; drop the flag",
    "dataset_num_proc": _WORKERS,
    "dataloader_num_workers": _WORKERS,
    "truncation_strategy": "rows beyond the limit are left out and counted, never cut; drop the flag",
    # preferences
    "unpaired_preference": "lightrft kto always reads single answers, each with its label; drop the flag",
    "vanilla_loss": "the KL of lightrft kto always comes from mismatched pairs; drop the flag",
    # reward and algorithm
    "margin": "a margin is that of a row, in its column margin; drop the flag",
    "center_rewards_coefficient": "--normalize_reward centres the rewards of a trained model; drop the flag",
    "margin_loss": "the loss of a reward model reads the column margin where rows have it; drop the flag",
    "compute_fp32_loss": "scores and losses are always float32; drop the flag",
    "normalize_reward_for_critic": "it never had an effect; use --reward_running_norm",
    "vf_coef": "the critic is a model of its own; use --critic_learning_rate",
    "missing_eos_penalty": "use --mask_truncated or --overlong_buffer",
    "sync_ref_model": "the reference stays as it is; use --ref_pretrain to choose it",
    "num_sample_generations": "use --print_samples and --save_trajectories",
    "async_generate": _OWN_ENGINE,
    "vllm_server_host": _OWN_ENGINE,
    "vllm_server_port": _OWN_ENGINE,
    "lmbda": _STUDENT,
    "seq_kd": _STUDENT,
    "use_cpg_loss": "use --policy_loss cpgd, which has the drift term, or --recipe cpgd",
    "use_gspo": "it never had an effect; use --policy_loss gspo, or --recipe gspo",
    "normalize_advantages": _ADVANTAGE,
    "use_sequence_rewards": _ADVANTAGE,
    # output
    "save_only_model": "the model is always exported at the end; --disable_ckpt writes no checkpoints",
    "log_dir": "everything is written below --save_path; use that",
    "ckpt_path_local": "use --ckpt_path",
    "plot_every": _LENGTHS,
    "mark_high_entropy_tokens": _ANALYSIS,
    "trajectory_analysis": _ANALYSIS,
    "print_replay_buffer_stats": "rollout statistics are in the step table and metrics.jsonl; use --logging_steps",
}

_BATCH = "--train_batch_size: samples per optimizer step, over all ranks and micro-batches"
_MICRO = "--micro_train_batch_size or --max_tokens_per_micro_batch"
_CLIP = "--eps_clip and --eps_clip_high"
_KL = "--init_kl_coef, with --use_kl_loss for a KL in the loss"
_LORA = "--lora_rank for LoRA; without it all parameters are trained"
_RANKS = "torchrun: --nproc-per-node, --nnodes"

ELSEWHERE: dict[str, str] = {
    # TRL, ms-swift
    "model": "--pretrain",
    "model_name_or_path": "--pretrain",
    "model_id_or_path": "--pretrain",
    "load_model": "--pretrain, which may be a checkpoint",
    "ref_model": "--ref_pretrain",
    "teacher_deepspeed": "--teacher_offload",
    "reward_model": "--reward_pretrain",
    "num_generations": "--n_samples_per_prompt",
    "generation_batch_size": "--rollout_batch_size, which counts prompts",
    "per_device_train_batch_size": f"{_BATCH}; {_MICRO} bounds one forward pass",
    "per_device_eval_batch_size": f"{_MICRO}, as in training",
    "gradient_accumulation_steps": _BATCH,
    "steps_per_generation": _BATCH,
    "num_mini_batches": _BATCH,
    "local_rollout_forward_batch_size": "--micro_rollout_batch_size or --max_tokens_per_micro_batch",
    "num_ppo_epochs": "--max_epochs",
    "batch_size": "--train_batch_size | --max_tokens_per_micro_batch, which bounds a pass by its tokens",
    "num_iterations": "--max_epochs",
    "num_train_epochs": "--num_episodes | --max_epochs",
    "max_completion_length": "--generate_max_len | nothing, it draws no answers",
    "max_prompt_length": "--prompt_max_len",
    "max_length": "--max_len | --prompt_max_len and --generate_max_len",
    "vllm_max_model_len": "--prompt_max_len and --generate_max_len",
    "response_length": "--generate_max_len",
    "soft_max_length": "--generate_max_len with --overlong_buffer_len",
    "soft_cache_length": "--overlong_buffer_len",
    "stop_words": "--stop",
    "learning_rate": "--actor_learning_rate",
    "beta": f"{_KL} | --js_mix, with --divergence js",
    "kl_coef": _KL,
    "lam": "--lambd",
    "cliprange": _CLIP,
    "cliprange_value": "--value_clip",
    "whiten_rewards": "--reward_running_norm",
    "rpo_alpha": "--nll_loss_coef",
    "cpo_alpha": "--nll_loss_coef, with --loss simpo",
    "sft_alpha": "--kd_coef, the share of the teacher; the rest is that of the answers",
    "dynamic_sample": "--dynamic_sampling",
    "max_resample_times": "--max_gen_rounds",
    "overlong_filter": "--mask_truncated",
    "epsilon": "--eps_clip",
    "epsilon_high": "--eps_clip_high",
    "delta": "--dual_clip",
    "scale_rewards": "--advantage_estimator group_norm or dr_grpo",
    "loss_type": "--loss_agg_mode and --policy_loss | --loss",
    "multi_objective_aggregation": "--advantage_estimator gdpo",
    "importance_sampling_level": "--policy_loss gspo",
    "reward_funcs": "--reward",
    "reward_weights": "--reward name=weight",
    "external_plugins": "--reward path.py:function",
    "max_grad_norm": "--max_norm",
    "weight_decay": "--l2",
    "warmup_ratio": "--lr_warmup_ratio",
    "lr_scheduler_type": "--lr_scheduler",
    "adam_beta1": "--adam_betas",
    "adam_beta2": "--adam_betas",
    "freeze_vit": "--freeze_prefix visual",
    "log_completions": "--save_trajectories",
    "output_dir": "--save_path",
    "save_strategy": "--save_steps",
    "eval_strategy": "--eval_steps",
    "logging_strategy": "--logging_steps",
    "load_best_model_at_end": "--best_metric",
    "metric_for_best_model": "--best_metric",
    "save_total_limit": "--max_ckpt_num",
    "resume_from_checkpoint": "--load_checkpoint",
    "mask_truncated_completions": "--mask_truncated",
    "top_entropy_quantile": "--high_entropy_token_ratio",
    "use_adaptive_entropy": "--entropy_target",
    "vllm_importance_sampling_mode": "--rollout_correction",
    "vllm_importance_sampling_clip_min": "--correction_low",
    "vllm_importance_sampling_clip_max": "--correction_high",
    "use_vllm": "--engine_type vllm",
    "vllm_mode": "--engine_type vllm, which shares the GPUs of training",
    "vllm_gpu_memory_utilization": "--engine_mem_util",
    "vllm_tensor_parallel_size": "--engine_tp_size",
    "dataset": "--prompt_data | --train_data",
    "dataset_probs": "--prompt_data_probs | no weights; a source that --train_data names twice counts twice",
    "val_dataset": "--eval_data",
    "split_dataset_ratio": "--eval_data, rows of their own",
    "dataset_split": "--prompt_split | --train_split",
    "eval_dataset": "--eval_data",
    "torch_dtype": "--bf16",
    "param_dtype": "--bf16",
    "data_type": "--bf16",
    "use_liger_kernel": "--use_liger",
    "tokenizer_chat_template": "--chat_template",
    "template": "--chat_template; that of the tokenizer is the default",
    "system": "--system_prompt",
    "ta_prompt": "--system_prompt",
    "dataset_name": "--prompt_data | --train_data",
    "dataset_path": "--prompt_data | --train_data",
    "report_to": "--use_tensorboard, --use_wandb or --use_trackio",
    "run_name": "--wandb_run_name",
    "rlhf_type": "the name of the command: lightrft dpo (orpo, simpo, cpo), kto, rm, kd (gkd) or train (grpo, ppo)",
    "train_type": _LORA,
    "tuner_type": _LORA,
    "sft_type": _LORA,
    "lora_dropout_p": "--lora_dropout",
    "lora_target_modules": "--target_modules",
    "offload_model": "--engine_sleep and --offload_during_rollout",
    "offload_optimizer": "--adam_offload",
    "sleep_level": "--engine_sleep",
    "vllm_limit_mm_per_prompt": "--limit_mm_image_per_prompt and its like",
    "vllm_enforce_eager": "--engine_args enforce_eager=true",
    "deepspeed": "--strategy deepspeed with --zero_stage",
    # verl, without actor_rollout_ref
    "data.train_files": "--prompt_data | --train_data",
    "data.val_files": "--eval_data",
    "data.train_batch_size": "--rollout_batch_size",
    "data.max_prompt_length": "--prompt_max_len",
    "data.max_response_length": "--generate_max_len",
    "actor.ppo_mini_batch_size": "--train_batch_size, which counts samples: multiply by --n_samples_per_prompt",
    "actor.ppo_micro_batch_size_per_gpu": "--micro_train_batch_size",
    "actor.ppo_max_token_len_per_gpu": "--max_tokens_per_micro_batch",
    "actor.ppo_epochs": "--max_epochs",
    "actor.optim.lr": "--actor_learning_rate",
    "critic.optim.lr": "--critic_learning_rate",
    "actor.clip_ratio": _CLIP,
    "actor.clip_ratio_low": "--eps_clip",
    "actor.clip_ratio_high": "--eps_clip_high",
    "actor.clip_ratio_c": "--dual_clip",
    "actor.entropy_coeff": "--entropy_coef",
    "actor.use_kl_loss": "--use_kl_loss",
    "actor.kl_loss_coef": _KL,
    "actor.kl_loss_type": "--kl_estimator",
    "actor.loss_agg_mode": "--loss_agg_mode",
    "actor.policy_loss.loss_mode": "--policy_loss",
    "rollout.n": "--n_samples_per_prompt",
    "rollout.name": "--engine_type",
    "rollout.temperature": "--temperature",
    "rollout.top_p": "--top_p",
    "rollout.tensor_model_parallel_size": "--engine_tp_size",
    "rollout.gpu_memory_utilization": "--engine_mem_util",
    "model.path": "--pretrain",
    "algorithm.adv_estimator": "--advantage_estimator",
    "algorithm.use_kl_in_reward": "--init_kl_coef without --use_kl_loss",
    "algorithm.kl_ctrl.kl_coef": _KL,
    "algorithm.kl_penalty": "--kl_estimator",
    "actor.policy_loss.ppo_kl_coef": "--kl_cov_coef",
    "algorithm.rollout_correction.rollout_is": "--rollout_correction",
    "algorithm.rollout_correction.rollout_is_threshold": "--correction_high and --correction_low",
    "algorithm.rollout_correction.bypass_mode": "--rollout_correction bypass",
    "algorithm.norm_adv_by_std_in_grpo": "--advantage_estimator dr_grpo",
    "algorithm.gamma": "--gamma",
    "algorithm.lam": "--lambd",
    "custom_reward_function.path": "--reward path.py:function",
    "trainer.total_epochs": "--num_episodes",
    "trainer.total_training_steps": "--max_steps",
    "trainer.save_freq": "--save_steps",
    "trainer.test_freq": "--eval_steps",
    "trainer.val_before_train": "--eval_at_start",
    "trainer.project_name": "--wandb_project",
    "trainer.experiment_name": "--wandb_run_name",
    "trainer.n_gpus_per_node": _RANKS,
    "trainer.nnodes": _RANKS,
    "trainer.default_local_dir": "--save_path",
    "trainer.logger": "--use_tensorboard, --use_wandb or --use_trackio",
    "trainer.resume_mode": "--load_checkpoint",
}
"""Names of other trainers (docs/coming_from.md) -> flags here; after a bar, that of supervised fine-tuning."""

_TYPED = "nothing, write the reward into the message, such as <rm_score>: 5.00"
SIBLINGS: dict[str, str] = {
    "reward": "--score",
    "train_data": "--prompt_data",
    "prompt_data": "--train_data | --eval_data",
    "n_samples_per_prompt": "--n_samples",
    "actor_learning_rate": "--learning_rate",
    "save_path": "--output_path",
    "prompt_max_len": "--max_len",
    "task_instruction": "--input_template or --system_prompt, for the question of every row",
    "enable_csft": _TYPED,
    "csft_prompt": _TYPED,
    "temperature": "nothing, it draws no answers",
    "zero_stage": "--engine_tp_size, with --engine_type vllm or sglang | nothing, a process holds the whole model",
    "value_head_prefix": "nothing, config.json of a reward model names its head",
}
"""Options of a command of this package -> those of the others that mean the same."""


def refusal(name: str, known: Container[str] = ()) -> str | None:
    """Explain why a flag of another trainer or command, ``name`` (without dashes), is refused, and what to use instead.

    Args:
        known: options of the tree; a counterpart is named if it is one of them.

    Returns:
        None for a name that is not known, or has no counterpart in the tree.
    """
    asked = name.replace("-", "_")
    if asked in REFUSED:
        return f"--{name} is not an option here: {REFUSED[asked]}"
    for names, home in ((ELSEWHERE, "trainer"), (SIBLINGS, "command")):
        for remedy in names.get(asked.removeprefix("actor_rollout_ref."), "").split(" | "):
            flag = re.match(r"--(\w+)", remedy)
            if remedy and (flag is None or flag[1] in known):
                return f"{name} is an option of another {home}; here: {remedy}"
    return None
