"""Launchers of ranks: their variables get the names that torchrun gives them, and every rank its share of the cores."""
import os
import sys
from collections.abc import MutableMapping

from lightrft.utils.logging import get_logger

_NAMES = {"LOCAL_WORLD_SIZE": "LOCAL_SIZE"}  # of torchrun -> of the launcher of DeepSpeed


def adopt_launcher(environ: MutableMapping[str, str] | None = None) -> None:
    """Set the variables that torchrun sets, and other launchers under other names or not at all; others stay unchanged.
    """
    env = os.environ if environ is None else environ
    if "RANK" not in env:
        return
    for name, other in _NAMES.items():
        if name not in env and other in env:
            env[name] = env[other]
    _share_cores(env)


def _share_cores(env: MutableMapping[str, str]) -> None:
    """Give a rank beside others its share of the cores, early: every library with threads of OpenMP reads the variable
    when it is loaded. Without it each rank would start a thread per core."""
    ranks = int(env.get("LOCAL_WORLD_SIZE", "1"))
    if ranks == 1 or "OMP_NUM_THREADS" in env:
        return
    env["OMP_NUM_THREADS"] = str(threads := threads_per_rank(ranks))
    get_logger().info("OMP_NUM_THREADS is not set: it is %d, the share of each of the %d ranks in the %d cores of this "
                      "machine", threads, ranks, count_cores())
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)


def count_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(local_world_size: int) -> int:
    """Divide the cores among the ranks of this node; return the threads of each, at least one."""
    return max(count_cores() // local_world_size, 1)
