"""Checks of all options against each other, the machine and the files, before any process group exists."""
import re
from collections.abc import Iterator, Mapping
from functools import singledispatch
from math import gcd
from typing import Any

from lightrft.config.evaluate_schema import EvaluateConfig
from lightrft.config.generate_schema import GenerateConfig
from lightrft.config.inference_schema import ChatConfig, InferenceTree
from lightrft.config.options import ConfigError, show
from lightrft.config.prompt_schema import PromptConfig
from lightrft.config.schema import Config, EvalConfig, ModelConfig
from lightrft.config.offline_schema import OfflineConfig, OfflineDataConfig
from lightrft.config.serve_schema import ServeConfig
from lightrft.config.shared_schema import Tree
from lightrft.config.stages import length_problems
from lightrft.config.tree import flatten, options
from lightrft.preflight.algorithm_rules import algorithm_problems, algorithm_warnings
from lightrft.preflight.engine_rules import (engine_problems, missing_engine, overlap_problems, oversample_problems,
                                             shared_engine)
from lightrft.preflight.inference_rules import engine_of_task, evaluation_problems, output_problems, score_problems
from lightrft.preflight.offline_rules import own_problems
from lightrft.preflight.reward_rules import placed_problems, reward_problems, served_problems
from lightrft.preflight.shared_rules import (chat_template, divides, evaluations, folder, missing_optimizer,
                                             nearest_divisors, per_rank, shared_problems, sources, suites, unused)


def validate(config: Tree, world_size: int, cuda: bool | None = None, planned: bool = False,
             local_ranks: int = 0) -> None:
    """Check a whole tree for a run on ``world_size`` ranks.

    Args:
        cuda: the ranks have GPUs; None: if this machine has one.
        planned: the run is planned for another machine, so this one need not have its packages.
        local_ranks: ranks on each machine; 0: all of them.

    Raises:
        ConfigError: with every problem found: option, value, reason and the nearest valid value or the remedy.
    """
    import torch
    cuda = torch.cuda.is_available() if cuda is None else cuda
    found = [*shared_problems(config, world_size, cuda), *problems(config, world_size, cuda, local_ranks or world_size),
             *(() if planned else missing_packages(config))]  # yapf: disable
    if found:
        raise ConfigError(list(dict.fromkeys(found)))


@singledispatch
def problems(config: Tree, world_size: int, cuda: bool, local_ranks: int) -> Iterator[str]:
    """Yield the problems of a tree beyond those of every trainer; each tree registers its rules here."""
    yield from ()


@problems.register
def _(config: OfflineConfig, world_size: int, cuda: bool, local_ranks: int) -> Iterator[str]:
    d, t = config.data, config.train
    yield from sources("train_data", d.train_data)
    yield from sources("eval_data", d.eval_data)
    yield from _rendering(d)
    yield from per_rank("train_batch_size", t.train_batch_size, world_size)
    yield from evaluations(config, t.eval_steps)
    yield from own_problems(config)


@problems.register
def _(config: Config, world_size: int, cuda: bool, local_ranks: int) -> Iterator[str]:
    for check in (_data, _rollout, reward_problems, _train, _eval, algorithm_problems):
        yield from check(config)
    yield from placed_problems(config, world_size)
    yield from _reference(config.model, world_size)
    yield from _batches(config, world_size)
    yield from engine_problems(config, world_size, cuda)
    yield from overlap_problems(config, world_size)
    yield from shared_engine(config.rollout.engine_tp_size, world_size, local_ranks)


@problems.register
def _(config: GenerateConfig, world_size: int, cuda: bool, local_ranks: int) -> Iterator[str]:
    yield from score_problems(config.scoring)
    yield from output_problems(config)
    yield from _prompts(config.as_config())
    if config.generates:
        yield from engine_of_task(config)
        yield from _inference(config, [config.model.pretrain or ""], world_size, cuda, local_ranks)


@problems.register
def _(config: EvaluateConfig, world_size: int, cuda: bool, local_ranks: int) -> Iterator[str]:
    yield from sources("eval_data", config.data.eval_data)
    yield from suites(config.data.eval_suite)
    yield from _rendering(config.data)
    yield from score_problems(config.score)
    yield from evaluation_problems(config)
    yield from _inference(config, config.model.pretrain or [""], world_size, cuda, local_ranks)


@problems.register
def _(config: ChatConfig, world_size: int, cuda: bool, local_ranks: int) -> Iterator[str]:
    yield from chat_template(config.chat.chat_template)
    if world_size > 1:
        yield f"lightrft chat runs in one process, not on {world_size} ranks; drop --nproc or torchrun"
    yield from _inference(config, [config.model.pretrain or ""], world_size, cuda, local_ranks)


