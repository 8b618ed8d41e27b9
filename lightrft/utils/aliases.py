"""Our metrics under the names that verl and TRL give them, for existing dashboards."""
import re
from collections.abc import Mapping

# _EXACT: alias -> our metrics, summed. _PATTERNS: regular expression over our names -> template of the alias.
# An alias whose sources are absent is left out.
_EXACT: dict[str, dict[str, tuple[str, ...]]] = {
    "verl": {
        "actor/entropy": ("policy/entropy", ),
        "actor/pg_loss": ("policy/loss", ),
        "actor/kl_loss": ("policy/kl_ref", ),
        "actor/pg_clipfrac": ("policy/clip_frac_low", "policy/clip_frac_high"),
        "actor/ppo_kl": ("policy/kl_old", ),
        "actor/grad_norm": ("policy/grad_norm", ),
        "actor/lr": ("policy/lr", ),
        "critic/vf_loss": ("critic/loss", ),
        "critic/vf_explained_var": ("critic/explained_variance", ),
        "critic/values/mean": ("critic/value_mean", ),
        "response_length/clip_ratio": ("rollout/truncated_frac", ),
        "training/rollout_probs_diff_mean": ("rollout/mismatch/abs_dp_mean", ),
        "training/rollout_probs_diff_max": ("rollout/mismatch/abs_dp_max", ),
        "training/rollout_probs_diff_std": ("rollout/mismatch/abs_dp_std", ),
        "timing_s/gen": ("time/rollout_s", ),
        "timing_s/reward": ("time/reward_s", ),
        "timing_s/old_log_prob": ("time/old_logprobs_s", ),
        "timing_s/ref": ("time/ref_s", ),
        "timing_s/update_actor": ("time/update_s", ),
        "timing_s/update_weights": ("time/weight_sync_s", ),
        "timing_s/save_checkpoint": ("time/checkpoint_s", ),
        "timing_s/testing": ("time/eval_s", ),
        "timing_s/step": ("time/step_s", ),
        "perf/throughput": ("perf/tokens_per_s", ),
        "perf/mfu/actor": ("perf/mfu", ),
        "perf/max_memory_allocated_gb": ("perf/peak_mem_gib", ),
    },
    "trl": {
        "reward": ("reward/mean", ),
        "reward_std": ("reward/std", ),
        "frac_reward_zero_std": ("group/zero_spread_frac", ),
        "completions/mean_length": ("rollout/response_len/mean", ),
        "completions/min_length": ("rollout/response_len/min", ),
        "completions/max_length": ("rollout/response_len/max", ),
        "completions/clipped_ratio": ("rollout/truncated_frac", ),
        "clip_ratio/low_mean": ("policy/clip_frac_low", ),
        "clip_ratio/high_mean": ("policy/clip_frac_high", ),
        "clip_ratio/region_mean": ("policy/clip_frac_low", "policy/clip_frac_high"),
        "entropy": ("policy/entropy", ),
        "kl": ("policy/kl_ref", ),
        "loss": ("policy/loss", ),
        "grad_norm": ("policy/grad_norm", ),
        "learning_rate": ("policy/lr", ),
        "step_time": ("time/step_s", ),
    },
}
_PATTERNS: dict[str, tuple[tuple[str, str], ...]] = {
    "verl": (
        (r"reward/(mean|max|min)", r"critic/score/\1"),
        (r"reward/(mean|max|min)", r"critic/rewards/\1"),
        (r"advantage/(mean|max|min)", r"critic/advantages/\1"),
        (r"rollout/response_len/(mean|max|min)", r"response_length/\1"),
        (r"eval/(.+)/pass@(\d+)", r"val-core/\1/acc/best@\2"),
        (r"eval/(.+)/avg@(\d+)", r"val-core/\1/acc/mean@\2"),
    ),
    "trl": ((r"reward/(?!unscored/)(.+)/(mean|std)", r"rewards/\1/\2"), ),
}
ALIASES = ("none", *_EXACT)


def alias_metrics(metrics: Mapping[str, float], style: str) -> dict[str, float]:
    """Return ``metrics`` and, in addition, each one under its name in ``style`` ("none", "verl" or "trl"), if any."""
    if style not in ALIASES:
        raise ValueError(f"unknown metric aliases {style!r}; known: {', '.join(ALIASES)}")
    merged = dict(metrics)
    for alias, sources in _EXACT.get(style, {}).items():
        if all(source in metrics for source in sources):
            merged[alias] = sum(metrics[source] for source in sources)
    for pattern, template in _PATTERNS.get(style, ()):
        for name, value in metrics.items():
            if match := re.fullmatch(pattern, name):
                merged[match.expand(template)] = value
    return merged
