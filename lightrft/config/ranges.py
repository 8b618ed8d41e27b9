"""Valid interval of every numeric option."""
from collections.abc import Iterator
from math import inf
from typing import Any

from lightrft.config.options import Option, flatten, options

ANY, COUNT, POSITIVE, OFF_AT_ZERO, SHARE, PROBABILITY = ("(-inf, inf)", "[1, inf)", "(0, inf)", "[0, inf)", "[0, 1]",
                                                         "(0, 1]")

RANGES: dict[str, str] = {
    # model, strategy
    "lora_rank": OFF_AT_ZERO,
    "lora_alpha": COUNT,
    "lora_dropout": "[0, 1)",
    "logprob_chunk_mib": COUNT,
    "fsdp_shard_size": OFF_AT_ZERO,
    "initial_model_shard_size": OFF_AT_ZERO,
    "zero_stage": "[0, 3]",
    "zpg": COUNT,
    "dist_timeout_s": COUNT,
    # rollout
    "rollout_batch_size": COUNT,
    "n_samples_per_prompt": COUNT,
    "max_gen_rounds": COUNT,
    "oversample": "[1, 2]",
    "max_staleness": COUNT,
    "prompt_max_len": COUNT,
    "generate_max_len": COUNT,
    "temperature": POSITIVE,
    "first_token_temperature": POSITIVE,
    "top_p": PROBABILITY,
    "top_k": OFF_AT_ZERO,
    "min_p": "[0, 1)",
    "engine_kv_mib": OFF_AT_ZERO,
    "engine_mem_util": PROBABILITY,
    "engine_tp_size": COUNT,
    "micro_rollout_batch_size": OFF_AT_ZERO,
    "sync_bucket_mib": COUNT,
    "sync_canary_every": COUNT,
    # data, reward
    "prompt_data_probs": PROBABILITY,
    "max_samples": OFF_AT_ZERO,
    "max_eval_samples": OFF_AT_ZERO,
    "difficulty_min": ANY,
    "difficulty_max": ANY,
    "data_workers": OFF_AT_ZERO,
    "reward_workers": COUNT,
    "reward_timeout_s": POSITIVE,
    "max_unscored_steps": OFF_AT_ZERO,
    "reward_clip": OFF_AT_ZERO,
    "overlong_buffer_len": OFF_AT_ZERO,
    "overlong_buffer_penalty_factor": POSITIVE,
    # algorithm
    "correction_low": SHARE,
    "correction_high": COUNT,
    "correction_veto": "[0, 1)",
    "loss_agg_norm": OFF_AT_ZERO,
    "eps_clip": PROBABILITY,
    "eps_clip_high": POSITIVE,
    "dual_clip": "(1, inf)",
    "policy_drift_coef": OFF_AT_ZERO,
    "sapo_tau_pos": POSITIVE,
    "sapo_tau_neg": POSITIVE,
    "dppo_delta": OFF_AT_ZERO,
    "dppo_ratio_max": COUNT,
    "clip_cov_ratio": PROBABILITY,
    "clip_cov_low": OFF_AT_ZERO,
    "clip_cov_high": POSITIVE,
    "kl_cov_ratio": PROBABILITY,
    "kl_cov_coef": POSITIVE,
    "value_clip": OFF_AT_ZERO,
    "gamma": PROBABILITY,
    "lambd": SHARE,
    "std_eps": OFF_AT_ZERO,
    "pass_k": OFF_AT_ZERO,
    "zero_spread": OFF_AT_ZERO,
    "advantage_clip": OFF_AT_ZERO,
    "init_kl_coef": OFF_AT_ZERO,
    "k3_max": OFF_AT_ZERO,
    "kl_target": POSITIVE,
    "kl_horizon": COUNT,
    "entropy_coef": OFF_AT_ZERO,
    "entropy_target": POSITIVE,
    "entropy_step": POSITIVE,
    "entropy_coef_max": POSITIVE,
    "high_entropy_token_ratio": "[0, 1)",
    # train
    "learning_rate": OFF_AT_ZERO,
    "max_len": COUNT,
    "train_batch_size": COUNT,
    "micro_train_batch_size": OFF_AT_ZERO,
    "max_tokens_per_micro_batch": COUNT,
    "num_episodes": COUNT,
    "max_epochs": COUNT,
    "max_steps": OFF_AT_ZERO,
    "actor_learning_rate": OFF_AT_ZERO,
    "critic_learning_rate": OFF_AT_ZERO,
    "lr_warmup_ratio": SHARE,
    "lr_min_ratio": SHARE,
    "adam_betas": "[0, 1)",
    "l2": OFF_AT_ZERO,
    "max_norm": OFF_AT_ZERO,
    "freezing_actor_steps": OFF_AT_ZERO,
    "max_bad_steps": COUNT,
    "seed": f"[0, {2**32 - 1}]",
    # eval, checkpoint, log
    "eval_steps": "[-1, inf)",
    "eval_n_samples": COUNT,
    "eval_temperature": OFF_AT_ZERO,
    "eval_top_p": PROBABILITY,
    "eval_pass_k": COUNT,
    "save_steps": "[-1, inf)",
    "max_ckpt_num": COUNT,
    "max_ckpt_mem": POSITIVE,
    "logging_steps": COUNT,
    "num_trajectories_to_save": OFF_AT_ZERO,
    "print_samples": OFF_AT_ZERO,
}
REASONS = {
    "temperature": "greedy responses of one prompt are all the same, so there is nothing to learn from",
    "oversample": "of more than one batch left over, not all could be trained in time for --max_staleness",
    "max_staleness": "a response that goes on in the next step is one version behind there",
    "dual_clip": "the bound is a ratio above 1 + eps_clip_high",
}


def _bounds(interval: str) -> tuple[float, float]:
    low, high = interval[1:-1].split(",")
    return float(low), float(high)


def _inside(value: float, interval: str) -> bool:
    low, high = _bounds(interval)
    above = value >= low if interval[0] == "[" else value > low
    return above and (value <= high if interval[-1] == "]" else value < high)


def _nearest(value: float, interval: str) -> str:
    """Name the nearest end of the interval, or the valid side of an open end."""
    low, high = _bounds(interval)
    below = value <= low
    end, closed = (low, interval[0] == "[") if below else (high, interval[-1] == "]")
    return f"{end:.10g}" if closed else f"a little {'above' if below else 'below'} {end:.10g}"


def in_words(interval: str) -> str:
    """Write an interval in words: ``[1, inf)`` is ``at least 1``."""
    low, high = _bounds(interval)
    if high == inf:
        return f"{'at least' if interval[0] == '[' else 'greater than'} {low:g}"
    return f"in {interval}"


def _problem(option: Option, value: float) -> str:
    interval = RANGES[option.name]
    reason = f" ({REASONS[option.name]})" if option.name in REASONS else ""
    nearest = _nearest(value, interval)
    return f"{option.flag} {value:.10g}: must be {in_words(interval)}{reason}; nearest valid value: {nearest}"


def check_ranges(config: Any) -> Iterator[str]:
    """Yield one sentence per value of a tree (any tree) that is outside the interval of its option."""
    values = flatten(config)
    for name, option in options(type(config)).items():
        if name in RANGES and values[name] is not None:
            for value in values[name] if option.many else [values[name]]:
                if not _inside(value, RANGES[name]):
                    yield _problem(option, value)
