"""Options of the logs of an RL run."""
from dataclasses import dataclass

from lightrft.config.options import NON_NEGATIVE, option
from lightrft.config.shared_schema import SinkConfig


@dataclass
class LogConfig(SinkConfig):
    """Metrics, console output and saved rollouts."""
    metric_aliases: str = option("none", "also write each metric under its name in another trainer",
                                 ("none", "verl", "trl"))
    save_trajectories: bool = option(False, "write the samples of every rollout to SAVE_PATH/rollouts/step_N.jsonl")
    num_trajectories_to_save: int = option(64, "limit on samples per rollout file; 0: all", within=NON_NEGATIVE,
                                           needs="save_trajectories")
    mark_high_entropy_tokens: bool = option(
        False, "record the entropy of each token of the samples in the report, which colours them by it; without old "
        "log-probs this takes one more forward pass of the policy", needs="report true")
    print_samples: int = option(
        0, "number of samples to print, and to log as a table to W&B, trackio and TensorBoard: held-out solutions "
        "before the first step and after the last, and responses to training prompts (--print_steps)",
        within=NON_NEGATIVE)
    print_steps: int = option(
        -1, "rollout steps between printed responses to training prompts; -1: only the first and the last step, and "
        "only without held-out prompts; 0: never", within="[-1, inf)", needs="print_samples 2")
