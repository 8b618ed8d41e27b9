"""Processes that tests start: whether they are alive, and waiting for their end."""
import time
from collections.abc import Callable

POLL_S = 0.01  # of a server of a test: its shutdown waits for as long, by default half a second


def alive(pid: int) -> bool:
    """True for a process that runs; one that nobody has waited for (a zombie) does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait until a condition holds; what it is then."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()
