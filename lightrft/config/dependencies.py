"""Options that have no effect together with the others; they are refused when they were set explicitly."""
import re
from collections.abc import Iterable, Iterator
from typing import Any

from lightrft.config.layers import preset_values
from lightrft.config.options import did_you_mean, flatten, options
from lightrft.config.schema import Config
from lightrft.config.sft_schema import SFTConfig

# option -> (option it needs, example value of that option): without the second, the first has no effect
NEEDS: dict[str, tuple[str, str]] = {
    "use_kl_loss": ("init_kl_coef", "0.01"),
    "kl_target": ("init_kl_coef", "0.01"),
    "kl_estimator": ("init_kl_coef", "0.01"),
    "k3_max": ("init_kl_coef", "0.01"),
    "kl_in_outcome": ("init_kl_coef", "0.01"),
    "kl_horizon": ("kl_target", "0.1"),
    "entropy_step": ("entropy_target", "0.2"),
    "entropy_coef_max": ("entropy_target", "0.2"),
    "ref_pretrain": ("init_kl_coef", "0.01"),
    "initial_model_shard_size": ("init_kl_coef", "0.01"),
    "lora_dropout": ("lora_rank", "16"),
    "lora_sync": ("lora_rank", "16"),
    "first_token_temperature": ("use_fire", ""),
    "max_gen_rounds": ("dynamic_sampling", ""),
    "difficulty_min": ("difficulty_key", "pass_rate"),
    "difficulty_max": ("difficulty_key", "pass_rate"),
    "prompt_data_probs": ("prompt_data", "A,B"),
    "eval_at_start": ("eval_data", "PATH"),
    "print_samples": ("eval_data", "PATH"),
    "reward_running_norm_minus_mean": ("reward_running_norm", ""),
    "overlong_buffer_len": ("overlong_buffer", ""),
    "overlong_buffer_penalty_factor": ("overlong_buffer", ""),
    "num_trajectories_to_save": ("save_trajectories", ""),
}
CRITIC_OPTIONS = ("critic_pretrain", "save_value_network", "freezing_actor_steps", "critic_learning_rate", "value_clip")
ESTIMATOR_OPTIONS = ("lambd", "std_eps", "pass_k", "norm_group_std", "whiten_flat_groups", "gdpo_whiten_tokens")
LOSS_OPTIONS = ("eps_clip", "eps_clip_high", "dual_clip", "cispo_absolute", "policy_drift_coef", "sapo_tau_pos",
                "sapo_tau_neg", "dppo_delta", "dppo_ratio_max", "clip_cov_ratio", "clip_cov_low", "clip_cov_high",
                "kl_cov_ratio", "kl_cov_coef", "kl_cov_abs")
CORRECTION_OPTIONS = ("correction_low", "correction_high", "correction_veto")
# first parts of the names of the metrics that a checkpoint has
METRICS = ("reward", "group", "advantage", "policy", "critic", "rollout", "eval")
SFT_METRICS = ("sft", "eval")


def changed(c: Config | SFTConfig, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Select the options in ``names`` that ``c`` has and that were set explicitly, with their values: neither the
    default nor the value that a chosen preset gives."""
    values, known = flatten(c), options(type(c))
    preset = preset_values(values)
    return ((name, values[name]) for name in names if name in known and values[name] != known[name].default and (
        name not in preset or values[name] != preset[name]))


def unmet_needs(c: Config | SFTConfig) -> Iterator[str]:
    """Yield one sentence per option whose need in :data:`NEEDS` is not met."""
    values = flatten(c)
    for name, value in changed(c, NEEDS):
        needed, example = NEEDS[name]
        if not values[needed]:
            remedy = f"--{needed} {example}".strip()
            yield f"--{name} {value}: has no effect without --{needed}; add {remedy} or drop --{name}"


def best_metric(name: str | None, c: Config | SFTConfig) -> Iterator[str]:
    """Yield problems of a ``--best_metric`` that no checkpoint of this run has; missing data is reported elsewhere."""
    values = flatten(c)
    if not name or (name.startswith("eval/") and not values["eval_data"]):
        return
    flag, known = f"--best_metric {name}", METRICS if isinstance(c, Config) else SFT_METRICS
    first, slash, _ = name.partition("/")
    if first not in known or not slash:
        yield (f"{flag}: no checkpoint has it{did_you_mean(first, known)}; metrics begin with "
               f"{', '.join(f'{one}/' for one in known)}")
    elif first == "eval" and values["eval_steps"] == 0:
        yield f"{flag}: is never measured with --eval_steps 0; set --eval_steps -1 or a number of steps"
    elif isinstance(c, Config) and (found := re.fullmatch(r"eval/.+/(pass|avg)@(.*)", name)):
        measured = c.eval.eval_pass_k if found[1] == "pass" else [c.eval.eval_n_samples]
        option = "eval_pass_k" if found[1] == "pass" else "eval_n_samples"
        if found[2] not in map(str, measured):
            stem = name.rpartition("@")[0]
            yield (f"{flag}: is not measured with --{option} {' '.join(map(str, measured))}; nearest valid value: "
                   f"{' or '.join(f'{stem}@{k}' for k in measured)}, or --{option} {found[2]}")
