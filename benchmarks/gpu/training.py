"""Whole steps of the trainer, and its update alone at several lengths."""
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from step_anatomy import phase_seconds

from benchmarks.gpu.catalog import ANATOMY, FACTS, Setting, UPDATE
from benchmarks.gpu.models import open_trainer
from benchmarks.gpu.store import Row, Tables
from lightrft.config.options import show
from lightrft.models.loss import PolicyLoss
from lightrft.ops.aggregate import count
from lightrft.strategy.base import StrategyBase
from lightrft.trainer.optimizer_step import OptimizerStep
from lightrft.trainer.run_log import mfu
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer
from lightrft.types import Experience
from lightrft.utils.env import peak_memory_gib
from lightrft.utils.gpu import gpu_name, peak_flops

GIB = 1 << 30
STEPS = 4  # the first one warms up
REPEATS = 2  # of an optimizer step
LENGTHS = ((4096, 2048), (16384, 2048), (65536, 2048), (65536, 65536))  # tokens of a micro-batch, of its sequences
SAFE = 2  # of these fit every GPU
REDUCED_LENGTHS = ((64, 32), (128, 64))
MEASURED = ("policy/first_", "rollout/mismatch/")  # metrics of the first step, by the start of their names


def batch(setting: Setting) -> tuple[int, int, int]:
    """Return the prompts of a step, samples per prompt and tokens per sample."""
    return (4, 2, 8) if setting.reduced else (32, 8, 256)


def steps(setting: Setting) -> Iterator[Tables]:
    """Run steps of the trainer; SIGTERM ends it after the step in which it arrives."""
    with open_trainer(setting, *batch(setting), STEPS) as trainer:
        trainer.fit()
        yield step_tables(setting)


def step_tables(setting: Setting) -> Tables:
    """Return the facts of the first step and the phases of the others, as far as there are any."""
    first, *others = read_lines(setting)
    return {FACTS: [facts(first)]} | ({ANATOMY: [anatomy(others)]} if others else {})


def run_steps(setting: Setting, prompts: int, samples: int, new_tokens: int) -> list[dict[str, float]]:
    """Run steps of the trainer; return their metrics."""
    with open_trainer(setting, prompts, samples, new_tokens, STEPS) as trainer:
        trainer.fit()
    return read_lines(setting)


def read_lines(setting: Setting) -> list[dict[str, float]]:
    """Read the metrics of the steps that the first rank has written."""
    file = Path(setting.scratch) / "run" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def facts(metrics: dict[str, float]) -> Row:
    """Return the differences that are checked at the first step."""
    found = {key.split("/")[-1]: value for key, value in metrics.items() if key.startswith(MEASURED)}
    return {"tokens": int(metrics["policy/trained_tokens"])} | found


def anatomy(lines: list[dict[str, float]]) -> Row:
    """Return milliseconds per phase, speed and memory."""
    seconds = phase_seconds(lines)
    tokens = statistics.fmean(line["rollout/tokens"] for line in lines)
    phases = {name: round(value * 1e3, 1) for name, value in seconds.items() if value > 5e-5}
    return {
        "step": round(sum(seconds.values()) * 1e3, 1), **phases, "tokens/s": tokens / sum(seconds.values()),
        "MFU of the update": lines[-1].get("perf/mfu"), "most GiB after a phase": most_memory(lines)
    }


def most_memory(lines: list[dict[str, float]]) -> float:
    """Return the most memory in use after a phase, in GiB: of the whole device, whichever process holds it."""
    return max(value for line in lines for name, value in line.items() if name.startswith("perf/mem/"))


def update(setting: Setting) -> Iterator[Tables]:
    """Time an optimizer step for several sizes of a micro-batch."""
    rows: list[Row] = []
    with open_trainer(setting, 2, 2, 8, 1) as trainer:
        trainer.engine.sleep()
        lengths = REDUCED_LENGTHS if setting.reduced else LENGTHS
        if setting.short or trainer.strategy.world_size > 1:  # other ranks would wait for one without memory
            lengths = lengths[:SAFE]
        for tokens, longest in lengths:
            rows.append(row(trainer, tokens, longest))
            yield {UPDATE: rows}


