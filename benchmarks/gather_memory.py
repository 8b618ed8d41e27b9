"""Measure host memory and traffic per rank between generation and update, at a fixed global batch.

    python benchmarks/gather_memory.py [--ranks 1,2,4] [--prompts 64] [--samples 8] [--tokens 2048]

Every rank packs synthetic responses to its share of the prompts (gloo, on the CPU). Then the batch becomes experience
in one of two ways. ``gathered``: every rank gets all sequences as pickled objects, and log-probs by a sum over whole
rows [T]; earlier versions did that. ``moved``: each sequence moves to the rank that trains it, and statistics come from
vectors [B]; that is the trainer's :class:`~lightrft.trainer.shards.Shards`. Both compute the same advantages, relative
to the group, whose checksums must agree. Each way runs in its own processes. Memory is the rise of the peak resident
size over the size before the step, which includes a rank's own responses; the rank with the most counts. Traffic is
what a rank passes to collectives.
"""
import argparse
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.config.schema import AlgorithmConfig, RewardConfig, StrategyConfig
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.strategy import get_strategy
from lightrft.trainer.advantage_calculator import get_advantage_calculator
from lightrft.trainer.batch_plan import BatchPlan, MicroBatchLimits
from lightrft.trainer.scores import fill_rewards
from lightrft.trainer.shards import BatchRanks, Shards
from lightrft.types import Batch, Episode, Prompt, Segment
from lightrft.utils.score import Score

MIB = 1 << 20
COLLECTIVES = ("all_reduce", "all_gather_single", "all_gather_into_tensor", "all_to_all_single")


def local_batch(rank: int, world: int, prompts: int, samples: int, tokens: int) -> tuple[Batch, list[Episode]]:
    """Return the responses of this rank, of ``tokens`` on average, packed, and with their scores."""
    packs, scored = [], []
    for group in range(rank, prompts, world):
        generator = torch.Generator().manual_seed(group)
        for index, length in enumerate(
                torch.randint(tokens // 2, tokens * 3 // 2, (samples, ), generator=generator).tolist()):
            prompt = Prompt("", [1] * 64, "")
            new = length - 64
            segment = Segment([1] * new, [-0.5] * new, version=0)
            score = Score(float(index % 3), {"exact": 1.0}, weights={"exact": 1.0})
            scored.append(Episode(prompt, group, index, [segment], "stop", score=score))
            packs.append(Batch.of(scored[-1:]))
    return Batch.cat(packs), scored


def plan(lens: Tensor, strategy: StrategyBase) -> BatchPlan:
    """Plan mini-batches of a quarter of the batch."""
    return BatchPlan(lens, len(lens) // 4, MicroBatchLimits(8, 1 << 30), strategy.rank, strategy.world_size, "0")


def log_probs(exp: Batch) -> Tensor:
    """Stand in for a forward pass."""
    return -exp.token_ids.float()


def gathered(strategy: StrategyBase, exp: Batch, scored: list[Episode]) -> float:
    """Gather the whole batch on every rank."""
    parts = strategy.all_gather_object(exp)
    exp = Batch.cat(parts) if len(parts) > 1 else exp
    exp = exp.select(sorted(range(exp.num_seqs), key=exp.keys.__getitem__)) if len(parts) > 1 else exp
    own = [i for mini in plan(exp.seq_lens, strategy).epoch(0) for part in mini.micro_batches for i in part]
    for name in ("old_logprobs", "ref_logprobs"):
        whole = torch.zeros(exp.num_tokens)
        whole[exp.tokens_of(own)] = log_probs(exp.select(own))
        vars(exp)[name] = strategy.all_reduce(whole)
    everyone = [each for part in strategy.all_gather_object(scored) for each in part]
    everyone.sort(key=lambda episode: (episode.group_id, episode.index))
    calculator = get_advantage_calculator(AlgorithmConfig(), RewardConfig(), 4096)
    fill_rewards(exp, everyone, calculator.estimator)
    calculator(exp)
    return exp.advantages.double().abs().sum().item()


def moved(strategy: StrategyBase, exp: Batch, scored: list[Episode]) -> float:
    """Move each sequence to the rank that trains it."""
    shards = Shards(strategy, exp)
    numbers = shards.numbers
    shards.move(plan(shards.lens, strategy).owned())
    for name in ("old_logprobs", "ref_logprobs"):
        vars(shards.exp)[name] = log_probs(shards.exp)
    calculator, batch = get_advantage_calculator(AlgorithmConfig(), RewardConfig(), 4096), shards.batch()
    fill_rewards(batch, scored, calculator.estimator, BatchRanks(strategy, numbers, shards.size))
    calculator(batch)
    shards.update(batch)
    return strategy.all_reduce(shards.exp.advantages.double().abs().sum()).item()


WAYS: dict[str, Callable[..., float]] = {"gathered": gathered, "moved": moved}


def status(key: str) -> int:
    """Read bytes from this process's status."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(f"{key}:"))


def count_traffic() -> list[int]:
    """Count the bytes that this rank passes to collectives from now on, in a list of one."""
    sent = [0]

    def counting(function: Callable[..., Any], position: int) -> Callable[..., Any]:

        def call(*args: Any, **kwargs: Any) -> Any:
            sent[0] += args[position].numel() * args[position].element_size()
            return function(*args, **kwargs)

        return call

    from lightrft.strategy import collectives
    for name in COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, counting(getattr(dist, name), int(name != "all_reduce")))
    collectives.ALL_GATHER = counting(collectives.ALL_GATHER, 1)
    return sent


def measure(way: str, shape: list[int]) -> None:
    """Run one way on the ranks of this process group; rank 0 prints the most of any rank."""
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    strategy = get_strategy(StrategyConfig(strategy="fsdp" if ranks > 1 else "single"))
    strategy.setup()
    exp, scored = local_batch(strategy.rank, ranks, *shape)
    ctypes.CDLL(None).malloc_trim(0)  # else the step grows into memory that the making of the responses has freed
    sent, before = count_traffic(), status("VmRSS")  # the responses of this rank are in it
    strategy.barrier()
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")  # resets the peak
    checksum = WAYS[way](strategy, exp, scored)
    found = strategy.all_gather_object((status("VmHWM") - before, sent[0]))
    if strategy.is_main:
        peak, traffic = (max(values) / MIB for values in zip(*found))
        print(json.dumps({"peak": peak, "sent": traffic, "checksum": checksum}))
    strategy.teardown()


def run(way: str, ranks: int, shape: list[int]) -> dict[str, float]:
    """Measure one way in processes of its own."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    command = [sys.executable, *launcher, __file__, "--way", way, "--shape", *map(str, shape)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print one line per way and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks")
    parser.add_argument("--prompts", type=int, default=64, help="prompts in the global batch")
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt")
    parser.add_argument("--tokens", type=int, default=2048, help="mean tokens of a sequence")
    parser.add_argument("--way", choices=tuple(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=int, nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        measure(args.way, args.shape)
        return
    print("| ranks | way | peak MiB per rank | MiB sent per rank | advantages |\n|---|---|---|---|---|")
    expected = None
    for ranks in map(int, args.ranks.split(",")):
        for way in WAYS:
            found = run(way, ranks, [args.prompts, args.samples, args.tokens])
            expected = expected or found["checksum"]
            agree = abs(found["checksum"] - expected) <= 1e-6 * abs(expected)
            print(f"| {ranks} | {way} | {found['peak']:.0f} | {found['sent']:.1f} | {'equal' if agree else 'DIFFER'} |",
                  flush=True)  # yapf: disable


if __name__ == "__main__":
    main()
