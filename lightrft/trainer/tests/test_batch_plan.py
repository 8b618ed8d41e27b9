"""Balance and completeness of the batch plan."""
import random

import pytest
import torch

from lightrft.models.shared_prompts import forward_row
from lightrft.tests.support.threads import World
from lightrft.trainer import batch_plan
from lightrft.trainer.batch_plan import (BatchPlan, karmarkar_karp, MicroBatchLimits, mini_batches, pass_tokens,
                                         plan_mini_batch, rank_tokens, select_micro_batch, SharedWork)
from lightrft.trainer.shards import Shards
from lightrft.types import Batch, Episode, Experience, Prompt, Segment

fill = batch_plan._fill


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


@pytest.mark.parametrize("samples,rows", [(128, 4), (64, 2), (600, 8)])
def test_a_limit_of_rows_costs_no_more_passes_than_it_must(samples, rows):
    """Although passes are balanced by tokens, and lengths differ by a factor of 100."""
    lens = [int(random.Random(i).lognormvariate(0, 0.8) * 1500) + 64 for i in range(samples)]
    plan, = plan_mini_batch(list(range(samples)), lens, 1, MicroBatchLimits(rows, 1 << 40))
    assert {len(part) for part in plan} == {rows}


def test_many_passes_are_planned_with_few_tries(monkeypatch):
    """Of 1,024 samples in 128 groups whose prompts are shared: about 200 passes, in place of 170 for whole groups."""
    tries = []
    monkeypatch.setattr(batch_plan, "_fill", lambda *args: tries.append(args[-1]) or fill(*args))
    lens = [512 + min(8192, int(random.Random(i).lognormvariate(0, 0.8) * 2000)) for i in range(1024)]
    limits, shared = MicroBatchLimits(0, 16384), SharedWork([i // 8 for i in range(1024)], [512] * 1024)
    plan, = plan_mini_batch(list(range(1024)), lens, 1, limits, shared=shared)
    assert all(limits.fit([[i] for i in part], lens, shared) for part in plan)
    assert len(plan) > min(tries) + 20 and len(tries) < 30


def test_attention_to_long_sequences_is_balanced():
    """Ranks have equal costs, not equal tokens: the long sequence counts for more than its tokens."""
    lens, cost = [3000, *[100] * 60], 1e-3
    tokens, costs = (plan_mini_batch(list(range(61)), lens, 2, MicroBatchLimits(0, 4000), attention=attention)
                     for attention in (0.0, cost))  # yapf: disable
    spread = [[sum(lens[i] + cost * lens[i]**2 for part in rank for i in part) for rank in plan]
              for plan in (tokens, costs)]  # yapf: disable
    assert max(spread[0]) > max(spread[1]) == lens[0] + cost * lens[0]**2, "it has a rank for itself"


def test_mini_batches_do_not_depend_on_ranks_and_reshuffle_per_epoch():
    lens = torch.randint(5, 50, (24, ))
    limits = MicroBatchLimits(0, 100)
    one = BatchPlan(lens, 8, limits, 0, 1, "s")
    two = [BatchPlan(lens, 8, limits, rank, 2, "s") for rank in range(2)]
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
    dummy = select_micro_batch(exp, [])
    assert dummy.token_ids.tolist() == [0, 1], "the shortest"
    assert not dummy.loss_mask.any() and not dummy.drawn.any()
    assert exp.loss_mask.sum() == 3 == exp.drawn.sum(), "the batch itself stays"


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("rows", [0, 8, 3])
def test_samples_of_one_prompt_stay_near_each_other(world, rows):
    """As far as limits and balance allow, so that a tower runs once for them; others are planned as before."""
    lens = [20 + i % 5 for i in range(64)]
    shared, limits = [i // 8 if i < 32 else -1 - i for i in range(64)], MicroBatchLimits(rows, 400)
    order = random.Random(3).sample(range(64), 64)
    plan = plan_mini_batch(order, lens, world, limits, shared=SharedWork(shared, [0] * 64))
    assert sorted(i for parts in plan for part in parts for i in part) == list(range(64))
    assert all(limits.fit([[i] for i in part], lens) for parts in plan for part in parts)
    loads = [sum(lens[i] for part in parts for i in part) for parts in plan]
    assert max(loads) < 1.2 * min(loads)
    passes = [len({n for n, part in enumerate(sum(plan, [])) if any(shared[i] == group for i in part)})
              for group in range(4)]  # yapf: disable
    assert max(passes) <= (1 if rows != 3 else 3)
    apart = plan_mini_batch(order, lens, world, limits)
    spread = [len({n for n, part in enumerate(sum(apart, [])) if any(shared[i] == group for i in part)})
              for group in range(4)]  # yapf: disable
    assert sum(spread) > sum(passes)


def test_one_prompt_is_divided_between_ranks():
    lens, shared = [10] * 8, [0] * 8
    plan = plan_mini_batch(list(range(8)), lens, 4, MicroBatchLimits(0, 1000), shared=SharedWork(shared, [0] * 8))
    assert [[len(part) for part in parts] for parts in plan] == [[2]] * 4


def test_a_shared_prompt_counts_once():
    shared = SharedWork([0, 0, 1, 0], [6, 6, 7, 6])
    assert pass_tokens([[0], [1, 2], [3]], [10] * 4, shared) == 40 - 12 and pass_tokens([[1, 2]], [10] * 4,
                                                                                        shared) == 20
    plan, = plan_mini_batch([0, 1, 2, 3], [10] * 4, 1, MicroBatchLimits(0, 18), shared=shared)
    assert sorted(map(sorted, plan)) == [[0, 1, 3], [2]], "three samples of one prompt are 6 + 3 * 4 tokens"


@pytest.mark.parametrize("lens,shared,together", [
    ([30] * 16, SharedWork([i // 8 for i in range(16)], [20] * 16), True),
    ([11, 11, 11, 11, 12, 12, 12, 80], SharedWork([0] * 4 + [1] * 4, [1] * 8), False),  # not worth a slow rank
], ids=["long prompts", "short prompts"])  # yapf: disable
def test_prompts_are_shared_unless_the_busiest_rank_computes_more(lens, shared, together):
    samples, limits = list(range(len(lens))), MicroBatchLimits(0, 1000)
    plan = plan_mini_batch(samples, lens, 2, limits, shared=shared)
    apart = plan_mini_batch(samples, lens, 2, limits)
    assert max(rank_tokens(plan, lens, shared)) <= max(rank_tokens(apart, lens, shared))
    halves = [samples[:len(samples) // 2], samples[len(samples) // 2:]]
    assert (sorted(sorted(part) for part, in plan) == halves) == together


def test_the_plan_counts_what_a_pass_shares():
    """A group whose responses begin with two prompts of equal length, a longer one, and one with other pictures."""
    prompts = [([1, 2], ()), ([1, 2], ()), ([1, 3], ()), ([1, 2, 3], ()), ([1, 2], ("a", )), ([1, 2], ("a", ))]
    samples = [Episode(Prompt("0", ids, "p", media=media), 0, number, [Segment([9], [-1.0], version=0)], "stop")
               for number, (ids, media) in enumerate(prompts)]  # yapf: disable

    def work(strategy):
        shared = Shards(strategy, Batch.of(samples[strategy.rank::strategy.world_size])).shared_work(True)
        return [shared.saved(range(6)), shared.saved([0, 2, 3, 4]), shared.saved([0, 1, 2])]

    whole_pass = Batch.of(samples)
    saved = whole_pass.num_tokens - forward_row(whole_pass).row.num_tokens
    assert saved == 4 and World(1).run(work) == [[saved, 0, 2]] and World(2).run(work) == [[saved, 0, 2]] * 2
