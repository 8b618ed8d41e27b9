"""Counts of what a program asks of a device, by call site."""
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path
from types import FrameType

PACKAGE = Path(__file__).parents[3]
HELPERS = ("/tests/", "/utils/tensors.py")
KERNEL = "kernel"  # a launch
GRAPH = "graph"  # a launch of many kernels at once
SYNC = "sync"  # the host waits for the device: a number, a size or data that it reads; a copy that blocks
UPLOAD = "upload"  # a copy to the device that does not block
EMPTIED = "emptied"  # memory that torch keeps is given back to the device, for what allocates outside of it
DOWNLOAD = "download"  # a copy to the host that does not block


@lru_cache(maxsize=None)
def _is_own(name: str) -> bool:
    """Return True for a file of this project outside its tests, and outside the helpers that only copy."""
    return name.startswith(str(PACKAGE)) and not any(part in name[len(str(PACKAGE)):] for part in HELPERS)


def _own_frame() -> FrameType | None:
    """Return the innermost frame in a file of :func:`_is_own`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@lru_cache(maxsize=None)
def _name(file: str, function: str) -> str:
    return f"{Path(file).relative_to(PACKAGE)}:{function}"


def site() -> str:
    """Name the function that runs, as ``trainer/optimizer_step.py:OptimizerStep.run``; no line, which edits move."""
    frame = _own_frame()
    return "outside" if frame is None else _name(frame.f_code.co_filename, frame.f_code.co_qualname)


def line() -> str:
    """Name the line that runs, as ``trainer/optimizer_step.py:72``."""
    frame = _own_frame()
    if frame is None:
        return "outside"
    return f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_lineno}"


class Ledger:
    """Counts by kind and call site."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def add(self, kind: str) -> None:
        """Count one event at the call site that runs now."""
        self.counts[kind, site()] += 1

    def sites(self, kind: str) -> Counter[str]:
        """Return the counts of one kind by call site."""
        return Counter({where: count for (of, where), count in self.counts.items() if of == kind})

    def total(self, kind: str) -> int:
        """Return the count of one kind over all call sites."""
        return self.sites(kind).total()


def marginal(less: Counter[str], more: Counter[str], times: int) -> dict[str, float]:
    """Return what each of ``times`` repetitions adds, by call site, from a run and one with that many more of them."""
    found = {where: (more[where] - less[where]) / times for where in less.keys() | more.keys()}
    return {where: count for where, count in sorted(found.items()) if count}
