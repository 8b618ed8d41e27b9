"""Sums, means and maxima over micro-batches and ranks."""
import pytest
import torch

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.strategy import FakeStrategy
from lightrft.trainer.metric_sums import MetricSums


class OneOfTwo(FakeStrategy):
    """One of two ranks; the other one sends ``other`` (nothing: zeros). Keeps what this one sent."""

    def __init__(self, rank, other=0.0):
        super().__init__(StrategyConfig())
        self.rank, self.world_size, self.other, self.sent = rank, 2, other, []

    def all_reduce(self, value, op="sum"):
        assert op == "sum"
        self.sent.append(value.clone())
        return value + self.other


def filled() -> MetricSums:
    sums = MetricSums()
    mask = torch.tensor([True, False, True])
    sums.add_tokens({"b": torch.tensor([1.0, torch.nan, 3.0]), "a": torch.tensor([1.0, 1.0, 0.0])}, mask)
    sums.add_tokens({"b": torch.tensor([8.0]), "a": torch.tensor([0.0])}, torch.tensor([True]))
    sums.add("c", 6.0, 4)
    sums.add_vector("v", torch.arange(3.0))
    sums.add_vector("v", torch.ones(3))
    sums.peak("p", torch.tensor(3.0))
    sums.peak("p", torch.tensor(2.0))
    sums.peak("q", torch.tensor([1.0, 5.0]))
    return sums


def test_means_are_over_tokens_not_over_micro_batches():
    sums = filled()
    assert sums.mean("b") == 4.0 and sums.mean("a") == pytest.approx(1 / 3) and sums.mean("c") == 1.5
    assert sums.vector("v").tolist() == [1, 2, 3]
    assert sums.vector("p").item() == 3.0 and sums.vector("q").tolist() == [1.0, 5.0]


def test_reduce_is_one_collective():
    far, second = filled(), OneOfTwo(1)
    far.peak("p", torch.tensor(7.0))
    far.peak("q", torch.tensor([-1.0, 9.0]))
    far.reduce(second)
    sums, first = filled(), OneOfTwo(0, second.sent[0])
    sums.peak("q", torch.tensor([2.0, -3.0]))
    sums.reduce(first)
    assert len(first.sent) == 1
    assert sums.mean("b") == 4.0 and sums.vector("v").tolist() == [2, 4, 6]
    assert sums.vector("p").item() == 7.0 and sums.vector("q").tolist() == [2.0, 9.0]


def test_nothing_counted_is_zero_and_still_has_its_keys():
    sums = MetricSums()
    sums.add_tokens({"a": torch.full((2, ), torch.nan)}, torch.zeros(2, dtype=torch.bool))
    assert sums.keys() == ["a"] and sums.mean("a") == 0.0 and sums.counted() == []
    MetricSums().reduce(OneOfTwo(0))


def test_a_vector_of_two_is_no_mean():
    sums = MetricSums()
    sums.add_vector("pair", torch.tensor([1.0, 2.0]))
    assert sums.keys() == []
