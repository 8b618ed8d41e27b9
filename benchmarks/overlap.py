"""Measure what ``--overlap_passes`` saves: generation and the reference's pass, in sequence and overlapped.

    python benchmarks/overlap.py [--pairs 3] [--threads 1] [--groups 32x8,256x1] [--slots 256,64] [--tokens 8192,2048]

The larger model of ``hf_engine.py`` counts down from a number that it draws log-uniformly from 8 to 256; prompts have
128 tokens, the reference is a model of the same size. ``slots`` is the number of responses generated at once.
``hidden`` is the share of the passes that fits alongside generation if a core is free for them; ``saved`` is that part
as a share of the total time. Both are from CPU seconds. ``measured`` is ``saved`` in wall time, median of pairs. Ten
minutes on two free cores.
"""
import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from hf_engine import END, LONGEST, SIZES, counting_model, new_episodes

import torch
from lightrft.config.schema import StrategyConfig
from lightrft.models.actor_language import ActorLanguage
from lightrft.rollout import generate, SamplingParams
from lightrft.rollout.hf.engine import HFEngine
from lightrft.strategy.strategy import FakeStrategy
from lightrft.trainer.logprob_pass import Pass
from lightrft.trainer.overlapped_passes import PassThread
from lightrft.trainer.batch_plan import MicroBatchLimits
from lightrft.types import Batch, Episode, Prompt

PROMPT = 128


class Ways:
    """Two orders of the same rollout and passes: in sequence and overlapped."""

    def __init__(self, groups: int, samples: int, slots: int, tokens: int) -> None:
        rng, self.tokens = random.Random(1), tokens
        self.samples = samples
        self.prompts = [Prompt("", [LONGEST + 1 + rng.randrange(32) for _ in range(PROMPT)], "") for _ in range(groups)]
        model, other = (counting_model(SIZES["hidden 256"]) for _ in range(2))
        for each in (model, other):
            each.set_attn_implementation("packed")
        per_token = 2 * 4 * model.config.num_hidden_layers * model.config.hidden_size
        self.engine = HFEngine(model, [END], slots * (PROMPT + LONGEST - 1) * per_token)
        self.reference, self.strategy = ActorLanguage(other), FakeStrategy(StrategyConfig(), False)
        self.strategy.setup()

    def generate(self, take: Callable[[list[Episode]], Any]) -> None:
        """Generate one rollout; ``take`` gets every response as it ends."""
        generate(self.engine, new_episodes(self.prompts, self.samples), SamplingParams(LONGEST),
                 heard=lambda finished: take(finished.episodes))

    def early(self, forward: Callable[..., torch.Tensor]) -> PassThread:
        """Make the trainer's own overlapped passes."""
        limits = MicroBatchLimits(0, self.tokens)
        return PassThread(self.strategy, [Pass("ref", ("ref_logprobs", ), forward)], limits)

    def overlapped(self) -> float:
        """Seconds of generation with overlapped passes."""
        start = time.perf_counter()
        with self.early(lambda exp: self.reference(exp)[0][None]) as early:
            self.generate(early.add)
        return time.perf_counter() - start

    def apart(self) -> tuple[float, tuple[float, float], float]:
        """Seconds in sequence; CPU seconds of generation and of the passes; CPU seconds to the end with a free core."""
        packs, early, clock = [], self.early(lambda exp: exp), time.thread_time
        early.flush = lambda: packs.append((clock(), early._open)) or setattr(early, "_open", [])
        start, cpu = time.perf_counter(), clock()
        self.generate(early.add)
        early.flush()
        generated, end = clock(), cpu
        for ready, pack in packs:
            begun = clock()
            with torch.no_grad():
                self.reference(Batch.of(pack))
            end = max(end, ready) + clock() - begun
        return time.perf_counter() - start, (generated - cpu, clock() - generated), max(end, generated) - cpu


def line(groups: str, slots: int, tokens: int, pairs: int) -> str:
    """Measure one row of the table."""
    count, samples = map(int, groups.split("x"))
    ways, found = Ways(count, samples, slots, tokens), []
    ways.overlapped()  # warms up
    for number in range(pairs):
        if number % 2:
            overlapped, (apart, cpu, free) = ways.overlapped(), ways.apart()
        else:
            (apart, cpu, free), overlapped = ways.apart(), ways.overlapped()
        found.append((*cpu, 1 - (free - cpu[0]) / cpu[1], 1 - free / sum(cpu), 1 - overlapped / apart))
    generation, passes, hidden, saved, measured = map(statistics.median, zip(*found))
    return (f"| {groups} | {slots} | {tokens} | {generation:.1f} | {passes:.1f} | {hidden:.0%} | {saved:.0%} | "
            f"{measured:+.0%} |")


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of torch, for each of the two threads")
    parser.add_argument("--groups", default="32x8,256x1", help="prompts x samples, with commas")
    parser.add_argument("--slots", default="256,64")
    parser.add_argument("--tokens", default="8192,2048", help="most tokens in a pass")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| groups | slots | tokens in a pass | generation, CPU s | passes, CPU s | hidden | saved | measured |")
    print("|---|---|---|---|---|---|---|---|")
    for groups in args.groups.split(","):
        for slots in map(int, args.slots.split(",")):
            for tokens in map(int, args.tokens.split(",")):
                print(line(groups, slots, tokens, args.pairs), flush=True)


if __name__ == "__main__":
    main()
