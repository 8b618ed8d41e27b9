"""The rollout engine in the trainer's process: memory asleep and awake, weight sync, speed."""
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, ProfilerActivity

from benchmarks.gpu.catalog import ROLLOUT, Setting, SLEEP, SYNC
from benchmarks.gpu.models import model_folder, open_trainer, shape
from benchmarks.gpu.store import Row, Tables
from benchmarks.gpu.training import batch, step_tables, STEPS, synchronize
from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.scheduler import generate
from lightrft.strategy.base import StrategyBase
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer
from lightrft.types import Episode
from lightrft.utils.env import used_memory_gib

CHUNK = 256 << 20  # bytes copied at once
REPEATS = 3
COUNTED = (8, 24)  # tokens of a response, of which the kernels are counted


def run(setting: Setting) -> Iterator[Tables]:
    """Measure the life of an engine, then the steps of a trainer with it."""
    prompts, samples, new = batch(setting)
    with open_trainer(setting, prompts, samples, new, STEPS) as trainer:
        yield from life(trainer, make_episodes(trainer, prompts, samples), setting)
        trainer.fit()
        if trainer.strategy.is_main:
            yield step_tables(setting)


def engine(setting: Setting) -> Iterator[Tables]:
    """Measure the life of an engine alone."""
    prompts, samples, new = batch(setting)
    with open_trainer(setting, prompts, samples, new, 1) as trainer:
        yield from life(trainer, make_episodes(trainer, prompts, samples), setting)


def life(trainer: SPMDPPOTrainer, episodes: list[Episode], setting: Setting) -> Iterator[Tables]:
    """Let the engine of ``trainer`` sleep, wake, take weights and generate."""
    yield {SLEEP: [memory(trainer, episodes)]}
    yield {SYNC: [sync_speed(trainer)]}
    fixed = speed(trainer, episodes, setting, spread=False)
    yield {ROLLOUT: [fixed]}
    yield {ROLLOUT: [fixed, speed(trainer, episodes, setting, spread=True)]}


def make_episodes(trainer: SPMDPPOTrainer, prompts: int, samples: int) -> list[Episode]:
    """Take this rank's share of the prompts; responses differ by their seeds."""
    strategy, data = trainer.strategy, trainer.loader.dataset
    return [Episode(data[i], i, j, seed=samples * i + j) for i in range(strategy.rank, prompts, strategy.world_size)
            for j in range(samples)]  # yapf: disable


def generated(trainer: SPMDPPOTrainer, episodes: list[Episode], params: SamplingParams) -> int:
    """Generate unfinished episodes, which stay as they are; return the number of their tokens."""
    generate(trainer.engine, fresh := [replace(episode, segments=[]) for episode in episodes], params)
    return sum(episode.response_len for episode in fresh)


def timed(strategy: StrategyBase, function: Callable[[], Any]) -> float:
    """Return the seconds of a call, on all ranks together."""
    synchronize(strategy)
    start = time.perf_counter()
    function()
    synchronize(strategy)
    return time.perf_counter() - start


def memory(trainer: SPMDPPOTrainer, episodes: list[Episode]) -> Row:
    """Read the memory in use before and after sleeping, and after the generation that brings the cache back."""

    def used() -> float:
        synchronize(trainer.strategy)
        return used_memory_gib(trainer.strategy.device)

    row: Row = {"started": used()}
    trainer.engine.sleep()
    row["asleep"] = used()
    trainer.engine.wake()
    row["awake"] = used()
    trainer.sync_weights(1)
    generated(trainer, episodes, SamplingParams(4))
    row["generating"] = used()
    trainer.engine.sleep()
    row["asleep again"] = used()
    trainer.engine.wake()
    return row


def sync_speed(trainer: SPMDPPOTrainer) -> Row:
    """Time the weight sync with its proof, and a copy of as many bytes."""
    strategy, engine = trainer.strategy, trainer.engine
    if engine.shared_storage():
        trainer.sync_weights(2)
        return {"s": "the engine runs on the trainer's weights: nothing is copied"}
    trainer.timer.metrics()  # the clock begins anew
    seconds = min(sync_seconds(trainer, version) for version in range(2, 2 + REPEATS))
    proof = trainer.timer.metrics()["time/sync_proof_s"] / REPEATS
    sizes = {name: dtype.itemsize for name, dtype in engine.weight_dtypes().items()}
    shapes = {name: tensor.numel() for name, tensor in strategy.full_params(trainer.prepared["actor"].model)}
    nbytes = sum(numel * sizes.get(name, 2) for name, numel in shapes.items())
    plain = copy_seconds(strategy, nbytes)
    return {
        "s": seconds, "of this the proof": proof, "GB": nbytes / 1e9, "GB/s": nbytes / seconds / 1e9,
        "plain copy, GB/s": nbytes / plain / 1e9, "plain copies": seconds / plain
    }


def sync_seconds(trainer: SPMDPPOTrainer, version: int) -> float:
    """Return the seconds of a sync of all weights, frozen ones too: as after the update of a step, from sleep."""
    trainer.engine.sleep()
    trainer.engine.wake()
    return timed(trainer.strategy, lambda: trainer.sync_weights(version))


