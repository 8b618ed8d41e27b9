"""For every option: a run that shows what flipping it changes, or the test elsewhere that does. See test_options."""
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from lightrft.algorithms.base import REGISTRIES
from lightrft.config.schema import Config
from lightrft.config.tree import options
from lightrft.tests.support import environments
from lightrft.tests.support.own_options import OPTIM, own_options
from lightrft.tests.support.runs import Run

# strings that stand for paths: @other (a model), @train, @test, @chats (data), @run (the folder of the run)
GAE = {"advantage_estimator": "gae"}
KL = {"init_kl_coef": 0.1}
TAUGHT = {"teacher_model": "@other"}
LORA = {"lora_rank": 2}
PLAIN = {"advantage_estimator": "reinforce"}
EVAL = {"eval_data": ["@test"], "eval_steps": -1}
SAMPLED = {**EVAL, "eval_n_samples": 2, "eval_temperature": 1.0}
SAVING = {"disable_ckpt": False, "save_steps": 1, "max_steps": 3, "async_save": False}
MOVING = {"max_epochs": 3, "actor_learning_rate": 0.003}
LONG = {"overlong_buffer": True, "overlong_buffer_len": 8}
TIS = {"rollout_correction": "tis", "bf16": True}
ENTROPY = {"entropy_target": 50.0, "max_steps": 2}
PTX = {"pretrain_data": ["@chats"], "pretrain_max_len": 200, "ptx_batch_size": 2}
ECHO = {"environment": f"{environments.__file__}:Echo", "generate_max_len": 24}
TWO, FOUR = {"max_steps": 2}, {"max_steps": 4}


@dataclass
class Seen:
    """A run, and what was counted while it ran."""
    run: Run
    calls: list[tuple[Any, ...]] = field(default_factory=list)  # of the strategy: (name, argument)
    forwards: int = 0  # of the actor

    def count(self) -> None:
        """One more forward pass."""
        self.forwards += 1


Watch = Callable[[Seen], Any]


@dataclass(frozen=True)
class Flip:
    """``watch`` must differ between a run with ``base`` and the same run with the option at ``value``."""
    value: Any
    watch: Watch
    base: dict[str, Any] = field(default_factory=dict)


def metric(name: str, line: int = -1) -> Watch:
    """A number of ``metrics.jsonl``, which must be there in both runs."""
    return lambda seen: seen.run.lines[line][name]


def metric_lines(name: str) -> Watch:
    """The lines that have a metric."""
    return lambda seen: [line["step"] for line in seen.run.lines if name in line]


def recorded(name: str) -> Watch:
    """Whether the samples of the report have this number of each token."""
    return lambda seen: f'"{name}"' in (seen.run.folder / "samples.jsonl").read_text(encoding="utf-8")


def keys(seen: Seen) -> set[str]:
    """Names of the metrics."""
    return {name for line in seen.run.lines for name in line}


def files(seen: Seen) -> set[str]:
    """Files that the run left."""
    return {str(path.relative_to(seen.run.folder)) for path in seen.run.folder.rglob("*") if path.is_file()}


def weights(seen: Seen) -> str:
    """A digest of every trained weight."""
    digest = blake2b()
    for prepared in seen.run.trainer.prepared.values():
        for _, value in seen.run.trainer.strategy.full_params(prepared.model):
            digest.update(value.detach().numpy().tobytes())
    return digest.hexdigest()


def said(key: str, step: int = 1) -> Watch:
    """Keys of the rows of a rollout."""
    return lambda seen: [row[key] for row in seen.run.rollout(step)]


def steps(seen: Seen) -> list[tuple[int, bool]]:
    """The steps that have a line, evaluations separate apart."""
    return [(line["step"], "eval/all/len" in line) for line in seen.run.lines]


def forwards(seen: Seen) -> int:
    """Forward passes of the actor."""
    return seen.forwards


def calls(name: str) -> Watch:
    """Calls of the strategy."""
    return lambda seen: [call for call in seen.calls if call[0] == name]


def train_prompts(seen: Seen) -> int:
    """Number of prompts to train on."""
    return len(seen.run.trainer.loader.dataset)


def eval_prompts(seen: Seen) -> int:
    """Number of held-out prompts."""
    return len(seen.run.trainer.evaluator.prompts)


