"""Count the decode steps of the hf engine that a GPU would run as they are, capture and replay, by response lengths.

    python benchmarks/decode_graphs.py [--lengths FILE | --most 1024] [--rollouts 3] [--slots 256] [--samples 8]
        [--prompt 128] [--freed]

The scheduler, its cache and the policy of graphs are the engine's own; the model, and the device, are not there: a
"graph" runs its step again, and a response ends at the length of its seed. ``--lengths``: a file with one length per
line, such as those of a run; by default 512 lengths that are spread log-uniformly from 8 to ``--most``. ``--freed``:
graphs are dropped after every rollout, as with a cache that takes more than a 32nd of a GPU. ``padded`` is the work of
attention and of rows in the shapes of the steps, over what live responses need. ``time`` is that over replays alone, if
a step that is no replay takes three times as long, and a capture as long as that.
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
from lightrft.rollout.engine import Request, SamplingParams
from lightrft.rollout.hf import continuous_batching
from lightrft.rollout.hf.continuous_batching import Generation
from lightrft.rollout.hf.decode_graph import StepGraphs
from lightrft.rollout.hf.kv_cache import KVCache, KVPlan, KVSpec
from lightrft.rollout.hf.open_responses import ResponseQueue
from lightrft.rollout.hf.workspace import Sizes, Workspace

CPU = torch.device("cpu")
SPEC = KVSpec(layers=1, heads=1, dim=1, dtype=torch.float32)
MORE, END = 0, 1  # the vocabulary


class Lengths:
    """In place of the model and of drawing: the response of seed i has ``lengths[i]`` tokens."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

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
    """The policy of graphs without a GPU; ``counts`` has the steps by kind, ``work`` their sizes."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.enabled, self.counts, self.work = True, Counter[str](), Counter[str]()

    def _record(self, step: Any) -> Any:
        self.counts["captured"] += 1
        return SimpleNamespace(replay=lambda: self.counts.update(replayed=1)), torch.empty(0)

    def run(self, key: Any, step: Any) -> Tensor:
        """Run the step, and count it."""
        replayed = self.counts["replayed"]
        result = super().run(key, step)
        if replayed == self.counts["replayed"]:
            self.counts["eager"] += 1
            return result
        return step()


def rollout(graphs: Counted, space: Workspace, requests: list[Request], lengths: Lengths) -> None:
    """Generate the responses of ``requests`` once."""
    params, stub = space.sizes.params, cast(Any, lengths)
    queue = ResponseQueue()
    queue.submit(requests, params, False, 0)

    def decode_pass(tokens: Tensor, positions: Tensor, view: Any) -> Tensor:
        return torch.zeros(positions.shape[0], 2)

    ends = torch.tensor([False, True])
    generation = Generation(stub, stub, decode_pass, space, params, lambda _: ends, graphs, queue)
    compute = generation._compute

    def counted(rows: int, width: int) -> Tensor:
        live = np.flatnonzero(generation.slots.alive[:rows])
        _, prompts, _, longest = generation.decode.shape
        own = generation.slots.count[live].sum()
        alive = {response.prompt for response in generation.slots.of(live)}
        graphs.work.update({
            "rows": rows, "rows needed": len(live), "keys": rows * width + prompts * longest, "keys needed":
            int(own + len(alive) * longest)
        })
        return compute(rows, width)

    generation._compute = counted  # type: ignore[method-assign]
    while queue.open:
        generation.step()


def simulate(lengths: list[int], rollouts: int, slots: int, samples: int, prompt: int, seed: int = 0,
             freed: bool = False) -> list[dict[str, float]]:
    """Return counts of each of ``rollouts`` rollouts; each draws the order of the lengths anew."""
    most, rng, graphs = max(lengths), random.Random(seed), Counted()
    requests = [Request([0] * prompt, list(range(i, i + samples))) for i in range(0, len(lengths), samples)]
    plan = KVPlan.fit(slots * (prompt + most), [samples] * len(requests), prompt, most - 1, slots)
    sizes = Sizes(SamplingParams(most), 2)
    space, rows = Workspace(KVCache(SPEC, plan, CPU), sizes), []
    for _ in range(rollouts):
        order = Lengths(rng.sample(lengths, len(lengths)))
        graphs.counts.clear(), graphs.work.clear()
        if freed:
            graphs.graphs.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(continuous_batching, "uniforms", order.uniforms)
            patch.setattr(continuous_batching, "sample", order.sample)
            rollout(graphs, space, requests, order)
        work, counts = graphs.work, {name: graphs.counts[name] for name in ("eager", "captured", "replayed")}
        steps, added = counts["eager"] + counts["replayed"], 2 * counts["eager"] + 3 * counts["captured"]
        rows.append(counts | {"rows": work["rows"] / work["rows needed"], "keys": work["keys"] / work["keys needed"],
                              "time": 1 + added / steps})  # yapf: disable
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
    parser.add_argument("--rollouts", type=int, default=3)
    parser.add_argument("--slots", type=int, default=256, help="rows at once")
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of every prompt")
    args = parser.parse_args()
    lengths = [int(line) for line in args.lengths.read_text().split()] if args.lengths else spread(most=args.most)
    rows = simulate(lengths[:len(lengths) // args.samples * args.samples], args.rollouts, args.slots, args.samples,
                    args.prompt, freed=args.freed)
    columns = "rollout", "eager steps", "captures", "replays", "padded rows", "padded keys", "time"
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for number, row in enumerate(rows, 1):
        counts = " | ".join(str(row[name]) for name in ("eager", "captured", "replayed"))
        print(f"| {number} | {counts} | {row['rows']:.2f} | {row['keys']:.2f} | {row['time']:.2f} |")


if __name__ == "__main__":
    main()
