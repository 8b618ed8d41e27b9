"""Checks and estimates of reinforcement learning."""
import re
from collections.abc import Iterator
from math import ceil
from typing import Any

from lightrft.config.schema import Config, EvalConfig, ModelConfig
from lightrft.config.stages import length_problems, never_trained
from lightrft.models.activations import ModelShape
from lightrft.preflight.algorithm_rules import algorithm_problems, algorithm_warnings, placed_problems, trains_critic
from lightrft.preflight.base import TrainingPhases
from lightrft.preflight.batches import batch_problems
from lightrft.preflight.cost import batch_summary, GIB, known_kinds, MIB, time_line
from lightrft.preflight.engine_rules import (engine_problems, missing_engine, overlap_problems, oversample_problems,
                                             shared_engine)
from lightrft.preflight.hardware import Device, Machine
from lightrft.preflight.memory import cut_rows, frozen_bytes, reward_bytes, reward_sizes, teacher_bytes
from lightrft.preflight.overhead import engine_rows
from lightrft.preflight.reward_rules import played_rewards, reward_problems
from lightrft.preflight.shared_rules import divides, evaluations, probabilities, prompts, triton_kernels
from lightrft.preflight.training import TrainingPreflight
from lightrft.rewards.spec import parse_models
from lightrft.rollout.engines import (ByPhase, engine_cache, engine_memory, engine_weights, largest_hf_cache, PHASES)
from lightrft.strategy.memory import ModelSize

SHARES, GROUPS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9), (2, 4, 8)  # of --engine_mem_util; ranks of an engine