FLIPS: dict[str, Flip] = {
    # model
    "pretrain": Flip("@other", weights),
    "bf16": Flip(True, metric("rollout/mismatch/abs_logp_mean")),
    "lora_rank": Flip(2, files),
    "lora_alpha": Flip(64, weights, LORA),
    "lora_dropout": Flip(0.5, weights, LORA | TWO),
    "target_modules": Flip(["q_proj"], weights, LORA),
    "freeze_prefix": Flip(["model.embed_tokens"], weights),
    "logprob_chunk_mib": Flip(3, lambda seen: seen.run.trainer.prepared["actor"].model.chunk_mib),
    "ref_pretrain": Flip("@other", metric("reward/kl"), KL),
    "teacher_model": Flip("@other", keys),
    "teacher_offload": Flip(True, calls("offload"), TAUGHT),
    "initial_model_shard_size": Flip(1, calls("prepare"), KL),
    "critic_pretrain": Flip("@other", weights, GAE),
    "save_value_network": Flip(True, files, GAE),
    # strategy
    # rollout
    "rollout_batch_size": Flip(2, metric("rollout/prompts"), {"train_batch_size": 4}),
    "n_samples_per_prompt": Flip(4, metric("rollout/samples")),
    "dynamic_sampling": Flip(True, keys),
    "oversample": Flip(1.5, keys, TWO),
    "max_staleness": Flip(2, metric("rollout/partial/due", 1), {"oversample": 2.0} | FOUR),
    "overlap_passes": Flip(True, keys, KL),
    "use_fire": Flip(True, said("response")),
    "first_token_temperature": Flip(2.0, said("response"), {"use_fire": True}),
    "max_gen_rounds": Flip(2, metric("rollout/rounds"), {"dynamic_sampling": True, "zero_spread": 10.0}),
    "prompt_max_len": Flip(12, train_prompts),
    "generate_max_len": Flip(5, metric("rollout/response_len/max")),
    "stages": Flip(["5:1", "12"], metric("rollout/response_len/max", 0), TWO),
    "temperature": Flip(0.5, said("response")),
    "environment": Flip(ECHO["environment"], metric("rollout/response_len/mean"), {"generate_max_len": 24}),
    "max_turns": Flip(1, metric("env/turns/mean"), ECHO),
    "top_p": Flip(0.5, said("response")),
    "top_k": Flip(2, said("response")),
    "min_p": Flip(0.5, said("response")),
    "stop": Flip(["A", "B", "C", "1", "2"], said("response")),
    "micro_rollout_batch_size": Flip(2, forwards, KL),
    "sync_proof": Flip("off", keys),
    "sync_canary_every": Flip(2, metric_lines("rollout/canary_gap"), {"sync_proof": "both"} | FOUR),
    # data
    "prompt_data": Flip(["@test"], train_prompts),
    "prompt_data_probs": Flip([0.1, 0.9], said("uid"), {"prompt_data": ["@train", "@test"]}),
    "eval_data": Flip(["@test"], keys, {"eval_steps": -1}),
    "eval_suite": Flip(["gsm8k=@gsm8k"], keys, {"eval_steps": -1, "prompt_max_len": 400}),
    "max_samples": Flip(5, train_prompts),
    "max_eval_samples": Flip(3, eval_prompts, EVAL),
    "apply_chat_template": Flip(True, said("prompt"), {"prompt_max_len": 200}),
    "input_template": Flip("Q: {}", said("prompt")),
    "shuffle": Flip(False, said("uid")),
    # reward
    "reward": Flip(["format"], keys, {"reward": ["exact"]}),
    "reward_clip": Flip(0.1, metric("advantage/max"), PLAIN),
    "reward_running_norm": Flip(True, metric("advantage/max"), PLAIN),
    "reward_running_norm_minus_mean": Flip(True, metric("advantage/max"), PLAIN | {"reward_running_norm": True}),
    "overlong_buffer": Flip(True, metric("advantage/min"), PLAIN),
    "overlong_buffer_len": Flip(3, metric("reward/overlong_penalty"), LONG),
    "overlong_buffer_penalty_factor": Flip(0.5, metric("reward/overlong_penalty"), LONG),
    "mask_truncated": Flip(True, metric("policy/grad_norm"), {"generate_max_len": 6}),
    # algorithm
    "recipe": Flip("dr_grpo", metric("policy/grad_norm")),
    "semantics": Flip("trl", metric("advantage/max")),
    "policy_loss": Flip("gspo", metric("policy/grad_norm"), MOVING),
    "advantage_estimator": Flip("rloo", metric("policy/grad_norm")),
    "loss_agg_mode": Flip("seq-mean-token-sum", metric("policy/grad_norm")),
    "loss_agg_norm": Flip(3, metric("policy/grad_norm"), {"loss_agg_mode": "seq-mean-token-sum-norm"}),
    "loss_agg_norm_seqs": Flip(False, metric("policy/grad_norm"), {"loss_agg_mode": "seq-mean-token-sum-norm"}),
    "loss_agg_all_seqs": Flip(True, metric("policy/grad_norm"),
                              {"loss_agg_mode": "seq-mean-token-mean", "mask_truncated": True, "generate_max_len": 6}),
    "eps_clip": Flip(0.01, metric("policy/clip_frac_low"), MOVING),
    "eps_clip_high": Flip(0.01, metric("policy/clip_frac_high"), MOVING),
    "value_clip": Flip(0.01, weights, GAE | {"max_epochs": 4, "critic_learning_rate": 0.1}),
    "gamma": Flip(0.5, metric("policy/grad_norm")),
    "lambd": Flip(0.5, metric("advantage/mean"), GAE),
    "std_eps": Flip(0.5, metric("advantage/max")),
    "pass_k": Flip(2, metric("advantage/mean"),
                   {"advantage_estimator": "grpo_passk", "n_samples_per_prompt": 3, "train_batch_size": 12}),
    "norm_group_std": Flip(True, metric("advantage/max"), {"advantage_estimator": "cpgd"}),
    "whiten_flat_groups": Flip(True, metric("advantage/mean"),
                               {"advantage_estimator": "reinforce_baseline", "zero_spread": 0.3}),
    "gdpo_whiten_tokens": Flip(True, metric("advantage/max"), {"advantage_estimator": "gdpo"}),
    "zero_spread": Flip(10.0, metric("group/zero_spread_frac")),
    "advantages_norm": Flip(True, metric("advantage/mean"), PLAIN),
    "whiten_unbiased": Flip(True, metric("advantage/max"), {"advantage_estimator": "reinforce++"}),
    "advantage_clip": Flip(0.1, metric("policy/grad_norm")),
    "init_kl_coef": Flip(1.0, weights, KL | TWO),
    "kl_estimator": Flip("k2", metric("reward/kl"), KL | TWO),
    "k3_max": Flip(1e-6, metric("reward/kl"), KL | {"kl_estimator": "k3", "ref_pretrain": "@other"}),
    "kl_in_outcome": Flip(True, metric("advantage/max"), KL | {"ref_pretrain": "@other"}),
    "use_kl_loss": Flip(True, keys, KL),
    "kl_target": Flip(0.01, metric("policy/kl_coef"), KL | TWO),
    "kl_horizon": Flip(100, metric("policy/kl_coef"), KL | TWO | {"kl_target": 0.01}),
    "kd_coef": Flip(0.1, metric("advantage/max"), TAUGHT),
    "kd_gamma": Flip(0.9, metric("advantage/max"), TAUGHT),
    "rollout_correction": Flip("bypass", forwards, {"max_epochs": 2}),
    "correction_low": Flip(1.0, metric("policy/correction_bound_frac"), TIS),
    "correction_high": Flip(1.0, metric("policy/correction_bound_frac"), TIS),
    "correction_veto": Flip(0.999, metric("policy/correction_veto_frac"), TIS),
    "entropy_coef": Flip(0.1, metric("policy/grad_norm")),
    "entropy_token_mean": Flip(True, metric("policy/grad_norm"),
                               {"entropy_coef": 0.1, "loss_agg_mode": "seq-mean-token-sum"}),
    "entropy_target": Flip(50.0, metric("policy/entropy_coef"), {"entropy_coef": 0.001} | TWO),
    "entropy_step": Flip(0.001, metric("policy/entropy_coef"), ENTROPY),
    "entropy_coef_max": Flip(5e-5, metric("policy/entropy_coef"), ENTROPY),
    "high_entropy_token_ratio": Flip(0.3, metric("policy/grad_norm")),
    # train
    "train_batch_size": Flip(4, metric("policy/optimizer_steps")),
    "micro_train_batch_size": Flip(2, forwards),
    "max_tokens_per_micro_batch": Flip(40, forwards),
    "max_steps": Flip(2, steps),
    "lr_scheduler": Flip("linear", metric("policy/lr"), FOUR),
    "lr_warmup_ratio": Flip(0.9, metric("policy/lr", 0), FOUR),
    "lr_min_ratio": Flip(0.5, metric("policy/lr"), FOUR | {"lr_scheduler": "cosine_with_min_lr"}),
    "optim": Flip("adamw_8bit", weights, TWO),
    "adam_betas": Flip([0.5, 0.6], weights, TWO),
    "l2": Flip(0.5, weights),
    "max_norm": Flip(0.01, weights, TWO),
    "seed": Flip(1, said("response")),
    "num_episodes": Flip(2, steps, {"max_steps": 0}),
    "max_epochs": Flip(2, metric("policy/optimizer_steps")),
    "actor_learning_rate": Flip(1e-2, weights),
    "critic_learning_rate": Flip(1e-2, metric("critic/lr"), GAE),
    "drop_zero_advantage": Flip(False, metric("rollout/dropped_samples"), {"zero_spread": 10.0}),
    "share_prompts": Flip(False, metric("perf/forward_tokens")),
    "freezing_actor_steps": Flip(1, weights, GAE | TWO),
    "self_test": Flip(True, keys),
    # ptx
    "pretrain_data": Flip(["@train"], metric("policy/ptx_loss"), PTX),
    "pretrain_data_probs": Flip([0.1, 0.9], metric("policy/ptx_loss"), PTX | {"pretrain_data": ["@chats", "@train"]}),
    "pretrain_max_len": Flip(60, metric("policy/ptx_loss"), PTX),
    "pretrain_mode": Flip(False, metric("policy/ptx_loss"), PTX),
    "ptx_coef": Flip(0.5, metric("policy/grad_norm"), PTX),
    "ptx_batch_size": Flip(3, metric("policy/ptx_loss"), PTX),
    # eval
    "eval_steps": Flip(1, steps, TWO | EVAL),
    "eval_at_start": Flip(True, steps, EVAL),
    "eval_n_samples": Flip(3, keys, SAMPLED),
    "eval_temperature": Flip(0.3, metric("eval/all/judge"), SAMPLED),
    "eval_top_p": Flip(0.3, metric("eval/all/judge"), SAMPLED),
    "eval_pass_k": Flip([1, 2], keys, SAMPLED | {"accuracy_part": "judge"}),
    "accuracy_part": Flip("judge", keys, EVAL),
    # checkpoint
    "ckpt_path": Flip("@run/elsewhere", files, SAVING),
    "save_steps": Flip(2, files, SAVING),
    "max_ckpt_num": Flip(1, files, SAVING),
    "max_ckpt_mem": Flip(1e-9, files, SAVING),
    "best_metric": Flip("policy/lr", files, SAVING | {"max_ckpt_num": 1, "lr_scheduler": "linear"}),
    "save_hf_ckpt": Flip(True, files, SAVING),
    "disable_ckpt": Flip(True, files, {"disable_ckpt": False}),
    # log
    "metric_aliases": Flip("trl", keys),
    "report": Flip(False, files),
    "mark_high_entropy_tokens": Flip(True, recorded("entropies")),
    "save_trajectories": Flip(False, files),
    "num_trajectories_to_save": Flip(3, said("uid")),
    **{name: Flip(value, weights, base) for name, value, base in own_options(REGISTRIES)},
    **{name: Flip(value, weights, base | {"actor_learning_rate": 1e-2}) for name, value, base in own_options(OPTIM)},
}  # yapf: disable

