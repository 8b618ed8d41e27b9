"""Program of test_materialize: loads models on the ranks of torchrun with every strategy, and counts what it takes."""
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, ProfilerActivity

from lightrft.config.schema import ModelConfig, StrategyConfig
from lightrft.models.loader import load_actor, load_critic
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support.naive_model import experience
from lightrft.tests.support.tiny_lm import SPEC

STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp"},
    "hsdp": {"strategy": "fsdp", "fsdp_shard_size": 1},
    "cpu_offload": {"strategy": "fsdp", "fsdp_cpu_offload": True},
    "zero2": {"strategy": "deepspeed", "zero_stage": 2},
    "zero3": {"strategy": "deepspeed", "zero_stage": 3},
    "zero3_zpg": {"strategy": "deepspeed", "zero_stage": 3, "zpg": 2},
}


def builders(folder: Path) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Models by name; each takes ``deferred``."""
    for name in ("one_file", "parts_bf16", "experts"):
        yield name, partial(load_actor, ModelConfig(pretrain=str(folder / name)))
    cfg = ModelConfig(pretrain=str(folder / "one_file"), lora_rank=4)
    yield "lora", partial(load_actor, cfg)
    yield "reference", partial(load_actor, cfg, train=False)
    yield "critic", partial(load_critic, cfg)
    yield "saved_critic", partial(load_critic, ModelConfig(pretrain=str(folder / "critic"), value_head_prefix="head"))


def same_weights(strategy: StrategyBase, name: str, build: Callable[..., Any]) -> None:
    """A deferred model has the weights, ties, buffers and adapters of one that is read whole, on its first forward
    pass and before."""
    expected = build()
    trained = any(param.requires_grad for param in expected.parameters())
    found = strategy.prepare(partial(build, deferred=True), SPEC if trained else None).model
    weights = dict(strategy.gathered(found, 1 << 20))
    wanted = dict(expected.named_parameters())
    assert list(weights) == list(wanted), (name, set(weights) ^ set(wanted))
    for key, value in wanted.items():
        assert torch.equal(weights[key], value), (name, key)
    buffers = dict(found.named_buffers())
    for key, buffer in expected.named_buffers():
        assert torch.equal(buffers[key], buffer), (name, key)
    assert not any(tensor.is_meta for tensor in (*found.parameters(), *buffers.values())), name


def same_update(strategy: StrategyBase, folder: Path) -> None:
    """A step changes the weights of a deferred model as those of one that is read whole; matrices alone decay."""
    build = partial(load_actor, ModelConfig(pretrain=str(folder / "one_file")))
    learnt = []
    for model in (build(), partial(build, deferred=True)):
        prepared = strategy.prepare(model, replace(SPEC, options=replace(SPEC.options, l2=10.0)))
        logprobs, _ = prepared.model(experience())
        strategy.backward(logprobs.sum(), prepared)
        strategy.optimizer_step(prepared)
        learnt.append(dict(strategy.gathered(prepared.model, 1 << 20)))
    for key, value in learnt[0].items():
        assert torch.equal(learnt[1][key], value), key


def peak_bytes(work: Callable[[], Any], mapped: int) -> tuple[Any, int, int]:
    """The result of ``work``, the most bytes that torch's CPU allocator held at once for it, and those it holds in the
    end. Files mapped into memory, of ``mapped`` bytes, are reported too and are left out."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        result = work()
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes() if abs(event.nbytes()) != mapped else 0
        peak = max(peak, held)
    return result, peak, held


def few_bytes(strategy: StrategyBase, folder: Path) -> None:
    """Loading takes this rank's share, one tensor and a tenth; reading the whole model takes more."""
    build = partial(load_actor, ModelConfig(pretrain=str(folder / "larger")))
    whole = sum(param.numel() for param in build().parameters()) * 4
    largest = max(param.numel() for param in build().parameters()) * 4
    mapped = (folder / "larger" / "model.safetensors").stat().st_size
    prepared, peak, _ = peak_bytes(lambda: strategy.prepare(partial(build, deferred=True)), mapped)
    own = sum(piece.tensor.nbytes for _, part in strategy.own_slices(prepared.model) for piece in part.pieces)
    assert peak <= 1.1 * (own + largest) < whole, (peak, own, largest, whole)
    _, peak, kept = peak_bytes(lambda: strategy.prepare(partial(build, deferred=True), SPEC), mapped)
    assert peak <= 1.1 * (kept + largest), (peak, kept, largest)  # kept: with what DeepSpeed allocates for the updates
    _, before, _ = peak_bytes(lambda: strategy.prepare(build(), SPEC), mapped)
    assert before >= whole, (before, whole)


def main(folder: Path) -> None:
    holder = get_strategy(StrategyConfig(strategy="fsdp"))
    holder.setup()
    for name, options in STRATEGIES.items():
        strategy = get_strategy(StrategyConfig(**options))
        strategy.setup()
        if name in ("fsdp", "zero3"):
            few_bytes(strategy, folder)
        if name.startswith("zero3"):
            same_update(strategy, folder)
        for model, build in builders(folder):
            if name not in ("zero2", "zero3_zpg") or model in ("one_file", "critic"):
                same_weights(strategy, f"{name} {model}", build)
        strategy.teardown()
    holder.barrier()
    holder.teardown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # the profiler sees one thread
    main(Path(sys.argv[1]))