class RLPreflight(TrainingPreflight):
    """Checks and estimates of a trainer whose engine generates between the updates."""
    config: Config
    has_rollout = True

    @property
    def trains_critic(self) -> bool:
        """True if the advantage estimator needs a critic."""
        return trains_critic(self.config)

    def problems(self, world_size: int, cuda: bool, local_ranks: int) -> Iterator[str]:
        """Yield the problems of data, rollout, rewards, algorithm, models, batches and engine."""
        yield from super().problems(world_size, cuda, local_ranks)
        c = self.config
        for check in (_data, _rollout, reward_problems, played_rewards, _train, _eval, algorithm_problems):
            yield from check(c)
        yield from placed_problems(c, world_size)
        yield from _reference(c.model, world_size)
        if c.model.fused_logprobs:
            yield from triton_kernels("fused_logprobs", cuda)
        yield from batch_problems(c, world_size)
        yield from engine_problems(c, world_size, cuda)
        yield from overlap_problems(c, world_size)
        yield from shared_engine(c.rollout, world_size, local_ranks)

    def missing_packages(self) -> Iterator[str]:
        """Yield the missing packages of the optimizer and of the engine."""
        yield from super().missing_packages()
        yield from missing_engine(self.config)

    def warnings(self) -> Iterator[str]:
        """Yield warnings about the algorithm too."""
        yield from super().warnings()
        yield from algorithm_warnings(self.config)

    def summary(self, world_size: int) -> list[str]:
        """Describe the prompts, samples and optimizer steps of a step."""
        return [batch_summary(self.config, world_size)]

    def further_estimates(self, machine: Machine, size: ModelSize | None) -> list[str]:
        """List the time of a step, the reward models, and what only the start of the engine can check."""
        c, caps = self.config, self.config.rollout.caps
        lines = [time_line(c, machine.ranks, size, machine.gpu, self.trains_critic)]
        lines += self._reward_models(machine.ranks)
        lines += [f"warning: {text}" for text in missing_engine(c)]  # of a plan for another machine
        if c.rollout.engine_args:
            lines.append(f"--engine_args: {caps.title} checks names and values when it starts, not here")
        return lines

    def _reward_models(self, ranks: int) -> list[str]:
        """Say of every reward model what it does, how large it is and where it rests."""
        r, paths = self.config.reward, parse_models(self.config.reward.reward_pretrain)
        if not paths:
            return []
        from lightrft.rewards.reward_models import description
        kinds, sizes = known_kinds(paths.values()), reward_sizes(r)
        sharing = self.config.strategy.fsdp_shard_size or ranks
        place = f"divided over {sharing} ranks" if r.reward_shard else "whole on each rank"
        place += ", in host memory except while it scores" if r.reward_offload else ""
        lines = []
        for name, path in paths.items():
            does = description(kinds[path], r) if path in kinds else "is read when the run starts"
            held = f", {sizes[name].total:,} parameters" if name in sizes else ""
            lines.append(f"reward model {name}: {path} {does}{held}, {place}")
        return lines

    def by_phase(self, held: TrainingPhases) -> ByPhase:
        """Return the bytes by phase of what the trainer holds, unless it is offloaded while the engine generates."""
        return (held[0] * (not self.config.rollout.offload_during_rollout), *held[1:], held[0])

    def not_trained(self, world_size: int, size: ModelSize, device: Device) -> dict[str, ByPhase]:
        """Return the bytes of reference, teacher, reward models, the weight sync and the engine."""
        c, m, sharded = self.config, self.config.model, self.config.strategy.divides_weights(world_size)
        reference = frozen_bytes(c, world_size, size, m.initial_model_shard_size)
        reference *= c.algorithm.init_kl_coef > 0 and not m.lora_rank
        taught = teacher_bytes(c, m.teacher_model, world_size, device)
        passes = self.by_phase((taught, ) * 4) if not m.teacher_offload else (0, taught, 0, 0, 0)
        bucket = min(max(c.rollout.sync_bucket_mib * MIB, 4 * size.largest),
                     4 * size.total) * sharded  # one tensor whole
        rows: dict[str, ByPhase] = {"reference": self.by_phase((reference, ) * 4), "teacher": passes,
                                    "reward models": reward_bytes(c, world_size),
                                    "bucket of full weights": (0, 0, 0, 0, bucket)}  # yapf: disable
        return rows | engine_memory(c, world_size, size, device.total, device.cuda)

    def pretraining_tokens(self, world_size: int) -> int:
        """Count the tokens of a micro-batch of ``--pretrain_data``."""
        c = self.config
        rows = ceil(c.pretraining_rows / world_size)
        held = cut_rows(c, rows, lambda count: count * c.pretrain_len)
        return held[0] if c.ptx.pretrain_data else 0

    def media_tokens(self, world_size: int, tokens: int) -> int:
        """Count the tokens of prompts: the samples of one share its media."""
        group = self.config.pass_tokens(self.config.rollout.n_samples_per_prompt)
        prompts = ceil(tokens / group) * self.config.rollout.prompt_max_len
        return max(prompts, self.pretraining_tokens(world_size))

    def of_engine(self, world_size: int, device: Device, shape: ModelShape | None) -> dict[str, ByPhase]:
        """Return the rows of the engine."""
        return engine_rows(self.config, world_size, device, shape)

    def no_cache(self, world_size: int, size: ModelSize, device: Device) -> Iterator[str]:
        """Yield the error of vLLM and SGLang, which take the cache from a share of the memory."""
        r, weights = self.config.rollout, engine_weights(self.config, world_size, size)
        if r.caps.own_weights and not engine_cache(self.config, world_size, size, device.total, device.cuda):
            yield (f"has no room for a key-value cache: the engine's weights take {weights / GIB:.2f} of the "
                   f"{r.engine_mem_util * device.total / GIB:.2f} GiB of --engine_mem_util {r.engine_mem_util:g}")

    def engine_changes(self, world_size: int) -> Iterator[dict[str, Any]]:
        """Yield changes to the memory of vLLM or SGLang and to the ranks that share one, the nearest first."""
        r = self.config.rollout
        if not r.caps.own_weights:
            return
        shares = sorted(SHARES, key=lambda share: abs(share - r.engine_mem_util))
        widths = [
            r.engine_tp_size, *(width for width in GROUPS if r.engine_tp_size < width and world_size % width == 0)
        ]
        yield from ({"engine_tp_size": width, "engine_mem_util": share} for width in widths for share in shares)
        yield from ({"engine_tp_size": width, "engine_kv_mib": 1024} for width in widths)

    def short_cache(self, world_size: int, shape: ModelShape | None, device: Device,
                    held: dict[str, ByPhase]) -> Iterator[tuple[str, str]]:
        """Yield the cache of the hf engine, which takes what is there."""
        cache = largest_hf_cache(self.config, world_size, shape, device.total) if "key-value cache" not in held else 0
        fullest = PHASES.index("log-probs" if self.config.rollout.overlap_passes else "generation")  # of those with it
        room = device.free - sum(values[fullest] for values in held.values())
        if room < cache:
            yield (f"the key-value cache of up to {cache / GIB:.2f} GiB",
                   f"--engine_kv_mib {max(1, int(room / 2) >> 20)} leaves as much for activations")

    def cache_notes(self) -> Iterator[str]:
        """Yield the cache of the hf engine, and what canaries take of that of others."""
        r = self.config.rollout
        if not (r.caps.own_weights or r.engine_kv_mib):
            yield "  and a key-value cache of up to a quarter of the memory of the device (--engine_kv_mib 0)"
        elif r.offload_during_rollout and r.sync_proof in ("canary", "both"):
            yield "  canaries need models and cache together in the weight sync; --sync_proof fingerprint avoids this"