@problems.register
def _(config: ServeConfig, world_size: int, cuda: bool, local_ranks: int) -> Iterator[str]:
    if world_size > 1:
        yield (
            f"lightrft serve_rm runs in one process, not on {world_size} ranks; start one per GPU, each with its own "
            "--port, and pass all of them to --remote_rm_url")
    yield from served_problems(config)


def _inference(config: InferenceTree, models: list[str], world_size: int, cuda: bool,
               local_ranks: int) -> Iterator[str]:
    """Yield the problems of models and an engine that generate without training."""
    rl = config.as_config()
    if "" in models:
        yield "--pretrain is missing: give an HF folder or hub id of the model"
    for path in models:
        yield from folder("pretrain", path)
    yield from _stop(rl.rollout.stop)
    yield from engine_problems(rl, world_size, cuda)
    yield from shared_engine(rl.rollout.engine_tp_size, world_size, local_ranks)


@singledispatch
def warnings(config: Tree) -> Iterator[str]:
    """Yield warnings about choices that are allowed but rarely intended; each tree registers its own."""
    yield from unused(config)


@warnings.register
def _(config: Config) -> Iterator[str]:
    yield from unused(config)
    yield from algorithm_warnings(config)


@singledispatch
def missing_packages(config: Tree) -> Iterator[str]:
    """Yield packages that the run needs and this machine lacks; a tree may register its own besides."""
    yield from missing_optimizer(config.train)


@missing_packages.register
def _(config: Config) -> Iterator[str]:
    yield from missing_optimizer(config.train)
    yield from missing_engine(config)


@missing_packages.register
def _(config: InferenceTree) -> Iterator[str]:
    yield from missing_engine(config.as_config())


@missing_packages.register
def _(config: ServeConfig) -> Iterator[str]:
    yield from ()


def nearest_multiples(value: int, step: int) -> str:
    """Format the multiples of ``step`` around ``value`` that are above 0: ``96 or 128``."""
    below = value // step * step
    return " or ".join(str(n) for n in (below, below + step) if n > 0)


def _batches(c: Config, world_size: int) -> Iterator[str]:
    prompts, samples, batch = c.rollout.rollout_batch_size, c.rollout.n_samples_per_prompt, c.train.train_batch_size
    if min(prompts, samples, batch) < 1:
        return
    total = prompts * samples
    if total % batch:
        yield (
            f"--train_batch_size {batch}: a rollout has {prompts} prompts x {samples} samples = {total}, which must be "
            f"a multiple of it; nearest valid: --train_batch_size {nearest_divisors(total, batch)}, "
            f"or --rollout_batch_size {nearest_multiples(prompts, batch // gcd(batch, samples))}")
    for name, value in (("rollout_batch_size", prompts), ("train_batch_size", batch)):
        yield from per_rank(name, value, world_size)


def _reference(m: ModelConfig, world_size: int) -> Iterator[str]:
    yield from folder("ref_pretrain", m.ref_pretrain)
    yield from folder("critic_pretrain", m.critic_pretrain)
    yield from folder("teacher_model", m.teacher_model)
    yield from divides("initial_model_shard_size", m.initial_model_shard_size, world_size)
    if m.lora_rank > 0 and m.ref_pretrain:
        yield (f"--ref_pretrain {m.ref_pretrain}: has no effect with --lora_rank (the reference is the policy without "
               "its adapters); drop it")


def _data(c: Config) -> Iterator[str]:
    d = c.data
    yield from _prompts(c)
    yield from sources("eval_data", d.eval_data)
    yield from suites(d.eval_suite)
    yield from sources("pretrain_data", c.ptx.pretrain_data) if c.ptx.pretrain_data else ()
    yield from _probabilities("pretrain_data", c.ptx.pretrain_data_probs, len(c.ptx.pretrain_data))
    yield from _difficulty(d.difficulty_key, d.difficulty_min, d.difficulty_max)


def _prompts(c: Config) -> Iterator[str]:
    d = c.data
    yield from sources("prompt_data", d.prompt_data)
    yield from _rendering(d)
    yield from _probabilities("prompt_data", d.prompt_data_probs, len(d.prompt_data))


def _rendering(d: PromptConfig | OfflineDataConfig) -> Iterator[str]:
    yield from chat_template(d.chat_template)
    if d.input_template is not None and d.input_template.count("{}") != 1:
        yield f"--input_template {d.input_template!r}: must hold {{}} exactly once, e.g. 'Question: {{}}'"