_T, _D, _R = "lightrft/trainer/tests/", "lightrft/datasets/tests/", "lightrft/rewards/tests/"
_V, _E = "lightrft/preflight/tests/", "lightrft/environments/tests/"
_S, _M, _U = "lightrft/strategy/tests/", "lightrft/models/tests/", "lightrft/utils/tests/"
_A, _HERE = "lightrft/algorithms/tests/", "lightrft/tests/test_options.py::"
_ENGINE = [name for name, option in options(Config).items() if option.read_by == ("vllm", "sglang")]
_LOSSES = ("cispo_absolute", "policy_drift_coef", "sapo_tau_pos", "sapo_tau_neg", "dppo_delta", "dppo_ratio_max",
           "clip_cov_ratio", "clip_cov_low", "clip_cov_high", "kl_cov_ratio", "kl_cov_coef", "kl_cov_abs")
SHOWN: dict[str, str] = {
    "env_images": _E + "test_pictures.py::test_pictures_have_a_limit_and_are_forgotten_after_their_step",
    "env_timeout_s": _E + "test_pool.py::test_a_fault_costs_its_response_alone_and_no_other_waits",
    "env_workers": _E + "test_pool.py::test_sessions_have_their_own_state",
    "gradient_checkpointing": _M + "test_loader.py::test_gradient_checkpointing_is_switched_on",
    "use_liger": _M + "test_liger.py::test_a_device_is_needed",
    "fused_logprobs": _M + "test_loader.py::test_the_option_selects_the_kernels_of_log_probs",
    "value_head_prefix": _M + "test_actor_language.py::test_the_critic_exports_its_head_under_the_chosen_name",
    "strategy": _S + "test_strategy.py::test_choice",
    "adam_offload": _S + "test_offload.py::test_moments_are_on_the_device_only_in_the_step",
    "fsdp_shard_size": _S + "test_conformance.py::test_two_ranks",
    "fsdp_cpu_offload": _S + "test_conformance.py::test_two_ranks",
    "grad_sync": _S + "test_conformance.py::test_two_ranks",
    **dict.fromkeys(["zero_stage", "zpg", "overlap_comm"],
                    "lightrft/strategy/deepspeed/tests/test_deepspeed_strategy.py::test_what_the_options_do"),
    "dist_timeout_s": _U + "test_watchdog.py::test_a_hanging_rank_is_named_with_its_stack",
    "silence_timeout_s": "lightrft/trainer/tests/test_session.py::test_the_watchdog_of_a_session_has_its_limits",
    "engine_type": "lightrft/rollout/tests/test_weight_sync.py::test_unknown_engine",
    **dict.fromkeys(_ENGINE, "lightrft/rollout/tests/test_vllm_start.py::test_options_reach_vllm"),
    "engine_kv_mib": "lightrft/rollout/tests/test_weight_sync.py::test_the_budget_option_reaches_the_engine",
    "engine_count": _V + "test_engine_rules.py::test_a_run_has_as_many_engines_as_it_was_written_for",
    "fused_decode": "lightrft/rollout/tests/test_weight_sync.py::test_the_kernel_of_a_decode_step_reaches_it",
    "engine_max_seqs": "lightrft/rollout/tests/test_weight_sync.py::test_the_sequences_at_once_reach_the_engine",
    "offload_during_rollout": _T + "test_offloader.py::test_models_are_away_while_the_engine_generates",
    "lora_sync": "lightrft/rollout/tests/test_vllm_adapters.py::test_adapters_alone_after_the_first_sync",
    "sync_bucket_mib": "lightrft/rollout/tests/test_weight_sync.py::test_two_ranks_generate_what_one_process_does",
    "prompt_split": _D + "test_prompts_dataset.py::test_split_options",
    "eval_split": _D + "test_prompts_dataset.py::test_split_options",
    "aux_loss_coef": _T + "test_load_balance.py::test_rl_has_the_same_loss_in_every_cut_and_with_shared_prompts",
    "pretrain_split": _T + "test_pretraining_loss.py::test_rows_are_those_of_the_split_without_what_wraps_prompts",
    "input_key": _D + "test_prompts_dataset.py::test_lookup_order_and_key_options",
    "label_key": _D + "test_prompts_dataset.py::test_lookup_order_and_key_options",
    "reference_key": _D + "test_prompts_dataset.py::test_lookup_order_and_key_options",
    "difficulty_key": _D + "test_difficulty.py::test_rows_outside_are_left_out_and_counted",
    "difficulty_min": _D + "test_difficulty.py::test_rows_outside_are_left_out_and_counted",
    "difficulty_max": _D + "test_difficulty.py::test_rows_outside_are_left_out_and_counted",
    "chat_template": _D + "test_prompts_dataset.py::test_chat_options",
    "chat_template_kwargs": _D + "test_template_kwargs.py::test_keyword_arguments_of_option_and_row_reach_the_template",
    "system_prompt": _D + "test_prompts_dataset.py::test_chat_options",
    "overlong_prompt": _D + "test_prompts_dataset.py::test_too_long_prompts",
    "data_workers": _D + "test_prompts_dataset.py::test_worker_processes_give_the_same_prompts",
    **dict.fromkeys(["images_key", "videos_key", "audios_key"],
                    _D + "test_media_rows.py::test_the_named_columns_come_before_the_known_ones"),
    "media_root": _D + "test_media_rows.py::test_paths_start_at_the_media_root",
    "media_urls": _D + "test_media.py::test_downloads_when_allowed",
    "media_cache_dir": _D + "test_media_cache.py::test_a_later_run_reads_what_an_earlier_one_processed",
    "media_disk_mib": _D + "test_media_cache.py::test_the_budget_keeps_what_was_read_last",
    "media_check": _D + "test_media_prompts.py::test_headers_are_enough_for_lengths",
    "media_policy": _D + "test_media_rows.py::test_a_row_that_cannot_be_used_stops_the_run_or_is_left_out",
    "media_timeout_s": _D + "test_decoding.py::test_time_is_limited",
    "fps": _D + "test_decoding.py::test_video_files_at_the_wanted_rate",
    **dict.fromkeys(["max_pixels", "min_pixels"],
                    _D + "test_media_prompts.py::test_pictures_are_resized_to_the_limits"),
    "media_cache_mib": _D + "test_media_prompts.py::test_the_store_keeps_what_it_has_room_for",
    "cache_features": _T + "test_media_runs.py::test_cached_features_are_those_of_the_plain_run_and_resume",
    "feature_cache_mib": _M + "test_feature_cache.py::test_without_room_all_are_computed_again_and_the_oldest_go",
    **dict.fromkeys([f"limit_mm_{kind}_per_prompt" for kind in ("image", "video", "audio")],
                    _D + "test_media_rows.py::test_the_most_media_of_a_row"),
    "reward_pretrain": _R + "test_neural.py::test_rewards_are_those_of_hugging_face",
    "reward_recipe": _R + "test_neural.py::test_weights_by_entry_and_by_recipe",
    "normalize_reward": _R + "test_neural.py::test_normalised_by_the_moments_of_the_evaluation",
    "step_reward": _R + "test_steps.py::test_rewards_are_those_of_hugging_face",
    "step_separator": _R + "test_steps.py::test_another_separator_and_no_step_at_all",
    "reward_offload": _R + "test_neural.py::test_offloaded_models_visit_the_device",
    "reward_shard": _R + "test_divided.py::test_fsdp_and_zero_score_as_whole_models_do",
    "judge_max_len": _R + "test_generative.py::test_no_answer_is_no_reward",
    "remote_rm_url": _R + "test_remote.py::test_the_faster_server_gets_more_and_both_work",
    **dict.fromkeys(["judge_url", "judge_model"],
                    _R + "test_judge.py::test_the_judge_is_asked_and_its_last_score_counts"),
    **dict.fromkeys(["judge_template", "judge_score", "judge_key_env", "judge_args"],
                    _R + "test_judge.py::test_template_score_key_and_arguments_are_the_users"),
    "judge_concurrency": _R + "test_judge.py::test_as_many_requests_as_allowed_are_in_flight",
    "judge_timeout_s": _R + "test_judge.py::test_its_time_limit_is_its_own",
    "response_faults": _R +
    "test_response_faults.py::test_time_outs_and_dead_workers_are_unscored_unless_the_option_names_them",
    "reward_workers": _R + "test_pool.py::test_workers_do_not_import_the_training_script_and_share_the_work",
    "reward_timeout_s": _R + "test_pool.py::test_the_budget_of_a_group_shrinks_and_ends",
    "max_unscored_steps": _T + "test_tripwires.py::test_a_reward_that_always_fails_stops_the_run",
    "reward_probe": _HERE + "test_the_probe_stops_a_run",
    "dual_clip": _M + "test_loss.py::test_each_option_changes_the_loss",
    **dict.fromkeys(_LOSSES, _A + "test_policy_losses.py::test_a_loss_reads_what_it_says"),
    "max_bad_steps": _T + "test_optimizer_step.py::test_one_process",
    "save_path": _T + "test_session.py::test_the_command_line_trains",
    "async_save": _S + "test_conformance.py::test_one_rank",
    "load_checkpoint": _HERE + "test_loading_a_checkpoint_goes_on",
    "logging_steps": _U + "test_sinks.py::test_logging_steps_thins_the_table_but_not_the_file",
    "use_tensorboard": _U + "test_sinks.py::test_tensorboard_shows_a_resumed_run_once",
    "use_wandb": _U + "test_sinks.py::test_wandb_offline",
    "wandb_project": _HERE + "test_names_reach_wandb",
    "wandb_run_name": _HERE + "test_names_reach_wandb",
    "wandb_group": _HERE + "test_names_reach_wandb",
    "wandb_org": _HERE + "test_names_reach_wandb",
    "use_trackio": _U + "test_sinks.py::test_trackio_local",
    "trackers": _U + "test_sinks.py::test_mlflow_through_accelerate",
    "print_samples": _T + "test_evaluator.py::test_evaluations_repeat_and_follow_the_weights",
    "print_steps": _T + "test_run_log.py::test_responses_to_training_prompts_are_printed",
}  # yapf: disable
