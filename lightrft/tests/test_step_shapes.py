"""Shapes of decode steps that CUDA graphs replay: which one a step takes, and that it computes the same there."""
import re
from operator import add
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.decode_graphs import simulate, spread
from lightrft.rollout.hf.decode_graph import Shape, Shapes
from lightrft.rollout.hf.cache_plan import KVPlan, KVSpec
from lightrft.rollout.hf.kv_cache import Decode, KVCache, sizes


@pytest.mark.parametrize("more", [(4, 0, 0, 0, 0), (0, 2, 0, 0, 0), (0, 0, 3, 0, 0), (0, 0, 0, 5, 0), (0, 0, 0, 0, 9),
                                  (4, 2, 3, 5, 9)])  # yapf: disable
def test_rows_attend_in_a_larger_shape_as_in_their_own(more):
    """What is padded is random numbers."""
    cache = KVCache(KVSpec((0, ), 2, 8, torch.float32), KVPlan(6, 12, 12, 20), torch.device("cpu"))
    slots, lengths, columns = np.array([3, 0, -1, 3, 1]), np.array([7, 5, 0, 7, 2]), torch.arange(12) % 9
    query, key, value = (torch.randn(1, heads, 12, 8) for heads in (6, 2, 2))
    packed = torch.randn(12, 2, 5, 8)
    for store in (cache.prompts, cache.rows):
        store.data.normal_()

    def attended(shape):
        decode = Decode(cache)
        decode.arrange(slots, lengths, shape[:-1])
        decode.advance(columns[:shape.rows], shape.width, torch.ones(shape.rows))
        inputs = (x[:, :, :shape.rows] for x in (query, key, value))
        plain = decode.attend(0, *inputs, scaling=None, window=6)[0].flatten(1)
        fused = decode.attend_packed(0, None, None, packed[:shape.rows])
        return torch.cat([plain, fused], 1)[np.flatnonzero(slots >= 0)]

    needed = Shape(*sizes(slots, lengths), 9)
    torch.testing.assert_close(attended(Shape(*map(add, needed, more))), attended(needed), rtol=0, atol=1e-6)


def test_a_step_takes_an_open_shape_until_its_padding_has_cost_as_much_as_a_step():
    shapes = Shapes(weights=1000, prompts=4)
    large, small = Shape(8, 4, 2, 10, 100), Shape(4, 3, 2, 10, 50)
    assert shapes.choose(large) == large and shapes.choose(large._replace(samples=1)) == large
    steps = shapes.time(small) // (large.tokens - small.tokens)
    found = [shapes.choose(small) for _ in range(steps + 3)]
    own = small._replace(prompts=4)
    assert found == [large] * (steps + 1) + [own] * 2, "with room for all prompts, which costs little"
    assert shapes.choose(small._replace(width=40)) == own and shapes.choose(small._replace(width=51)) == large
    assert shapes.choose(long := large._replace(longest=20)) == long, "no open shape covers it"
    wide = Shapes(weights=0, prompts=64)
    assert wide.choose(few := Shape(64, 32, 2, 1000, 10)) == few, "room for all prompts would take twice the time"


@pytest.mark.parametrize("most, graphs", [(1024, "stay"), (1024, "freed"), (128, "stay"), (128, "freed"),
                                          (128, "stay, own shapes")])
def test_steps_of_spread_lengths_are_replays_as_the_docs_say(most, graphs):
    given = {"freed": graphs == "freed", "own": graphs == "stay, own shapes"}
    rows = simulate(spread(most=most), 3, slots=256, samples=8, prompt=128, **given)
    page = (Path(__file__).parents[2] / "docs" / "host_syncs.md").read_text(encoding="utf-8")
    said = re.search(rf"\| 8 to {most:,} \| {graphs} \| (.*) \|", page)[1]
    assert " | ".join(f"{row['time']:.2f}" for row in rows) == said
    assert max(row["padding"] for row in rows) < 1.3
