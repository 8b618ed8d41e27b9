"""Count the decode steps of the hf engine that a GPU would run as they are, capture and replay, by response lengths.

    python benchmarks/decode_graphs.py [--lengths FILE | --most 1024] [--rollouts 3] [--slots 256] [--samples 8]
        [--prompt 128] [--weights 80000] [--freed] [--own]

The scheduler, its cache and the policy of graphs are the engine's own; the model, and the device, are not there: a
"graph" runs its step again, and a response ends at the length of its seed. ``--lengths``: a file with one length per
line, such as those of a run; by default 512 lengths that are spread log-uniformly from 8 to ``--most``. ``--freed``:
graphs are dropped after every rollout, as with a cache that takes more than a 32nd of a GPU. ``--own``: no step runs in
a larger shape than it needs.

A replay takes the time of reading the weights, and the cache and the scores in its shape. ``--weights``: tokens of the
cache that take as many bytes as the weights, by default those of a 0.5B model (988 MB, 12 KiB per token). A step that
is no replay takes three times as long, and a capture as long as that. ``padding`` is the time of replays in the shapes
of the steps, over that of what live responses need. ``time`` is that of all steps, in the shapes in which they run,
over replays of the shapes that they need.
"""
import argparse
import math
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from lightrft.models.attention import PackedLayout
from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.hf import continuous_batching
from lightrft.rollout.hf.continuous_batching import Generation
from lightrft.rollout.hf.decode_graph import Shape, StepGraphs
from lightrft.rollout.hf.cache_plan import KVPlan, KVSpec
from lightrft.rollout.hf.kv_cache import KVCache
from lightrft.rollout.hf.response_queue import ResponseQueue
from lightrft.rollout.hf.workspace import Sizes, Workspace
from lightrft.types import Episode, Prompt

CPU = torch.device("cpu")
SPEC = KVSpec(layers=(0, ), heads=1, dim=1, dtype=torch.float32)
MORE, END = 0, 1  # the vocabulary
WEIGHTS = 80_000  # of Qwen2.5 0.5B in bfloat16, in tokens of its cache
OTHER = 3  # replays that an eager step takes, and a capture


