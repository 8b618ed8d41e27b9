"""Balance and completeness of the batch plan."""
import random

import pytest
import torch

from lightrft.trainer.replay_buffer import (MicroBatchLimits, ReplayBuffer, karmarkar_karp, mini_batches,
                                            plan_mini_batch, take)
from lightrft.types import Experience


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_karmarkar_karp_is_a_partition_and_balanced(parts):
    rng = random.Random(parts)
    weights = [rng.randint(1, 200) for _ in range(120)]
    cut = karmarkar_karp(weights, parts)
    assert sorted(i for part in cut for i in part) == list(range(120))
    sums = [sum(weights[i] for i in part) for part in cut]
    assert max(sums) - min(sums) <= max(weights) // 10 + 1


def test_karmarkar_karp_corner_cases():
    assert karmarkar_karp([], 3) == [[], [], []]
    assert sorted(karmarkar_karp([5, 5, 5], 3)) == [[0], [1], [2]]
    assert sorted(map(len, karmarkar_karp([7], 2))) == [0, 1]
    assert sorted(sum([4, 5, 6, 7, 8][i] for i in part) for part in karmarkar_karp([4, 5, 6, 7, 8], 2)) == [14, 16]


@pytest.mark.parametrize("rows,tokens", [(1, 10**6), (8, 10**6), (0, 300), (3, 250), (0, 1)])
def test_plan_respects_limits_and_ranks_agree(rows, tokens):
    rng = random.Random(1)
    lens = [rng.randint(5, 120) for _ in range(37)]
    samples = list(range(3, 37))
    plan = plan_mini_batch(samples, lens, 3, MicroBatchLimits(rows, tokens))
    assert len({len(rank) for rank in plan}) == 1
    assert sorted(i for rank in plan for micro in rank for i in micro) == samples
    for micro in (micro for rank in plan for micro in rank if len(micro) > 1):
        assert sum(lens[i] for i in micro) <= tokens and (not rows or len(micro) <= rows)


@pytest.mark.parametrize("lens,limits,bound,passes", [
    ([100, 100], MicroBatchLimits(0, 30), None, 2),  # each sequence is longer than a pass
    ([10] * 8, MicroBatchLimits(1, 1000), [0] * 4 + [1] * 4, 2), ([10] * 8, MicroBatchLimits(1, 1000), None, 8),
    ([10] * 8, MicroBatchLimits(4, 1000), [0, 0, 1, 1, 2, 2, 3, 3], 2)], ids=str)  # yapf: disable
def test_what_exceeds_the_limits_alone_makes_no_empty_pass(lens, limits, bound, passes):
    plan, = plan_mini_batch(list(range(len(lens))), lens, 1, limits, bound)
    assert len(plan) == passes and all(plan)


def test_mini_batches_do_not_depend_on_ranks_and_reshuffle_per_epoch():
    lens = torch.randint(5, 50, (24, ))
    limits = MicroBatchLimits(0, 100)
    one = ReplayBuffer(lens, 8, limits, 0, 1, "s")
    two = [ReplayBuffer(lens, 8, limits, rank, 2, "s") for rank in range(2)]
    assert [b.samples for b in one.epoch(0)] == [b.samples for b in two[1].epoch(0)]
    assert one.epoch(0) == one.epoch(0) and one.epoch(0) != one.epoch(1)
    for whole, *shares in zip(one.epoch(0), two[0].epoch(0), two[1].epoch(0)):
        assert sorted(whole.samples) == sorted(i for share in shares for micro in share.micro_batches for i in micro)


def test_mini_batches_cover_everything_once():
    cut = mini_batches(10, 4, "x")
    assert [len(c) for c in cut] == [4, 4, 2] and sorted(sum(cut, [])) == list(range(10))
    assert cut != mini_batches(10, 4, "y")


@pytest.mark.parametrize("versions", [None, torch.tensor([-1, 0, -1, 0, 0])])
def test_an_empty_part_is_a_sequence_without_rows(versions):
    exp = Experience(torch.arange(5), torch.tensor([0, 2, 5]),
                     torch.tensor([0, 1, 0, 1, 1]).bool(), weight_versions=versions)
    dummy = take(exp, [])
    assert dummy.token_ids.tolist() == [0, 1], "the shortest"
    assert not dummy.loss_mask.any() and not dummy.drawn.any()
    assert exp.loss_mask.sum() == 3 == exp.drawn.sum(), "the batch itself stays"
