"""Measure what ``--oversample`` saves: forward passes of the engine per step, with lengths that spread in every group.

    python benchmarks/oversampling.py [--steps 12] [--factors 1,1.25,1.5,2] [--max_staleness 1] [--samples 8]

512 responses per step (64 prompts x 8 samples) of the smaller model of ``hf_engine.py``, which counts down from a
number that it draws log-uniformly from 8 to 256. The trainer's own source and maker drive the engine; rewards and the
update are left out, so the weights never change. A forward pass is the unit: on a GPU the last ones, with few responses
left, take nearly as long as the first. Every run trains the same responses; about two minutes on a free core.
"""
import argparse
import random
import time

from hf_engine import END, LONGEST, SIZES, counting_model

import torch
from lightrft.config.schema import Config
from lightrft.datasets.loader import PromptLoader
from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.hf.engine import HFEngine
from lightrft.rollout.scheduler import Quota
from lightrft.strategy.strategy import FakeStrategy
from lightrft.trainer.fast_exp_maker import FastExperienceMaker, GenerationRun, Rollout, Wait
from lightrft.trainer.partial_rollout import OversamplingSource
from lightrft.trainer.shards import Shards
from lightrft.types import Batch, Episode, Prompt
from lightrft.utils.timer import Timer

RESPONSES, PROMPT = 512, 128


class SilentRun(GenerationRun):
    """A generation whose responses are not decoded."""

    def _report(self, finished: list[Episode]) -> None:
        """Do nothing: the samples are not read."""


class Generating(FastExperienceMaker):
    """Generation alone: nothing is decoded, scored or trained."""
    listeners, tokenizer, environment = [], None, None

    def __init__(self, config: Config, engine: HFEngine) -> None:
        self.config, self.engine, self.timer, self.greedy = config, engine, Timer(), None
        self.strategy = FakeStrategy(config.strategy)
        self.strategy.setup()
        self.sampling = SamplingParams(LONGEST)

    def advance(self, mine: list[Episode], quota: int, due: set[int]) -> tuple[list, Wait]:
        """Generate as the trainer does."""
        with self.timer("rollout"):
            return SilentRun(self, mine, Quota(quota, due & {each.group_id for each in mine})).run(), lambda: None

    def complete(self, episodes: list[Episode], step: int, kl_coef: float = 0.0, wait: Wait | None = None) -> Rollout:
        """Return the batch unchanged."""
        return Rollout(Shards(self.strategy, Batch.of(episodes)), None, [], {})


def measure(factor: float, max_staleness: int, steps: int,
            samples: int) -> tuple[list[int], list[dict[str, float]], float, int]:
    """Measure forward passes and metrics of every step, CPU seconds per step, and a checksum of the lengths."""
    config, rng, passes, batch = Config(), random.Random(0), [0], RESPONSES // samples
    config.rollout.oversample, config.rollout.max_staleness = factor, max_staleness
    config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt = batch, samples
    prompts = [Prompt(str(i), [rng.randrange(LONGEST + 1, LONGEST + 33) for _ in range(PROMPT)], "")
               for i in range(batch * steps)]  # yapf: disable
    model = counting_model(SIZES["quickstart"])
    model.set_attn_implementation("packed")
    model.register_forward_pre_hook(lambda *_: passes.append(passes.pop() + 1))
    source = OversamplingSource(config, Generating(config, HFEngine(model, [END], 1 << 30)),
                                PromptLoader(prompts, batch), steps)
    made, counts, start = [], [], time.process_time()
    for step in range(steps):
        passes[0] = 0
        source.maker.engine.weight_version = step
        made.append(source.make(step))
        source.maker.timer.metrics()
        counts.append(passes[0])
    seconds = (time.process_time() - start) / steps
    lengths = sorted(length for rollout in made for length in rollout.exp.seq_lens.tolist())
    return counts, [rollout.metrics for rollout in made], seconds, hash(tuple(lengths))


def main() -> None:
    """Print one line per factor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--factors", default="1,1.25,1.5,2")
    parser.add_argument("--max_staleness", type=int, default=1)
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| `--oversample` | passes / step | against 1 | CPU s / step | stale tokens | mean staleness | same responses |"
    )
    print("|---|---|---|---|---|---|---|")
    base = None
    for factor in map(float, args.factors.split(",")):
        counts, metrics, seconds, lengths = measure(factor, args.max_staleness, args.steps, args.samples)
        mean = sum(counts) / len(counts)
        base = base or (mean, lengths)
        stale, age = (sum(line[name] for line in metrics) / len(metrics)
                      for name in ("rollout/stale_frac", "rollout/staleness/mean"))
        print(
            f"| {factor:g} | {mean:.1f} | {mean / base[0]:.2f} | {seconds:.2f} | {stale:.1%} | {age:.2f} | "
            f"{'yes' if lengths == base[1] else 'NO'} |", flush=True)


if __name__ == "__main__":
    main()