class Lengths:
    """In place of the model and of drawing: the response of seed i has ``lengths[i]`` tokens."""

    def __init__(self, lengths: list[int], weights: int) -> None:
        self.lengths, self.weights = lengths, weights

    def parameters(self) -> list[SimpleNamespace]:
        """Return weights as large as ``weights`` tokens of the cache."""
        return [SimpleNamespace(nbytes=self.weights * SPEC.bytes_per_token)]

    def uniforms(self, seeds: list[int], count: int) -> np.ndarray:
        """Return "noise" [B, count]: 1 at the last token of each response."""
        return (np.arange(1, count + 1) == np.array([self.lengths[seed] for seed in seeds])[:, None]).astype(float)

    def sample(self, logits: Tensor, last: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Return the tokens [n] that the "noise" says, and log-probs."""
        return torch.where(last > 0, END, MORE), torch.zeros(len(last))

    def inputs(self, exp: Any, model: Any) -> dict[str, Any]:
        """Return the inputs of a pass over prompts."""
        return {"packing": PackedLayout.build(exp.cu_seqlens)}

    def logits(self, model: Any, last: Tensor, **inputs: Any) -> Tensor:
        """Return logits [n, V] of a pass over prompts."""
        return torch.zeros(len(last), 2)


class Counted(StepGraphs):
    """The policy of graphs without a GPU; ``counts`` has the steps by kind, ``times`` what they take."""

    def __init__(self, weights: int) -> None:
        super().__init__(CPU)
        self.enabled, self.counts, self.times, self.weights = True, Counter[str](), Counter[str](), weights

    def _record(self, step: Any) -> Any:
        self.counts["captured"] += 1
        return SimpleNamespace(replay=lambda: self.counts.update(replayed=1)), torch.empty(0)

    def run(self, key: Any, step: Any) -> Tensor:
        """Run the step, and count it."""
        before, time = self.counts.copy(), self.weights + key.tokens
        result = super().run(key, step)
        captured, replayed = (self.counts[name] > before[name] for name in ("captured", "replayed"))
        self.times.update({"padded": time, "run": time * (OTHER * captured + (1 if replayed else OTHER))})
        if replayed:
            return step()
        self.counts["eager"] += 1
        return result


def rollout(graphs: Counted, space: Workspace, episodes: list[Episode], lengths: Lengths, own: bool) -> None:
    """Generate the responses of ``episodes`` once."""
    params, stub = space.sizes.params, cast(Any, lengths)
    queue = ResponseQueue()
    queue.submit({episode.key: episode for episode in episodes}, params, False)

    def decode_pass(tokens: Tensor, positions: Tensor, view: Any) -> Tensor:
        return torch.zeros(positions.shape[0], 2)

    ends = torch.tensor([False, True])
    generation = Generation(stub, stub, decode_pass, space, params, lambda _: ends, graphs, queue, 0)
    choose, slots = generation.shapes.choose, generation.slots

    def counted(needed: Shape) -> Shape:
        live = np.flatnonzero(slots.alive)
        prompts = len({response.prompt for response in slots.of(live)})
        mean = int(slots.count[live].sum()) // len(live)
        exact = Shape(len(live), prompts, -(-len(live) // prompts), generation.sizes[3], mean)
        graphs.times.update({"alone": graphs.weights + needed.tokens, "live": graphs.weights + exact.tokens})
        return needed if own else choose(needed)

    generation.shapes.choose = counted  # type: ignore[method-assign]
    while queue.open:
        generation.step()


def simulate(lengths: list[int], rollouts: int, slots: int, samples: int, prompt: int, seed: int = 0,
             freed: bool = False, weights: int = WEIGHTS, own: bool = False) -> list[dict[str, float]]:
    """Return counts of each of ``rollouts`` rollouts; each draws the order of the lengths anew."""
    most, rng, graphs = max(lengths), random.Random(seed), Counted(weights)
    groups, row = len(lengths) // samples, Prompt("", [0] * prompt, "")
    plan = KVPlan.fit(slots * (prompt + most), [samples] * groups, prompt, most - 1, slots)
    sizes = Sizes(SamplingParams(most), 2)
    space, rows = Workspace(KVCache(SPEC, plan, CPU), sizes), []
    for _ in range(rollouts):
        episodes = [Episode(row, i, j, seed=samples * i + j) for i in range(groups) for j in range(samples)]
        order = Lengths(rng.sample(lengths, len(lengths)), weights)
        graphs.counts.clear(), graphs.times.clear()
        if freed:
            graphs.graphs.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(continuous_batching, "uniforms", order.uniforms)
            patch.setattr(continuous_batching, "sample", order.sample)
            rollout(graphs, space, episodes, order, own)
        times, counts = graphs.times, {name: graphs.counts[name] for name in ("eager", "captured", "replayed")}
        rows.append(counts | {"padding": times["padded"] / times["live"], "time": times["run"] / times["alone"]})
    return rows


def spread(count: int = 512, least: int = 8, most: int = 1024) -> list[int]:
    """Return lengths spread log-uniformly."""
    rng = random.Random(1)
    return [round(math.exp(rng.uniform(math.log(least), math.log(most)))) for _ in range(count - 1)] + [most]


def main() -> None:
    """Print a line per rollout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, help="file with the length of a response per line")
    parser.add_argument("--most", type=int, default=1024, help="longest length, without a file")
    parser.add_argument("--freed", action="store_true", help="drop the graphs after every rollout")
    parser.add_argument("--own", action="store_true", help="run every step in the shape that it needs")
    parser.add_argument("--rollouts", type=int, default=3)
    parser.add_argument("--slots", type=int, default=256, help="rows at once")
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--weights", type=int, default=WEIGHTS, help="size of the weights in tokens of the cache")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of every prompt")
    args = parser.parse_args()
    lengths = [int(line) for line in args.lengths.read_text().split()] if args.lengths else spread(most=args.most)
    rows = simulate(lengths[:len(lengths) // args.samples * args.samples], args.rollouts, args.slots, args.samples,
                    args.prompt, freed=args.freed, weights=args.weights, own=args.own)
    columns = "rollout", "eager steps", "captures", "replays", "padding", "time"
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for number, row in enumerate(rows, 1):
        counts = " | ".join(str(row[name]) for name in ("eager", "captured", "replayed"))
        print(f"| {number} | {counts} | {row['padding']:.2f} | {row['time']:.2f} |")


if __name__ == "__main__":
    main()
