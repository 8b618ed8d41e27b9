"""Flags of LightRFT's train_colocate.py, with the values of its scripts, else of its own, and what they do here."""
from typing import NamedTuple


class Asked(NamedTuple):
    """One flag with its words, and its outcome: "taken", "notice" (accepted, and the log says what for) or
    "refused"."""
    name: str
    words: tuple[str, ...]
    outcome: str


_TAKEN = """
engine_tp_size 2, engine_mem_util 0.6, enable_engine_sleep, disable_engine_sleep, fsdp, fsdp_cpu_offload
engine_type vllm, save_path results/run, save_steps 20, save_hf_ckpt, disable_ds_ckpt, ckpt_path results/run
max_ckpt_num 3, max_ckpt_mem 160, load_checkpoint, save_trajectories, num_trajectories_to_save 10, logging_steps 1
eval_steps 20, num_episodes 30, max_epochs 1, rollout_batch_size 128, micro_rollout_batch_size 4, n_samples_per_prompt 5
train_batch_size 128, micro_train_batch_size 4, prompt_max_len 1024, generate_max_len 2048, max_samples 1000000
max_eval_samples 1319, temperature 1.0, top_p 1.0, use_fire, first_token_temperature 10.0, actor_learning_rate 1e-6
critic_learning_rate 9e-6, lr_warmup_ratio 0.03, adam_betas 0.9 0.95, l2 1.0e-2, max_norm 1.0, ptx_coef 0.05
aux_loss_coef 0, freezing_actor_steps -1, advantage_estimator group_norm, eps_clip 0.2, value_clip 0.2, gamma 1.0
lambd 0.95, init_kl_coef 0.01, kl_target 6, kl_estimator k3, use_kl_loss, loss_agg_mode seq-mean-token-mean
high_entropy_token_ratio 0.2, reward_running_norm, reward_running_norm_minus_mean, reward_clip 0.0, advantage_clip 0.0
advantages_norm, dynamic_sampling, overlong_buffer, overlong_buffer_len 1024, overlong_buffer_penalty_factor 1.0
seed 42, zpg 1, bf16, gradient_checkpointing, adam_offload, overlap_comm, initial_model_shard_size 8
lora_rank 128, lora_alpha 256, lora_dropout 0, target_modules all-linear, pretrain Qwen/Qwen2.5-0.5B-Instruct
critic_pretrain Qwen/Qwen2.5-VL-7B-Instruct, remote_rm_url http://localhost:5000/get_reward, value_head_prefix score
save_value_network, prompt_data path/to/gsm8k, prompt_data_probs 1.0, prompt_split train, eval_data path/to/gsm8k
eval_split test, pretrain_data path/to/texts, pretrain_data_probs 1.0, pretrain_split train, input_key prompt
images_key images, reference_key reference, label_key label, input_template {}, apply_chat_template
system_prompt Think., wandb_org me, wandb_group grpo, wandb_project LightRFT-GSM8K-Experiments, wandb_run_name first
mark_high_entropy_tokens, trajectory_analysis
limit_mm_image_per_prompt 10, limit_mm_video_per_prompt -1, fps 2.0, max_pixels 282240
"""
_NOTICE = """
packing_samples, sp_size 1, use_mp_opt, rm_use_engine, rm_engine_cudagraph, rm_engine_tp 2, mixed_mm_data
fused_linear_logprob, chunk_size 4096, text_only, print_replay_buffer_stats, freeze_prefix, normalize_advantages
use_sequence_rewards, local_rank 0, actor_init_on_gpu, flash_attn, grad_accum_dtype fp32, disable_logprobs_flashattn
no_shard_vit, meta_init, reward_pretrain {}, use_wandb YOUR_WANDB_API_KEY, zero_stage 3
"""
_REFUSED = """
log_dir logs, plot_every 10, max_len 3072, enable_ema, use_cpg_loss
use_gspo, use_gmpo, clip_ratio_low 0.0003, clip_ratio_high 0.0004, normalize_reward_for_critic
gradient_checkpointing_use_reentrant, disable_fast_tokenizer, load_in_4bit, use_tensorboard runs, use_ms
system_prompt_path prompts.yaml, ckpt_path_local local
"""


def _asked(table: str, outcome: str) -> list[Asked]:
    flags = [entry.split() for line in table.split("\n") if line for entry in line.split(", ")]
    return [Asked(name, tuple(words), outcome) for name, *words in flags]


FLAGS: list[Asked] = [*_asked(_TAKEN, "taken"), *_asked(_NOTICE, "notice"), *_asked(_REFUSED, "refused")]
"""Those of examples/gsm8k_geo3k, of grm_vl_rl and r1_aqa, and rm_engine_tp of on_policy_distillation."""
