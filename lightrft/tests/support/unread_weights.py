"""The check that weights which nothing reads are not updated, for every strategy."""
from torch import Tensor

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.strategy import SingleProcessStrategy
from lightrft.tests.support.strategy_case import assert_same, Case


def unread_weights_stay(case: Case) -> None:
    """Weight decay and momentum leave alone what no pass of a step reads; here a last layer that moved before."""

    def train(other: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        prepared = other.prepare()
        other.train(prepared, range(2))
        prepared.model.model.config.num_hidden_layers = 1
        before = other.weights(prepared)
        other.train(prepared, range(2, 4))
        return before, other.weights(prepared)

    before, after = train(case)
    stay = [name for name in before if "layers.1." in name]
    assert len(stay) == 12
    assert_same({name: after[name] for name in stay}, {name: before[name] for name in stay})
    assert_same(after, train(Case(SingleProcessStrategy(StrategyConfig()), case.folder))[1], atol=2e-5)
