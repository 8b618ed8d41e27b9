"""Options that differ between a checkpoint and the run that resumes from it."""
from collections.abc import Mapping
from typing import Any

from lightrft.config.flags import show
from lightrft.config.options import flatten, options
from lightrft.config.schema import Config
from lightrft.config.sft_schema import SFTConfig

# free to change on resume: they decide where, how fast and how long a run works, and what is saved and shown
FREE_GROUPS = ("strategy", "eval", "checkpoint", "log")
FREE = frozenset("""
    gradient_checkpointing use_liger logprob_chunk_mib initial_model_shard_size save_value_network
    engine_kv_mib engine_mem_util engine_tp_size engine_sleep micro_rollout_batch_size sync_bucket_mib
    sync_proof sync_canary_every
    eval_data eval_split max_eval_samples overlong_prompt data_workers
    reward_workers reward_timeout_s reward_probe max_unscored_steps
    micro_train_batch_size max_tokens_per_micro_batch max_steps num_episodes max_bad_steps drop_zero_advantage self_test
    recipe semantics
""".split())  # the options that a recipe and semantics set are compared one by one
FREE_SFT = frozenset(("max_epochs", "eval_steps"))


def changes(saved: Mapping[str, Any], config: Config | SFTConfig) -> list[str]:
    """List ``--name value (was other)`` for each changed option that affects what is learnt.

    Args:
        saved: the options of the checkpoint, flat; an option that it does not know is not compared.
        config: of the resumed run.
    """
    now, known = flatten(config), options(type(config))
    free = FREE | FREE_SFT if isinstance(config, SFTConfig) else FREE
    return [
        f"--{name} {show(value)} (was {show(saved[name])})" for name, value in now.items()
        if saved.get(name, value) != value and name not in free and known[name].group not in FREE_GROUPS
    ]


def lost_length(saved: Mapping[str, Any], config: Config | SFTConfig) -> str | None:
    """Explain an undefined length of the run: it counts batches of the data, and their size has changed; else None."""
    name, now = "rollout_batch_size" if isinstance(config, Config) else "train_batch_size", flatten(config)
    if now["max_steps"] or saved.get(name, now[name]) == now[name]:
        return None
    return (f"--{name} {now[name]}: the steps of the checkpoint were of {saved[name]}, so what is left of the data is "
            f"no number of steps; go on with --{name} {saved[name]}, or say with --max_steps where the run ends")
