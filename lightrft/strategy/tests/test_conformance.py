"""Every strategy against plain PyTorch, on one and on two ranks."""
from pathlib import Path

import pytest
import torch

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.checkpoint import CheckpointManager
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import strategy_conformance
from lightrft.tests.support.launch import torchrun
from lightrft.tests.support.packages import HAS_BITSANDBYTES, needs_deepspeed
from lightrft.tests.support.strategy_conformance import Case, assert_same
from lightrft.tests.support.tiny_lm import EIGHT_BIT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a checkpoint of one process after three steps, and its state after three and after six."""
    path = tmp_path_factory.mktemp("conformance")
    strategy = get_strategy(StrategyConfig(strategy="single"))
    strategy.setup()
    case = Case(strategy, path)
    prepared = case.prepare()
    case.train(prepared, range(3))
    assert CheckpointManager(strategy, path / "one_process",
                             asynchronous=False).save(3, {"actor": prepared}, {}, {"rank": 0}, {})
    saved = {"at_3": case.state(prepared)}
    case.train(prepared, range(3, 6))
    torch.save({**saved, "at_6": case.state(prepared)}, path / "one_process.pt")
    return path


@pytest.mark.parametrize("name", list(strategy_conformance.variants(1)))
def test_one_rank(name: str, folder: Path) -> None:
    strategy_conformance.run(name, *strategy_conformance.variants(1)[name], folder)


def check(folder: Path, *options: str, ranks: int) -> None:
    """Run the checks on as many processes, of which a single one is started without torchrun."""
    torchrun(strategy_conformance.__name__, folder, *options, ranks=ranks, limit_s=280)


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks(folder: Path) -> None:
    check(folder, ranks=2)
    read_by_one_process(folder, list(strategy_conformance.variants(2)))
    if HAS_BITSANDBYTES:
        eight_bits_read_by_one_process(folder, ["fsdp", "freeing"])


@needs_deepspeed
@pytest.mark.dist
@pytest.mark.slow
def test_zero_on_two_ranks(folder: Path) -> None:
    check(folder, "zero", ranks=2)
    read_by_one_process(folder, list(strategy_conformance.zero_variants()))


@needs_deepspeed
@pytest.mark.slow
def test_zero_on_one_rank(folder: Path) -> None:
    check(folder, "zero", ranks=1)


def read_by_one_process(folder: Path, names: list[str]) -> None:
    """One process loads bitwise what two ranks saved."""
    strategy = get_strategy(StrategyConfig(strategy="single"))
    strategy.setup()
    case = Case(strategy, folder)
    for name in names:
        prepared = case.prepare(seed=5)
        manager = CheckpointManager(strategy, folder / f"{name}_on_2" / "ours", asynchronous=False)
        _, rank_states = manager.load(manager.latest(), {"actor": prepared})
        assert rank_states == [{"rank": 0}, {"rank": 1}]
        assert_same(case.state(prepared), torch.load(folder / f"{name}_on_2" / "ours.pt"))


def eight_bits_read_by_one_process(folder: Path, names: list[str]) -> None:
    """One process loads bitwise the codes and scales that two ranks saved."""
    strategy = get_strategy(StrategyConfig(strategy="single"))
    strategy.setup()
    case = Case(strategy, folder, EIGHT_BIT)
    for name in names:
        prepared = case.prepare(seed=5, hidden=64, tied=False)
        manager = CheckpointManager(strategy, folder / f"{name}_on_2" / "eight_bit", asynchronous=False)
        manager.load(manager.latest(), {"actor": prepared})
        assert_same(case.state(prepared), torch.load(folder / f"{name}_on_2" / "eight_bit.pt"))