def _reference(m: ModelConfig, world_size: int) -> Iterator[str]:
    yield from divides("initial_model_shard_size", m.initial_model_shard_size, world_size)
    if m.lora_rank > 0 and m.ref_pretrain:
        yield (f"--ref_pretrain {m.ref_pretrain}: has no effect with --lora_rank (the reference is the policy without "
               "its adapters); drop it")


def _data(c: Config) -> Iterator[str]:
    d = c.data
    yield from prompts(d)
    yield from probabilities("pretrain_data", c.ptx.pretrain_data_probs, len(c.ptx.pretrain_data))
    yield from _difficulty(d.difficulty_key, d.difficulty_min, d.difficulty_max)


def _difficulty(key: str | None, low: float | None, high: float | None) -> Iterator[str]:
    if key is not None and low is None and high is None:
        yield (f"--difficulty_key {key}: has no effect without --difficulty_min or --difficulty_max; add one, e.g. "
               "--difficulty_max 0.9")
    if low is not None and high is not None and low > high:
        yield (f"--difficulty_min {low:g}: above --difficulty_max {high:g}, so no row is between them; nearest valid "
               f"value: {high:g}")


def _rollout(c: Config) -> Iterator[str]:
    yield from length_problems(c)
    yield from oversample_problems(c)
    if c.rollout.use_fire and c.rollout.first_token_temperature <= c.rollout.temperature:
        yield (f"--first_token_temperature {c.rollout.first_token_temperature:g}: --use_fire samples the first token "
               f"at a higher temperature than the rest ({c.rollout.temperature:g}); set it above, e.g. 10, or drop "
               "--use_fire")
    if c.rollout.dynamic_sampling and c.rollout.n_samples_per_prompt == 1:
        yield ("--dynamic_sampling true: with one response per prompt no group has spread, so no batch would ever "
               "fill; nearest valid value: --n_samples_per_prompt 2, or drop it")


def _train(c: Config) -> Iterator[str]:
    yield from never_trained(c.train.freezing_actor_steps, c.train.max_steps)


def _eval(c: Config) -> Iterator[str]:
    e = c.eval
    yield from evaluations(c)
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
    if found := re.fullmatch(r"(eval/.+)/avg@.*", name):
        yield (f"--best_metric {name}: is no metric of a run; the share of right answers is {found[1]}/pass@1, and the "
               f"mean reward is {found[1]}/reward@{e.eval_n_samples}")
    elif found := re.fullmatch(r"eval/.+/(pass|reward)@(.*)", name):
        option, measured = {"pass": ("eval_pass_k", e.eval_pass_k), "reward":
                            ("eval_n_samples", [e.eval_n_samples])}[found[1]]
        if found[2] not in map(str, measured):
            stem = name.rpartition("@")[0]
            yield (f"--best_metric {name}: is not measured with --{option} {' '.join(map(str, measured))}; nearest "
                   f"valid value: {' or '.join(f'{stem}@{k}' for k in measured)}, or --{option} {found[2]}")
