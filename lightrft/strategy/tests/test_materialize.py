"""Models whose weights stay in their files until the strategy has sharded them."""
import os
import subprocess
from pathlib import Path

import pytest
import torch

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import model_folders
from lightrft.tests.support.warm import warm_environ, warm_python


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_read_what_a_whole_model_has(tmp_path: Path) -> None:
    """With every strategy and from all forms of files; a rank of FSDP2 takes its share, one tensor and a tenth."""
    model_folders.write(tmp_path)
    command = [warm_python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m",
               "lightrft.tests.support.load_ranks", str(tmp_path)]  # yapf: disable
    environment = {**os.environ, **warm_environ(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def test_a_meta_tensor_that_nothing_can_read_is_an_error() -> None:
    strategy = get_strategy(StrategyConfig(strategy="single"))
    strategy.setup()
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="weight of Linear is on the meta device, and nothing can read it"):
        strategy.prepare(model)
