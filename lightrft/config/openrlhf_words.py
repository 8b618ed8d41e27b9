"""Flags of OpenRLHF whose options have other names here."""
_VLLM = "engine_type=vllm"
_EAGER = f"{_VLLM} engine_args+=enforce_eager=true"

OPENRLHF: dict[str, str] = {
    "vllm_num_engines": f"{_VLLM} engine_count",
    "vllm_tensor_parallel_size": f"{_VLLM} engine_tp_size",
    "vllm_gpu_memory_utilization": f"{_VLLM} engine_mem_util",
    "vllm_enable_sleep": f"{_VLLM} engine_sleep",
    "vllm_enforce_eager": _EAGER,
    "enforce_eager": _EAGER,
    "deepspeed_enable_sleep": "offload_during_rollout",
    "ds_enable_sleep": "offload_during_rollout",
    "fsdp_enable_sleep": "offload_during_rollout",
    "ref_reward_offload": "reward_offload?reward_pretrain offload_during_rollout",
    "rollout_micro_batch_size": "micro_rollout_batch_size",
    "train_micro_batch_size": "micro_train_batch_size",
    "reward_remote_url": "remote_rm_url",
    "tokenizer_chat_template": "chat_template",
    "max_epoch": "max_epochs",
    "param_dtype": "bf16",
    "model_name_or_path": "pretrain",
    "ckpt_save_path": "save_path",
    "eval_dataset": "eval_data",
    "eval_n_samples_per_prompt": "eval_n_samples",
}
"""Flag, with underscores for dots -> what it sets, in the notation of ``SYNONYMS`` of the trees."""


def counterpart(meant: str) -> str:
    """Spell what a flag sets as an answer: ``--engine_tp_size, with --engine_type vllm``."""
    *others, last = (f"--{part.partition('?')[0].replace('+=', '=').replace('=', ' ', 1)}" for part in meant.split())
    return ", with ".join([last, *others])
