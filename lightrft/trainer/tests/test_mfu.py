"""The utilisation figure against its definition."""
from types import SimpleNamespace

import pytest
import torch

from lightrft.config.sft_schema import SFTConfig
from lightrft.config.tree import build
from lightrft.trainer import run_log
from lightrft.trainer.run_log import mfu, RunLog


def test_mfu_is_six_flops_per_parameter_and_token():
    assert mfu(parameters=10**9, tokens=1000, seconds=2.0, peak_flops=1e13) == pytest.approx(6e12 / 2e13)


def test_mfu_halves_when_the_update_takes_twice_as_long_or_twice_the_ranks():
    one = mfu(10**6, 100, 1.0, 1e10)
    assert mfu(10**6, 100, 2.0, 1e10) == mfu(10**6, 100, 1.0, 2e10) == pytest.approx(one / 2)


@pytest.mark.parametrize("gpu, found", [("NVIDIA H100 NVL", {"perf/mfu": pytest.approx(6e12 / 1670e12)}),
                                        ("NVIDIA H100 NVL MIG 1g.12gb", {})])
def test_a_gpu_without_a_known_peak_has_no_utilisation_and_the_log_says_so(gpu, found, monkeypatch):
    said = []
    monkeypatch.setattr(run_log, "gpu_name", lambda: gpu)
    monkeypatch.setattr(run_log, "get_logger", lambda: SimpleNamespace(info=said.append))
    log = RunLog(build(SFTConfig, {"save_path": "run"}),
                 SimpleNamespace(device=torch.device("cuda", 0), is_main=True, world_size=1))
    log.parameters = 10**9
    for _ in range(2):
        assert log._utilisation({"perf/forward_tokens": 1000.0}, 2.0) == found
    assert said == ([] if found else [f"perf/mfu is left out: no table has the speed of {gpu}"])
