"""Sums, means and maxima over micro-batches and ranks."""
import pytest
import torch

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.fake_strategy import FakeStrategy
from lightrft.trainer.metric_sums import MetricSums


class TwoAlike(FakeStrategy):
    """What two ranks with equal numbers would see, and how often they talked."""
    calls = 0

    def all_reduce(self, value, op="sum"):
        self.calls += 1
        return value * 2 if op == "sum" else value.clone()


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


def test_reduce_is_one_collective_per_kind():
    sums, strategy = filled(), TwoAlike(StrategyConfig())
    strategy.setup()
    sums.reduce(strategy)
    assert strategy.calls == 2
    assert sums.mean("b") == 4.0 and sums.vector("v").tolist() == [2, 4, 6]
    assert sums.vector("p").item() == 3.0 and sums.vector("q").tolist() == [1.0, 5.0]


def test_nothing_counted_is_zero_and_still_has_its_keys():
    sums = MetricSums()
    sums.add_tokens({"a": torch.full((2, ), torch.nan)}, torch.zeros(2, dtype=torch.bool))
    assert sums.keys() == ["a"] and sums.mean("a") == 0.0
    MetricSums().reduce(TwoAlike(StrategyConfig()))


def test_a_vector_of_two_is_no_mean():
    sums = MetricSums()
    sums.add_vector("pair", torch.tensor([1.0, 2.0]))
    assert sums.keys() == []