def copy_seconds(strategy: StrategyBase, nbytes: int) -> float:
    """Return the seconds of a copy of ``nbytes`` bytes on the device."""
    chunk = min(CHUNK, nbytes)
    source = torch.ones(chunk, dtype=torch.uint8, device=strategy.device)
    target = torch.empty_like(source)

    def copy() -> None:
        for start in range(0, nbytes, chunk):
            target.copy_(source)

    return min(timed(strategy, copy) for _ in range(REPEATS))


def speed(trainer: SPMDPPOTrainer, episodes: list[Episode], setting: Setting, spread: bool) -> Row:
    """Measure tokens/s through the library and of bare vLLM, and the way from asleep to the first token.

    Args:
        spread: a response ends at every token with a probability of two by its longest length, so that about one in
            eight reaches that length; False: all reach it.
    """
    longest = trainer.config.rollout.generate_max_len
    stops = range(longest // 2, shape(setting)["vocab_size"], longest // 2) if spread else ()
    params = SamplingParams(longest, stop_token_ids=tuple(stops))

    def through_the_library() -> int:
        if setting.engine == "vllm":  # as after the sync of a step
            trainer.engine.native.reset_prefix_cache()  # type: ignore[attr-defined]  # of vLLM's engine
        return generated(trainer, episodes, params)

    ways = {"tokens/s": through_the_library}
    if setting.engine == "vllm" and setting.tp == 1:
        ways["bare vLLM, tokens/s"] = bare_vllm(trainer, episodes, params, setting)
        ways["bare vLLM without seeds, tokens/s"] = bare_vllm(trainer, episodes, params, setting, seeds=False)
    row: Row = {"lengths": f"spread to {longest}" if spread else str(longest)}
    row |= {name: tokens_per_second(trainer.strategy, way) for name, way in ways.items()}
    if setting.engine == "hf" and not spread:
        row["kernels per step"] = kernels_per_step(trainer,
                                                   [each for each in episodes if each.group_id == episodes[0].group_id])
    return row if spread else row | first_token(trainer)


def tokens_per_second(strategy: StrategyBase, way: Callable[[], int]) -> float:
    """Return the best speed of all ranks together, after a call that warms up."""
    speeds, made = [], []
    for _ in range(REPEATS):
        seconds = timed(strategy, lambda: made.append(way()))
        speeds.append(strategy.all_reduce(torch.tensor(made[-1])).item() / seconds)
    return max(speeds[1:])


def kernels_per_step(trainer: SPMDPPOTrainer, episodes: list[Episode]) -> float | None:
    """Return the kernels of a decode step, replayed ones too: a response of more tokens has more steps, and no other
    kernels more. None without a GPU or what its profiler needs."""
    cuda, (few, many) = trainer.strategy.device.type == "cuda", COUNTED

    def kernels(tokens: int) -> int:
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
            generated(trainer, episodes, SamplingParams(tokens))
            synchronize(trainer.strategy)
        return sum(event.device_type == DeviceType.CUDA and not event.name.startswith("Mem")
                   for event in profiler.events() or ())  # yapf: disable

    return (kernels(many) - kernels(few)) / (many - few) or None


def bare_vllm(trainer: SPMDPPOTrainer, episodes: list[Episode], params: SamplingParams, setting: Setting,
              seeds: bool = True) -> Callable[[], int]:
    """Make a function that generates the same episodes with vLLM's own ``LLM`` on the same engine; without ``seeds``
    other responses."""
    from rollout_overhead import llm_around
    from vllm import SamplingParams as Native
    native: Any = trainer.engine.native  # type: ignore[attr-defined]  # of vLLM's engine
    llm = llm_around(native, str(model_folder(setting)))
    prompts = [{"prompt_token_ids": episode.prompt.token_ids} for episode in episodes]
    natives = [Native(max_tokens=params.max_new_tokens, logprobs=0, seed=episode.seed if seeds else None,
                      detokenize=False, stop_token_ids=list(params.stop_token_ids))
               for episode in episodes]  # yapf: disable

    def run() -> int:
        native.reset_prefix_cache()
        outputs = llm.generate(prompts, natives, use_tqdm=False)
        return sum(len(one.token_ids) for output in outputs for one in output.outputs)

    return run


def first_token(trainer: SPMDPPOTrainer) -> Row:
    """Time falling asleep; then waking up, the sync with its proof and the first token."""
    strategy, engine = trainer.strategy, trainer.engine
    first = [Episode(trainer.loader.dataset[0], 0, 0)]
    sleep = timed(strategy, engine.sleep)
    parts = {
        "wake, s": timed(strategy, engine.wake), "sync, s": timed(strategy, lambda: trainer.sync_weights(9)),
        "one token, s": timed(strategy, lambda: generate(engine, first, SamplingParams(1)))
    }
    return {"sleep, s": sleep, "wake to first token, s": sum(parts.values()), **parts}
