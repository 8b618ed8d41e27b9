"""Names of other trainers that no option here has, by the reason, which the error for such a flag says."""
_TOOLS = "--environment FILE, which answers the model with tools, a game or a user (docs/environments.md)"

_REASONS: dict[str, str] = {
    # models and adapters
    "the tokenizer and the processor are those of --pretrain":
    "processing_class reward_processing_classes tokenizer tokenizer_path input_tokenizer padding_side "
    "pad_to_multiple_of",
    "code of a model's folder is never run":
    "trust_remote_code external_lib custom_register_path",
    "download that revision, and give its folder to --pretrain":
    "model_revision",
    "config.json of the model says it":
    "model_type task_type num_labels rope_scaling ref_model_type reward_model_type",
    "--bf16 and --strategy say how a model is held":
    "model_init_kwargs model_kwargs device_map max_memory low_cpu_mem_usage use_shm",
    "adapters are plain LoRA: --lora_rank, --lora_alpha, --lora_dropout, --target_modules":
    "use_rslora use_dora lora_bias lora_task_type init_weights init_lora_weights lorap_lr_ratio use_swift_lora "
    "target_regex target_parameters exclude_modules lora_modules_to_save modules_to_save tuner_backend",
    "merge an adapter first: lightrft merge_lora":
    "adapters ref_adapters teacher_adapters reward_adapters",
    "quantized weights are not trained; use --lora_rank with --bf16":
    "load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_compute_dtype quant_method quant_bits",
    "all parameters have one learning rate":
    "vit_lr aligner_lr",
    "log-probs come from a fused, chunked kernel, in float32; --logprob_chunk_mib bounds its memory":
    "use_liger_loss use_fused_kernels use_logits_to_keep cast_lm_head_to_fp32 entropy_from_logits_with_chunking "
    "entropy_checkpointing",
    "graphs are not compiled":
    "use_torch_compile torch_compile torch_compile_backend torch_compile_mode torchdynamo",
    "--bf16 is the precision of computing; master weights are float32":
    "tf32 fp16_opt_level half_precision_backend bf16_full_eval fp16_full_eval",
    "training divides the parameters of all layers, not single layers, experts or sequences: --strategy":
    "megatron_tensor_model_parallel_size megatron_pipeline_model_parallel_size megatron_expert_model_parallel_size "
    "megatron_context_parallel_size deepspeed_autotp_size",
    "GPUs train with torchrun and --strategy, without a file of its own":
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_backend fsdp_min_num_params "
    "fsdp_transformer_layer_cls_to_wrap wrap_policy_min_num_params parallelism_config ds3_gather_for_generation "
    "reshard_after_forward forward_prefetch",
    "gradients live between a backward pass and its optimizer step":
    "fsdp_config_grad_offload",
    "an engine is divided within layers alone: --engine_tp_size":
    "rollout.pipeline_model_parallel_size",
    "activations are recomputed, not offloaded: --gradient_checkpointing":
    "enable_activation_offload",
    # processes
    "there is no Ray; torchrun starts the processes":
    "num_cpus num_infer_workers ray_address ray_wait_register_center_timeout use_legacy_worker_impl agent_num_workers",
    "all models share the GPUs of training; --engine_sleep, --offload_during_rollout and --reward_offload free them":
    "enable_resource_pool resource_pool resource_pool_spec global_pool_id",
    "training and engine always share the GPUs":
    "hybrid_engine",
    "a run takes the GPUs that it sees; an empty CUDA_VISIBLE_DEVICES leaves the CPU":
    "trainer.device no_cuda use_cpu use_mps_device",
    # algorithm
    "the coefficient stays at 0 or above":
    "adaptive_entropy_min_ent_coef",
    # data
    "rows are read and tokenized once, at the start":
    "cached_dataset lazy_tokenize dataset_streaming shuffle_buffer_size download_mode dataloader_pin_memory "
    "dataloader_prefetch_factor dataloader_persistent_workers return_raw_chat return_raw_input_ids "
    "return_multi_modal_inputs",
    "--prompt_data takes a file or folder with the rows of one configuration":
    "dataset_config",
    "held-out rows keep their order":
    "val_dataset_shuffle validation_shuffle",
    "held-out prompts are answered at once":
    "val_batch_size eval_accumulation_steps",
    "a batch is always full":
    "dataloader_drop_last",
    "batches are balanced by their tokens":
    "group_by_length length_column_name balance_batch",
    "rewards get all columns of a row":
    "remove_unused_columns label_names",
    "write them into a template: --chat_template FILE":
    "response_prefix template_backend",
    "rows in a form of your own are a data source of a --plugin (docs/extending.md)":
    "custom_dataset_info custom_cls_path",
    # sampling and engines
    "--temperature, --top_p, --top_k and --min_p are options of their own":
    "generation_kwargs",
    "responses are sampled from the model's own distribution":
    "num_beams vllm_structured_outputs_regex vllm_guided_decoding_regex structured_outputs_regex",
    "responses end at the end token or a --stop":
    "ignore_eos",
    "the engine schedules its requests; --engine_max_seqs bounds them":
    "rollout.mode enable_chunked_prefill use_transformers_paged cache_implementation vllm_use_async_engine",
    "the engine starts with the weights of training":
    "load_format layered_summon",
    "the engine shares the GPUs of training, and is started by it":
    "vllm_group_port vllm_server_pass_dataset vllm_data_parallel_size vllm_pipeline_parallel_size data_parallel_size",
    # algorithm
    "the reference stays as it is; --ref_pretrain chooses it":
    "ref_model_mixup_alpha ref_model_sync_steps",
    "Adam's epsilon is 1e-8":
    "adam_epsilon",
    "the optimizer is --optim adamw, adamw_8bit, sgd or one of a --plugin, with options of its own":
    "adafactor optim_args optim_target_modules",
    "losses count the tokens of all ranks":
    "average_tokens_across_devices",
    "embeddings get no noise":
    "neftune_noise_alpha",
    "--init_kl_coef and --kl_estimator have no such correction":
    "use_bias_correction_kl",
    "--rollout_correction masks by the ratio of trainer and engine alone":
    "off_policy_mask_threshold off_policy_sequence_mask_delta rollout_rs_threshold",
    "a function can be a reward: --reward path.py:function":
    "cosine_min_len_value_wrong cosine_max_len_value_wrong cosine_min_len_value_correct cosine_max_len_value_correct "
    "cosine_max_len repetition_n_grams repetition_max_penalty sandbox_fusion_url custom_reward_function_reward_kwargs",
    "rewards are computed while other responses are generated":
    "launch_reward_fn_async use_reward_loop",
    "--generate_max_len is the limit of --overlong_buffer":
    "max_resp_len completion_length_limit_scope",
    # output
    "a run uploads nothing; its folder hf is ready for huggingface-cli upload":
    "push_to_hub hub_model_id hub_token hub_strategy hub_private_repo hub_always_push log_completions_hub_repo",
    "the command lightrft evaluate measures a model":
    "val_only",
    "the command trains; --eval_steps evaluates":
    "do_train do_eval",
    "an earlier run in --save_path is renamed":
    "overwrite_output_dir add_version",
    "a checkpoint has all that a resumed run needs; --save_hf_ckpt adds a Hugging Face copy":
    "save_contents load_contents save_safetensors save_on_each_node create_checkpoint_symlink ignore_data_skip "
    "del_local_ckpt_after_load restore_callback_states_from_checkpoint",
    "everything is written below --save_path":
    "logging_dir default_hdfs_dir",
    "the environment variable LIGHTRFT_LOG_LEVEL has the level":
    "log_level log_level_replica log_on_each_node debug verbose",
    "the environment variable WANDB_MODE has it":
    "wandb_mode wandb_offline",
    "a log without a terminal has no bars":
    "disable_tqdm",
    "metrics.jsonl has times, memory and tokens per second of every step":
    "skip_memory_metrics include_tokens_per_second include_num_input_tokens_seen profiler_enable global_profiler_steps "
    "perf disable_log_stats",
    "metrics.jsonl has it in every run":
    "log_entropy log_rollout_offpolicy_metrics calculate_entropy",
    "held-out responses are scored by --reward":
    "compute_metrics metric include_for_metrics",
    "options of this program in YAML are given with --config FILE":
    "config_file config_path config_name",
    "a run over several machines is started by torchrun on each":
    "machine_rank main_process_ip main_process_port",
    "no part of a run here depends on it":
    "norm_bbox strict stream logprobs jit_mode_eval past_index ray_scope batch_eval_metrics eval_use_gather_object "
    "torch_empty_cache_steps logging_nan_inf_filter logging_first_step eval_delay acc_strategy check_model "
    "esi_redundant_time skip_rollout tensor_queue_size replay_buffer_size ignore_args_error load_args load_data_args",
    "a program of its own subclasses SPMDPPOTrainer":
    "callbacks",
}

NOTHING: dict[str, str] = {name: f"nothing, {reason}" for reason, names in _REASONS.items() for name in names.split()}
NOTHING |= dict.fromkeys(
    ("tools", "rollout_func", "environment_factory", "max_tool_calling_iterations", "mask_tool_call",
     "multi_turn_scheduler", "multi_turn_enable", "multi_turn_max_turns", "multi_turn_max_assistant_turns",
     "multi_turn_tool_config_path", "multi_turn_format", "tool_config_path", "agent_template", "env", "env_path",
     "tool_path", "tools_path", "tool_file", "tools_file"), _TOOLS)
"""Names of other trainers -> why there is no flag here."""