def _difficulty(key: str | None, low: float | None, high: float | None) -> Iterator[str]:
    if key is not None and low is None and high is None:
        yield (f"--difficulty_key {key}: has no effect without --difficulty_min or --difficulty_max; add one, e.g. "
               "--difficulty_max 0.9")
    if low is not None and high is not None and low > high:
        yield (f"--difficulty_min {low:g}: above --difficulty_max {high:g}, so no row is between them; nearest valid "
               f"value: {high:g}")


def _probabilities(name: str, probs: list[float], sources: int) -> Iterator[str]:
    """Yield the problem of the mixing probabilities of the ``sources`` entries of an option."""
    if not probs or not sources:
        return
    if len(probs) != sources:
        yield f"--{name}_probs {probs}: {len(probs)} values for {sources} --{name} entries; give {sources}"
    elif abs(sum(probs) - 1) > 1e-6:
        nearest = ",".join(f"{p / sum(probs):.6g}" for p in probs) if sum(probs) > 0 else "positive values"
        yield f"--{name}_probs {probs}: must add up to 1, not {sum(probs):.6g}; nearest valid value: {nearest}"


def _rollout(c: Config) -> Iterator[str]:
    yield from length_problems(c)
    yield from oversample_problems(c)
    yield from _stop(c.rollout.stop)
    if c.rollout.use_fire and c.rollout.first_token_temperature <= c.rollout.temperature:
        yield (f"--first_token_temperature {c.rollout.first_token_temperature:g}: --use_fire samples the first token "
               f"at a higher temperature than the rest ({c.rollout.temperature:g}); set it above, e.g. 10, or drop "
               "--use_fire")
    if c.rollout.dynamic_sampling and c.rollout.n_samples_per_prompt == 1:
        yield ("--dynamic_sampling true: with one response per prompt no group has spread, so no batch would ever "
               "fill; nearest valid value: --n_samples_per_prompt 2, or drop it")


def _stop(stop: list[str]) -> Iterator[str]:
    if any(not text for text in stop):
        yield f"--stop {stop}: an empty string would stop every response at once; drop it"


def _train(c: Config) -> Iterator[str]:
    t = c.train
    if 0 < t.max_steps <= t.freezing_actor_steps:
        yield (f"--freezing_actor_steps {t.freezing_actor_steps}: the policy is never trained in {t.max_steps} steps; "
               f"nearest valid value: {t.max_steps - 1}")


def _eval(c: Config) -> Iterator[str]:
    e = c.eval
    yield from evaluations(c, e.eval_steps)
    if c.held_out and e.eval_steps:
        yield from _measured(c.checkpoint.best_metric or "", e)
    if e.eval_n_samples > 1 and e.eval_temperature == 0:
        yield (f"--eval_n_samples {e.eval_n_samples}: greedy samples of one prompt are all the same; "
               "set --eval_temperature above 0, or --eval_n_samples 1")
    for k in e.eval_pass_k:
        if k > e.eval_n_samples:
            yield (f"--eval_pass_k {k}: needs {k} samples per prompt; nearest valid value: {e.eval_n_samples}, "
                   f"or --eval_n_samples {k}")


def _measured(name: str, e: EvalConfig) -> Iterator[str]:
    """Yield the problem of a ``--best_metric`` with a number of samples that the evaluation does not report."""
    found = re.fullmatch(r"eval/.+/(pass|avg)@(.*)", name)
    if found:
        option, measured = {"pass": ("eval_pass_k", e.eval_pass_k), "avg":
                            ("eval_n_samples", [e.eval_n_samples])}[found[1]]
        if found[2] not in map(str, measured):
            stem = name.rpartition("@")[0]
            yield (f"--best_metric {name}: is not measured with --{option} {' '.join(map(str, measured))}; nearest "
                   f"valid value: {' or '.join(f'{stem}@{k}' for k in measured)}, or --{option} {found[2]}")


def changes(saved: Mapping[str, Any], config: Tree) -> list[str]:
    """List ``--name value (was other)`` for each option that affects what is learnt and differs on resume.

    Args:
        saved: the options of the checkpoint, flat; an option that it does not know is not compared.
        config: of the resumed run.
    """
    now = flatten(config)
    return [
        f"--{name} {show(now[name])} (was {show(saved[name])})" for name, option in options(config).items()
        if not option.free and saved.get(name, now[name]) != now[name]
    ]


def lost_length(saved: Mapping[str, Any], config: Tree) -> str | None:
    """Explain an undefined length of the run: it counts batches of the data, and their size has changed; else None."""
    name, now = config.BATCH, flatten(config)
    if now["max_steps"] or saved.get(name, now[name]) == now[name]:
        return None
    return (f"--{name} {now[name]}: the checkpoint was made with {saved[name]}, so the remaining data is not a whole "
            f"number of steps; resume with --{name} {saved[name]}, or set the end of the run with --max_steps")
