"""Checks of all options against each other, the machine and the files, before any process group exists."""
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from math import gcd, isqrt
from pathlib import Path

from lightrft.preflight.algorithm_rules import AlgorithmFacts, algorithm_problems
from lightrft.preflight.engine_rules import engine_problems, overlap_problems, oversample_problems
from lightrft.config.dependencies import best_metric, changed, unmet_needs
from lightrft.config.options import ConfigError
from lightrft.config.ranges import check_ranges
from lightrft.config.schema import (CheckpointConfig, Config, ModelConfig, OptimConfig, PolicyModelConfig, SinkConfig)
from lightrft.config.sft_schema import SFTConfig
from lightrft.config.stages import length_problems
from lightrft.preflight.strategy_rules import strategy_problems

DATA_SUFFIXES = (".parquet", ".json", ".jsonl", ".csv", ".arrow")


def validate(config: Config, world_size: int, facts: AlgorithmFacts | None = None) -> None:
    """Check the whole tree for a run on ``world_size`` ranks.

    Args:
        facts: the registered algorithms; without them, names of algorithms and their needs are not checked.

    Raises:
        ConfigError: with every problem found: option, value, reason and the nearest valid value or the remedy.
    """
    problems = _shared(config, world_size)
    for check in (_data, _rollout, _reward, _train, _eval):
        problems += check(config)
    problems += [*_reference(config.model, world_size), *_batches(config, world_size)]
    problems += best_metric(config.checkpoint.best_metric, config)
    problems += algorithm_problems(config, facts)
    problems += engine_problems(config, world_size)
    problems += overlap_problems(config, world_size, facts.needs_critic if facts else ())
    problems += _divides("engine_tp_size", config.rollout.engine_tp_size, world_size)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def validate_sft(config: SFTConfig, world_size: int) -> None:
    """Check the whole tree of supervised fine-tuning for a run on ``world_size`` ranks.

    Raises:
        ConfigError: with every problem found.
    """
    problems, d = _shared(config, world_size), config.data
    problems += [
        *_sources("train_data", d.train_data), *_sources("eval_data", d.eval_data), *_chat_template(d.chat_template)
    ]
    if config.train.train_batch_size < world_size:
        problems.append(_per_rank("train_batch_size", config.train.train_batch_size, world_size))
    problems += best_metric(config.checkpoint.best_metric, config)
    if config.train.eval_steps > 0 and not d.eval_data:
        problems.append(_no_eval_data(config.train.eval_steps))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def _shared(config: Config | SFTConfig, world_size: int) -> list[str]:
    """Collect the problems of the option groups that every trainer has."""
    return [
        *check_ranges(config), *unmet_needs(config), *_policy(config.model), *_strategy(config, world_size),
        *_optimizer(config.train), *_checkpoint(config.checkpoint, config.data.eval_data), *_packages(config.log)
    ]


def _per_rank(name: str, value: int, world_size: int) -> str:
    return f"--{name} {value}: each of the {world_size} ranks needs at least one; nearest valid value: {world_size}"


def _no_eval_data(eval_steps: int) -> str:
    return f"--eval_steps {eval_steps}: has no effect without --eval_data; add --eval_data PATH or drop it"


def nearest_multiples(value: int, step: int) -> str:
    """Format the multiples of ``step`` around ``value`` that are above 0: ``96 or 128``."""
    below = value // step * step
    return " or ".join(str(n) for n in (below, below + step) if n > 0)


