"""Choices of tokens: statistics and order by a loop, counts at their ends; the KL of two outcomes."""
import pytest
import torch
from torch.distributions import Bernoulli, kl_divergence

from lightrft.ops.kl import binary_kl
from lightrft.ops.selection import covariance, draw, largest, share

MASK = torch.tensor([True, False, True, True])


def test_covariance_is_float64_and_ignores_what_is_masked():
    x, y = torch.tensor([1., torch.nan, 3., 5.]), torch.tensor([2., torch.inf, 0., 1.])
    got = covariance(x, y, MASK)
    assert got.tolist() == [-2.0, 0.0, 0.0, 0.0] and got.dtype == torch.float64


def test_share_rounds_down_but_is_never_nothing():
    assert [share(ratio, torch.ones(10).bool()) for ratio in (0.29, 0.3, 1.0, 0.01)] == [2, 3, 10, 1]


def test_largest_takes_the_first_of_equal_ones_and_never_a_masked_one():
    x = torch.tensor([1., 9., 2., 2.])
    assert [largest(x, n, MASK).nonzero().flatten().tolist() for n in (1, 2, 3, 9)] == [[2], [2, 3], [0, 2, 3],
                                                                                        [0, 2, 3]]


def test_draw_takes_all_when_there_are_fewer():
    assert torch.equal(draw(MASK, 9, 0), MASK) and draw(MASK, 2, 0).sum() == 2
    assert not draw(torch.zeros(4).bool(), 2, 0).any()


def test_binary_kl():
    p, q = torch.rand(2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(binary_kl(p.log(), q.log()), kl_divergence(Bernoulli(p), Bernoulli(q)), rtol=1e-9,
                               atol=1e-12)
    certain, rare = torch.tensor(0.0), torch.tensor(-40.0)
    assert binary_kl(certain, certain) == 0 == binary_kl(rare, rare)
    assert binary_kl(rare, certain).isfinite() and binary_kl(rare, certain) > 80
    assert binary_kl(certain, torch.tensor(0.5).log()).item() == pytest.approx(0.6931472)
