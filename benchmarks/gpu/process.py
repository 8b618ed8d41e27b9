"""Processes of measurements: started in a group of their own, and ended with all their descendants."""
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from benchmarks.gpu.store import ROOT

GRACE_S = 10.0  # between SIGTERM and SIGKILL: a trainer ends its step, and its figures are read
Process = tuple[int, str]  # number, and time of its start, which tells it from a later one of the same number


def call(command: list[str], limit: float, output: IO[str], environment: dict[str, str]) -> int:
    """Run a command and return its exit code; no descendant of it is alive afterwards, whatever is raised.

    Raises:
        subprocess.TimeoutExpired: it still ran after ``limit`` seconds.
    """
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
                               start_new_session=True)  # yapf: disable
    try:
        return process.wait(limit)
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, its descendants and its process group: SIGTERM first, at which torchrun ends its
    ranks and engines clean up, SIGKILL after ``GRACE_S``."""
    descendants = family(process.pid)  # read now: the children of a process that has ended belong to nobody
    process.terminate()
    wait_for(process, descendants)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for number, _ in descendants & processes().keys():  # ranks of torchrun are in sessions of their own
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    wait_for(process, descendants)  # the next measurement needs their memory


def wait_for(process: subprocess.Popen[bytes], descendants: set[Process]) -> None:
    """Wait ``GRACE_S`` at most until the process and its family are gone."""
    deadline = time.monotonic() + GRACE_S
    while (process.poll() is None or descendants & processes().keys()) and time.monotonic() < deadline:
        time.sleep(0.05)


def family(pid: int) -> set[Process]:
    """Return a living process and all its descendants."""
    alive, own = processes(), set[Process]()
    found = {one for one in alive if one[0] == pid}
    while found:
        own, numbers = own | found, {number for number, _ in found}
        found = {one for one, parent in alive.items() if parent in numbers} - own
    return own


def processes() -> dict[Process, int]:
    """Return the number of the parent of every living process; empty without /proc."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *rest = file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if state not in "ZX":
            found[int(file.parent.name), rest[17]] = int(parent)
    return found
