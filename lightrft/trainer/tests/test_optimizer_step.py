"""Optimizer steps that must not be made: they change nothing, are counted, and end a run that has only those."""
import json

import pytest
import torch

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import optimizer_step_checks, runs
from lightrft.tests.support.launch import torchrun
from lightrft.trainer.optimizer_step import NonFiniteTraining, OptimizerStep


@pytest.mark.parametrize("check", list(optimizer_step_checks.CHECKS))
def test_one_process(check):
    strategy = get_strategy(StrategyConfig(strategy="single"))
    strategy.setup()
    optimizer_step_checks.CHECKS[check](strategy)


@pytest.mark.dist
def test_two_ranks():
    said = torchrun(optimizer_step_checks.__name__)
    assert json.loads(said.splitlines()[-1]) == {"passed": list(optimizer_step_checks.CHECKS)}


def test_a_run_whose_steps_were_all_skipped_is_none(tmp_path, monkeypatch):
    """It is shorter than ``--max_bad_steps``, which ends others."""
    monkeypatch.setattr(OptimizerStep, "_backward", lambda *args: torch.tensor([float("nan")], dtype=torch.float64))
    with pytest.raises(NonFiniteTraining, match="all 2 steps was not finite, and none was applied"):
        runs.run(runs.write_home(tmp_path), tmp_path / "run", max_steps=2)
    assert not (tmp_path / "run" / "hf").exists()
