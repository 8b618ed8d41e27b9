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
    ranks = int(env.get("LOCAL_WORLD_SIZE", "1"))
    if ranks > 1 and (threads := share_cores(ranks, env)):
        get_logger().info(
            "OMP_NUM_THREADS is not set: it is %d, the share of each of the %d ranks in the %d cores of "
            "this machine", threads, ranks, count_cores())


def share_cores(ranks: int, env: MutableMapping[str, str]) -> int:
    """Give each of the ``ranks`` of this machine its share of the cores, unless OMP_NUM_THREADS is set (``torchrun``
    sets it to 1 if it starts more than one process).

    Call it early: every library with threads of OpenMP reads the variable when it is loaded, and without it each rank
    starts a thread per core.

    Args:
        env: gets the variable; a copy of the environment leaves the processes that this one starts as they are.

    Returns:
        the threads per rank; 0 if OMP_NUM_THREADS was set.
    """
    if "OMP_NUM_THREADS" in env:
        return 0
    threads = threads_per_rank(ranks)
    env["OMP_NUM_THREADS"] = str(threads)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)
    return threads


def warn_of_load(threads: int) -> None:
    """Warn that other programs use the cores on which ``threads`` of this process wait for each other."""
    if threads > 1 and (load := os.getloadavg()[0]) > count_cores():
        get_logger().warning(
            "other programs use this machine (load %.0f on %d cores), and threads wait for each other: with "
            "OMP_NUM_THREADS=1 steps on the CPU may be several times faster", load, count_cores())


def count_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(local_world_size: int) -> int:
    """Divide the cores among the ranks of this node; return the threads of each, at least one."""
    return max(count_cores() // local_world_size, 1)
