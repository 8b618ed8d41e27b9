"""Optimizer steps that must not be made: they change nothing, are counted, and end a run that has only those."""
import json

import pytest

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import optimizer_step_checks
from lightrft.tests.support.launch import torchrun


@pytest.mark.parametrize("check", list(optimizer_step_checks.CHECKS))
def test_one_process(check):
    strategy = get_strategy(StrategyConfig(strategy="single"))
    strategy.setup()
    optimizer_step_checks.CHECKS[check](strategy)


@pytest.mark.dist
def test_two_ranks():
    said = torchrun(optimizer_step_checks.__name__)
    assert json.loads(said.splitlines()[-1]) == {"passed": list(optimizer_step_checks.CHECKS)}
