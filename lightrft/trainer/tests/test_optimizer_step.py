"""Optimizer steps that must not be made: they change nothing, are counted, and end a run that has only those."""
import json
import os
import subprocess
import sys

import pytest

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import optimizer_step_checks


@pytest.mark.parametrize("check", list(optimizer_step_checks.CHECKS))
def test_one_process(check):
    strategy = get_strategy(StrategyConfig(strategy="single"))
    strategy.setup()
    optimizer_step_checks.CHECKS[check](strategy)


@pytest.mark.dist
def test_two_ranks():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m",
               "lightrft.tests.support.optimizer_step_checks"]  # yapf: disable
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"passed": list(optimizer_step_checks.CHECKS)}
