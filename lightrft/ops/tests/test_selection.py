"""Choices of tokens: statistics and order by a loop, counts at their ends; the KL of two outcomes."""
import pytest
import torch
from torch.distributions import Bernoulli, kl_divergence

from lightrft.ops.divergence import binary_kl
from lightrft.ops.selection import covariance, draw, largest, share
from lightrft.tests.support.threads import World
from lightrft.trainer.shards import BatchRanks

MASK, ONE = torch.tensor([True, False, True, True]), torch.tensor([0, 4])


def test_covariance_is_float64_and_ignores_what_is_masked():
    x, y = torch.tensor([1., torch.nan, 3., 5.]), torch.tensor([2., torch.inf, 0., 1.])
    got = covariance(x, y, MASK)
    assert got.tolist() == [-2.0, 0.0, 0.0, 0.0] and got.dtype == torch.float64


def test_share_rounds_down_but_is_never_nothing():
    assert [share(ratio, torch.ones(10).bool()) for ratio in (0.29, 0.3, 1.0, 0.01)] == [2, 3, 10, 1]


def test_largest_takes_the_first_of_equal_ones_and_never_a_masked_one():
    x = torch.tensor([1., 9., 2., 2.])
    assert [largest(x, n, MASK, ONE).nonzero().flatten().tolist() for n in (1, 2, 3, 9)] == [[2], [2, 3], [0, 2, 3],
                                                                                             [0, 2, 3]]


def test_draw_takes_all_when_there_are_fewer():
    assert torch.equal(draw(MASK, 9, 0, ONE), MASK) and draw(MASK, 2, 0, ONE).sum() == 2
    assert not draw(torch.zeros(4).bool(), 2, 0, ONE).any()


def test_binary_kl():
    p, q = torch.rand(2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(binary_kl(p.log(), q.log()), kl_divergence(Bernoulli(p), Bernoulli(q)), rtol=1e-9,
                               atol=1e-12)
    certain, rare = torch.tensor(0.0), torch.tensor(-40.0)
    assert binary_kl(certain, certain) == 0 == binary_kl(rare, rare)
    assert binary_kl(rare, certain).isfinite() and binary_kl(rare, certain) > 80
    assert binary_kl(certain, torch.tensor(0.5).log()).item() == pytest.approx(0.6931472)


def test_it_is_the_same_however_the_batch_is_spread():
    """Equal values, negative ones, a rank without sequences and one whose sequences are all masked."""
    gen = torch.Generator().manual_seed(0)
    lens = [3, 0, 5, 1, 4, 6]
    cu = torch.tensor([0, *lens]).cumsum(0)
    x = torch.randint(-3, 3, (sum(lens), ), generator=gen).float() / 2 - 0.0
    mask = torch.rand(sum(lens), generator=gen) < 0.7
    mask[cu[3]:cu[4]] = False
    owners = [[1, 4, 5], [], [0, 2], [3]]

    def cut(values, rank):
        return torch.cat([values[cu[b]:cu[b + 1]] for b in owners[rank]] or [values[:0]])

    for count in (1, 2, 5, 9, 100):
        chosen = largest(x, count, mask, cu), draw(mask, count, 7, cu)
        order = torch.where(mask, x, -torch.inf).argsort(descending=True, stable=True)[:count]
        assert torch.equal(chosen[0], torch.zeros_like(mask).index_fill(0, order, True) & mask), "the naive order"

        def choose(strategy):
            index = torch.tensor(owners[strategy.rank], dtype=torch.long)
            ranks, own = BatchRanks(strategy, index, len(lens)), torch.tensor([0, *(lens[b] for b in index)]).cumsum(0)
            mine, kept = cut(x, strategy.rank), cut(mask, strategy.rank)
            assert share(0.5, kept, ranks) == share(0.5, mask)
            return (largest(mine, count, kept, own, ranks), draw(kept, count, 7, own,
                                                                 ranks), covariance(mine, 2 * mine, kept, ranks))

        for rank, (top, drawn, cov) in enumerate(World(4).run(choose)):
            assert torch.equal(top, cut(chosen[0], rank)) and torch.equal(drawn, cut(chosen[1], rank))
            torch.testing.assert_close(cov, cut(covariance(x, 2 * x, mask), rank))
