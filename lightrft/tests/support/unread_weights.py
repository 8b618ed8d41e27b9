"""The check that weights which nothing reads are not updated, for every strategy."""
from functools import cache
from pathlib import Path

from torch import Tensor

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.strategy import SingleProcessStrategy
from lightrft.tests.support.strategy_case import assert_same, Case


def unread_weights_stay(case: Case) -> None:
    """Weight decay and momentum leave alone what no pass of a step reads; here a last layer that moved before."""
    before, after = _train(case)
    stay = [name for name in before if "layers.1." in name]
    assert len(stay) == 12
    assert_same({name: after[name] for name in stay}, {name: before[name] for name in stay})
    assert_same(after, _of_one_process(), atol=2e-5)


@cache
def _of_one_process() -> dict[str, Tensor]:
    return _train(Case(SingleProcessStrategy(StrategyConfig()), Path()))[1]


def _train(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights before and after the steps that do not read the last layer."""
    prepared = case.prepare()
    case.train(prepared, range(2))
    prepared.model.model.config.num_hidden_layers = 1
    before = case.weights(prepared)
    case.train(prepared, range(2, 4))
    return before, case.weights(prepared)
