"""Properties of DeepSpeed alone; the conformance tests show that it does what every strategy does."""
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.base import Prepared
from lightrft.strategy.deepspeed import deepspeed_strategy
from lightrft.strategy.memory import gathered_weights, ModelSize
from lightrft.tests.support.packages import needs_deepspeed
from lightrft.tests.support.tiny_lm import TinyLM
from lightrft.tests.support.warm import warm_environ, warm_python


@needs_deepspeed
@pytest.mark.dist
@pytest.mark.slow
def test_what_the_options_do(tmp_path: Path) -> None:
    """Each stage divides one thing more by two; the second copy and the second buffer are there when asked for; where
    activations are recomputed, no more weights are whole than the plan counts. Nothing is written, compiled or said."""
    home = tmp_path / "home"
    home.mkdir()
    environment = {**os.environ, **warm_environ(), "OMP_NUM_THREADS": "1", "HOME": str(home)}
    command = [warm_python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m",
               "lightrft.tests.support.deepspeed_ranks", str(tmp_path / "found")]  # yapf: disable
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, cwd=home)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found = json.loads((tmp_path / "found").read_text(encoding="utf-8"))
    whole = sum(param.numel() for param in TinyLM().parameters())
    shares = [[round(count / whole, 1) for count in counts] for counts in found["divided"]]
    assert shares == [[1, 1, 1], [1, 0.5, 0.5], [1, 0.5, 0.5], [0.5, 0.5, 0.5]]
    assert found["second"] == [[[0, 0]] * 2, [[26, 0]] * 2] and found["buffers"] == [1, 2]
    assert found["decays"] == [False] * 4, "as docs/strategies.md says"
    kept, freed = found["gathered"]
    layer, total = (sum(param.numel() for param in TinyLM(layers=count).parameters()) for count in (1, 8))
    layer -= (outside := sum(param.numel() for param in TinyLM(layers=0).parameters()))
    planned = gathered_weights(StrategyConfig(strategy="deepspeed", zero_stage=3), 2, ModelSize(total, layer, outside),
                               bf16=False, gradient_checkpointing=True)  # yapf: disable
    for phase in (0, 1):
        assert 4 * freed[phase] <= planned[phase] < 4 * kept[phase]
    assert kept[2] == freed[2], "the gradients are the same"
    assert not list(home.iterdir()), "files were left"
    assert "DeepSpeed" not in done.stdout + done.stderr and "Warning" not in done.stderr, done.stdout + done.stderr


def test_weights_have_arrived_when_a_move_to_the_device_returns(monkeypatch):
    """DeepSpeed's gathers on the default stream would not wait for copies on another one."""
    model, order = TinyLM(), []
    monkeypatch.setattr(deepspeed_strategy, "load", lambda tensor, device: order.append("copy") or tensor)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: order.append("wait")))
    strategy = deepspeed_strategy.DeepspeedStrategy(StrategyConfig(strategy="deepspeed", zero_stage=2))
    strategy._move(Prepared(model), torch.device("cuda"))
    assert order == ["copy"] * len(list(model.parameters())) + ["wait"]
