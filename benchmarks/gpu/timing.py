"""The device of a measurement, and the time of a function there."""
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu.catalog import Setting

REPEATS = 5


def device_of(setting: Setting) -> torch.device:
    """Return the GPU, or the CPU in the reduced form."""
    return torch.device("cpu" if setting.reduced else "cuda")


def best(function: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of the fastest of several calls."""
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def replayed(function: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a call whose kernels are replayed, as those of a decode step; on CPUs of a call."""
    if device.type != "cuda":
        return best(function, device)
    function()  # libraries load their kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return best(graph.replay, device)


def takes_triton(device: torch.device) -> bool:
    """Return True where kernels in Triton run."""
    return device.type == "cuda" and find_spec("triton") is not None