def row(trainer: SPMDPPOTrainer, tokens: int, longest: int) -> Row:
    """Measure one size; a size that does not fit is a result too."""
    found: Row = {"tokens per rank": tokens, "of sequences of": longest, "ranks": trainer.strategy.world_size,
                  "Liger": "on" if trainer.config.model.use_liger else "off",
                  "recomputed": show(trainer.config.model.gradient_checkpointing)}  # yapf: disable
    exp, cuda = packed(tokens, longest, trainer), trainer.strategy.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        seconds = min(step_seconds(trainer, exp, 1 + REPEATS)[1:])  # the first one warms up
        if cuda:
            torch.cuda.empty_cache()  # as an engine that falls asleep does
        after, = step_seconds(trainer, exp, 1)
    except torch.OutOfMemoryError:
        trainer.strategy.discard_gradients(trainer.prepared["actor"])
        return found | {"s": "out of memory"}
    found |= {"s": seconds, "after a rollout, s": after, "tokens/s": tokens * trainer.strategy.world_size / seconds}
    found |= utilisation(trainer, tokens, longest, seconds) | {"peak GiB": peak_memory_gib(trainer.strategy.device)}
    return found | {"reserved GiB": torch.cuda.max_memory_reserved() / GIB if cuda else None}


def packed(tokens: int, longest: int, trainer: SPMDPPOTrainer) -> Experience:
    """Make random sequences, all of whose tokens but the first are trained."""
    generator = torch.Generator().manual_seed(trainer.strategy.rank)
    starts = torch.arange(0, tokens + 1, longest, dtype=torch.int32)
    vocabulary = trainer.prepared["actor"].model.hf_model.config.vocab_size
    ids = torch.randint(vocabulary, (tokens, ), generator=generator)
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[starts[:-1].long()] = False
    return Experience(token_ids=ids, cu_seqlens=starts, loss_mask=mask,
                      advantages=torch.randn(tokens, generator=generator))


def step_seconds(trainer: SPMDPPOTrainer, exp: Experience, steps: int) -> list[float]:
    """Return the seconds of each of several optimizer steps on ``exp``."""
    config, strategy, actor = trainer.config, trainer.strategy, trainer.prepared["actor"]
    loss_module = PolicyLoss(config.algorithm, config.rollout.generate_max_len)
    counts = strategy.all_reduce(count(exp.loss_mask, exp.cu_seqlens).to(strategy.device))
    step, seconds = OptimizerStep(config.train, strategy, trainer.timer), []

    def loss_of(batch: Experience) -> torch.Tensor:
        logprobs, entropy = actor.model(batch, entropy=True)
        return loss_module(logprobs, entropy, batch, loss_module.denominators(counts), 0.0)[0]

    for _ in range(steps):
        synchronize(strategy)
        start = time.perf_counter()
        step.run(actor, lambda part: exp, [[0]], float(exp.loss_mask.sum()), loss_of)
        synchronize(strategy)
        seconds.append(time.perf_counter() - start)
    return seconds


def synchronize(strategy: StrategyBase) -> None:
    """Wait for the device, then for all ranks."""
    if strategy.device.type == "cuda":
        torch.cuda.synchronize()
    strategy.barrier()


def utilisation(trainer: SPMDPPOTrainer, tokens: int, longest: int, seconds: float) -> Row:
    """Return the MFU without and with attention scores, per rank; None where the peak of the device is not known."""
    peak = peak_flops(gpu_name()) if trainer.strategy.device.type == "cuda" else None
    if peak is None:
        return {"MFU": None, "MFU with attention": None}
    model = trainer.prepared["actor"].model
    parameters = trainer.log.parameters  # adapters included: they are few
    dense = mfu(parameters, tokens, seconds, peak) * (4 / 6 if model.lora_rank else 1)
    scores = attention_flops(model.hf_model.config, tokens, longest)
    return {"MFU": dense, "MFU with attention": dense + 3 * scores / (seconds * peak)}


def attention_flops(config: Any, tokens: int, longest: int) -> float:
    """Return the forward FLOPs of causal scores and their values: 2 L^2 d per layer and sequence."""
    return 2.0 * tokens * longest * config.hidden_size * config.num_hidden_layers