def _nearest_divisors(total: int, value: int) -> str:
    small = [n for n in range(1, isqrt(total) + 1) if total % n == 0]
    divisors = [*small, *(total // n for n in small)]
    picks = [max((n for n in divisors if n <= value), default=0), min((n for n in divisors if n >= value), default=0)]
    return " or ".join(str(n) for n in dict.fromkeys(picks) if n)


def _batches(c: Config, world_size: int) -> Iterator[str]:
    prompts, samples, batch = c.rollout.rollout_batch_size, c.rollout.n_samples_per_prompt, c.train.train_batch_size
    if min(prompts, samples, batch) < 1:
        return
    total = prompts * samples
    if total % batch:
        yield (
            f"--train_batch_size {batch}: a rollout has {prompts} prompts x {samples} samples = {total}, which must be "
            f"a multiple of it; nearest valid: --train_batch_size {_nearest_divisors(total, batch)}, "
            f"or --rollout_batch_size {nearest_multiples(prompts, batch // gcd(batch, samples))}")
    for name, value in (("rollout_batch_size", prompts), ("train_batch_size", batch)):
        if value < world_size:
            yield _per_rank(name, value, world_size)


def _policy(m: PolicyModelConfig) -> Iterator[str]:
    if not m.pretrain:
        yield "--pretrain is missing: give an HF folder or hub id of the model to train"
    yield from _folder("pretrain", m.pretrain)
    if m.lora_rank > 0 and not m.target_modules:
        yield f"--target_modules none: --lora_rank {m.lora_rank} needs modules; nearest valid value: all-linear"
    if m.lora_rank > 0 and m.freeze_prefix:
        yield f"--freeze_prefix {','.join(m.freeze_prefix)}: has no effect with --lora_rank; drop one"
    if m.use_liger:
        yield from _liger()


def _folder(name: str, path: str | None) -> Iterator[str]:
    if path and _looks_local(path) and not Path(path).expanduser().is_dir():
        yield f"--{name} {path}: no such folder"


def _reference(m: ModelConfig, world_size: int) -> Iterator[str]:
    yield from _folder("ref_pretrain", m.ref_pretrain)
    yield from _folder("critic_pretrain", m.critic_pretrain)
    yield from _divides("initial_model_shard_size", m.initial_model_shard_size, world_size)
    if m.lora_rank > 0 and m.ref_pretrain:
        yield (f"--ref_pretrain {m.ref_pretrain}: has no effect with --lora_rank (the reference is the policy without "
               "its adapters); drop it")


def _liger() -> Iterator[str]:
    import torch
    if not torch.cuda.is_available():
        yield "--use_liger True: Liger's kernels need CUDA, and this machine has none; drop --use_liger"
    yield from _package("use_liger", "liger_kernel", "liger-kernel")


def _looks_local(path: str) -> bool:
    """Return True if a path cannot be a hub id (``name`` or ``owner/name``)."""
    return path.startswith(("/", "./", "../", "~")) or path.count("/") > 1


def _sources(name: str, entries: list[str]) -> Iterator[str]:
    """Check data entries ``path`` or ``path@data_dir``: yield a missing option and local paths that do not exist."""
    if name != "eval_data" and not entries:
        yield f"--{name} is missing: give a file, folder or hub id of the training data"
    for entry in entries:
        path = entry.rsplit("@", 1)[0]
        if not Path(path).expanduser().exists() and (_looks_local(path) or path.endswith(DATA_SUFFIXES)):
            yield f"--{name} {entry}: no such file or folder"


def _chat_template(path: str | None) -> Iterator[str]:
    if path and (_looks_local(path) or path.endswith((".jinja", ".j2"))) and not Path(path).expanduser().is_file():
        yield f"--chat_template {path}: no such file"


def _data(c: Config) -> Iterator[str]:
    d = c.data
    yield from _sources("prompt_data", d.prompt_data)
    yield from _sources("eval_data", d.eval_data)
    yield from _chat_template(d.chat_template)
    yield from _probabilities(d.prompt_data_probs, len(d.prompt_data))
    yield from _difficulty(d.difficulty_key, d.difficulty_min, d.difficulty_max)
    if d.input_template is not None and d.input_template.count("{}") != 1:
        yield f"--input_template {d.input_template!r}: must hold {{}} exactly once, e.g. 'Question: {{}}'"


def _difficulty(key: str | None, low: float | None, high: float | None) -> Iterator[str]:
    if key is not None and low is None and high is None:
        yield (f"--difficulty_key {key}: has no effect without --difficulty_min or --difficulty_max; add one, e.g. "
               "--difficulty_max 0.9")
    if low is not None and high is not None and low > high:
        yield (f"--difficulty_min {low:g}: above --difficulty_max {high:g}, so no row is between them; nearest valid "
               f"value: {high:g}")


def _probabilities(probs: list[float], sources: int) -> Iterator[str]:
    if not probs or not sources:
        return
    if len(probs) != sources:
        yield f"--prompt_data_probs {probs}: {len(probs)} values for {sources} --prompt_data entries; give {sources}"
    elif abs(sum(probs) - 1) > 1e-6:
        nearest = ",".join(f"{p / sum(probs):.6g}" for p in probs) if sum(probs) > 0 else "positive values"
        yield f"--prompt_data_probs {probs}: must add up to 1, not {sum(probs):.6g}; nearest valid value: {nearest}"


def _rollout(c: Config) -> Iterator[str]:
    yield from length_problems(c)
    yield from oversample_problems(c)
    if any(not text for text in c.rollout.stop):
        yield f"--stop {c.rollout.stop}: an empty string would stop every response at once; drop it"
    if c.rollout.use_fire and c.rollout.first_token_temperature <= c.rollout.temperature:
        yield (f"--first_token_temperature {c.rollout.first_token_temperature:g}: --use_fire draws the first token at "
               f"a higher temperature than the rest ({c.rollout.temperature:g}); set it above, e.g. 10, or drop "
               "--use_fire")
    if c.rollout.sync_proof in ("off", "fingerprint"):
        for name, value in changed(c, ["sync_canary_every"]):
            yield (f"--{name} {value}: has no effect with --sync_proof {c.rollout.sync_proof}; add --sync_proof both "
                   "or drop it")
    if c.rollout.dynamic_sampling and c.rollout.n_samples_per_prompt == 1:
        yield ("--dynamic_sampling True: one response per prompt never differs, so no batch would ever fill; nearest "
               "valid value: --n_samples_per_prompt 2, or drop it")


def _reward(c: Config) -> Iterator[str]:
    r = c.reward
    for url in r.remote_rm_url:
        if not re.match(r"https?://[^/]", url):
            yield f"--remote_rm_url {url}: must start with http:// or https://; did you mean http://{url}?"
    for part in r.reward:
        yield from _reward_part(part)


def _reward_part(part: str) -> Iterator[str]:
    name, _, weight = part.rpartition("=") if "=" in part else (part, "", "1")
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", weight):
        yield f"--reward {part}: the weight after = must be a number, e.g. {name}=1.0"
    file = re.match(r"(.+\.py)(:\w+)?$", name)
    if file and not Path(file[1]).expanduser().is_file():
        yield f"--reward {part}: no such file: {file[1]}"


def _optimizer(t: OptimConfig) -> Iterator[str]:
    if len(t.adam_betas) != 2:
        yield f"--adam_betas {t.adam_betas}: needs two values; nearest valid value: 0.9 0.95"


def _train(c: Config) -> Iterator[str]:
    t = c.train
    if 0 < t.max_steps <= t.freezing_actor_steps:
        yield (f"--freezing_actor_steps {t.freezing_actor_steps}: the policy is never trained in {t.max_steps} steps; "
               f"nearest valid value: {t.max_steps - 1}")


def _eval(c: Config) -> Iterator[str]:
    e = c.eval
    if e.eval_steps > 0 and not c.data.eval_data:
        yield _no_eval_data(e.eval_steps)
    if e.eval_n_samples > 1 and e.eval_temperature == 0:
        yield (f"--eval_n_samples {e.eval_n_samples}: greedy samples of one prompt are all the same; "
               "set --eval_temperature above 0, or --eval_n_samples 1")
    for k in e.eval_pass_k:
        if k > e.eval_n_samples:
            yield (f"--eval_pass_k {k}: needs {k} samples per prompt; nearest valid value: {e.eval_n_samples}, "
                   f"or --eval_n_samples {k}")


def _checkpoint(p: CheckpointConfig, eval_data: list[str]) -> Iterator[str]:
    if p.save_steps == 0:
        yield "--save_steps 0: not a number of steps; nearest valid value: -1 (only at the end), or --disable_ckpt"
    if p.disable_ckpt:
        for name in ("load_checkpoint", "save_hf_ckpt", "best_metric", "ckpt_path"):
            if vars(p)[name]:
                yield f"--{name} {vars(p)[name]}: contradicts --disable_ckpt; drop one of them"
    if p.best_metric and p.best_metric.startswith("eval/") and not eval_data:
        yield f"--best_metric {p.best_metric}: is never measured without --eval_data; add --eval_data PATH"
    for name in ("save_path", "ckpt_path"):
        path = vars(p)[name]
        if path:
            yield from _writable(name, path)


def _writable(name: str, path: str) -> Iterator[str]:
    """Check a future folder: the nearest of it and its parents that exists must be a writable folder."""
    parents = (Path(path), *Path(path).absolute().parents)
    there = next(parent for parent in parents if os.path.exists(parent))
    which = "" if there == Path(path) else f"{there} "
    if not there.is_dir():
        yield f"--{name} {path}: {which}is a file; give a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"--{name} {path}: {which}cannot be written to; give a folder of your own, or change its permissions"


def _package(option: str, module: str, name: str) -> Iterator[str]:
    if find_spec(module) is None:
        yield f"--{option} True: the package {module} is not installed; run: pip install {name}"


def _packages(log: SinkConfig) -> Iterator[str]:
    if log.use_wandb:
        yield from _package("use_wandb", "wandb", "wandb")
    if log.use_trackio:
        yield from _package("use_trackio", "trackio", "trackio")
    if log.use_tensorboard:
        yield from _package("use_tensorboard", "tensorboard", "tensorboard")


def _strategy(c: Config | SFTConfig, world_size: int) -> Iterator[str]:
    yield from strategy_problems(c, world_size)
    yield from _divides("fsdp_shard_size", c.strategy.fsdp_shard_size, world_size)
    yield from _divides("zpg", c.strategy.zpg, world_size)


def _divides(name: str, size: int, world_size: int) -> Iterator[str]:
    if size > 0 and world_size % size:
        yield (f"--{name} {size}: must divide the {world_size} ranks; "
               f"nearest valid value: {_nearest_divisors(world_size, size)}")
