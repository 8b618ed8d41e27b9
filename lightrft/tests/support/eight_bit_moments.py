"""What every strategy but DeepSpeed's, which has a state of its own, does with moments in eight bits."""
import torch

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.checkpoint import CheckpointManager
from lightrft.strategy.strategy import SingleProcessStrategy
from lightrft.tests.support.packages import HAS_BITSANDBYTES
from lightrft.tests.support.strategy_case import assert_same, Case
from lightrft.tests.support.tiny_lm import EIGHT_BIT


def eight_bit_moments(case: Case) -> None:
    """Check that codes and scales survive a move and a checkpoint bitwise, and
    that the weights are nearly those of a single process with 8 bits, where bitsandbytes is installed."""
    if not HAS_BITSANDBYTES:
        return
    options = {"hidden": 64, "tied": False}
    case = Case(case.strategy, case.folder, EIGHT_BIT)
    prepared, strategy = case.prepare(**options), case.strategy
    case.train(prepared, range(3))
    state, at_3 = strategy.state_dict(prepared), case.state(prepared)
    name = "optim/model.model.layers.0.mlp.gate_proj.weight/exp_avg"
    assert (state[name].dtype, state[name].shape) == (torch.uint8, (51, 64)) and state[f"{name}_scale"].shape == (51, 1)
    assert f"{name.replace('gate', 'down')}_scale" not in state, "51 elements in a row"
    manager = CheckpointManager(strategy, case.folder / "eight_bit", asynchronous=False)
    assert manager.save(3, {"actor": prepared}, {}, {"rank": strategy.rank}, {})
    strategy.offload(prepared)
    strategy.reload(prepared)
    assert_same(case.state(prepared), at_3)
    case.train(prepared, range(3, 6))
    fresh = case.prepare(seed=5, **options)
    manager.load(manager.latest(), {"actor": fresh})
    assert_same(case.state(fresh), at_3)
    case.train(fresh, range(3, 6))
    assert_same(case.state(fresh), case.state(prepared))
    alone = Case(SingleProcessStrategy(StrategyConfig()), case.folder, EIGHT_BIT)
    alone.strategy.setup()
    twin = alone.prepare(**options)
    alone.train(twin, range(6))
    assert_same(case.weights(prepared), alone.weights(twin), atol=2e-4)  # a code may be the next one
    if strategy.is_main:
        torch.save(at_3, case.folder / "eight_bit.pt")
