"""Ends of worker processes: with the trainer, however that ends, and together with all that they have started."""
import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOOK_S = 0.2


def die_with(parent: int, pipe: int) -> None:
    """End this process, however busy, when the process ``parent`` ends (on Linux by the kernel, else by polling), and
    with it the processes that it has started.

    Args:
        pipe: end of a pipe of this process, which the other side sees closed when this process ends.
    """
    _guard(os.getpid(), pipe)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


def end_group() -> None:
    """Kill this process, whose threads may hang, and those that it has started."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)


def _guard(worker: int, pipe: int) -> None:
    """Fork a process of the same group that kills the group once the worker is gone: the kernel, which ends a worker
    with its parent, leaves the children of the worker alone.

    It is no child of the worker, whose tools may wait for all of theirs. The id of the worker is not used again while
    the group has members.
    """
    if child := os.fork():
        os.waitpid(child, 0)
        return
    if os.fork():
        os._exit(0)
    os.close(pipe)
    while _runs(worker):
        time.sleep(_LOOK_S)
    end_group()


def _runs(pid: int) -> bool:
    """Return True unless a process is gone, or has ended and nobody has waited for it."""
    try:
        os.kill(pid, 0)
        if sys.platform != "linux":
            return True
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b") ")[2][:1] not in b"ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False
