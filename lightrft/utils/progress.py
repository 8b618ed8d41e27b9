"""Progress on the console: bars with ETA on rank 0, plain log lines without a terminal."""
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from tqdm import tqdm

from lightrft.utils.logging import get_logger

LOG_INTERVAL_S = 10.0


class _LogBar:
    """Shows progress as one log line every ``LOG_INTERVAL_S`` seconds (files and pipes ignore carriage returns)."""

    def __init__(self, desc: str, unit: str, initial: int, disable: bool, iterable: Iterable[Any] = (),
                 total: int | None = None) -> None:
        self._iterable, self._desc, self._unit, self._disable = iterable, desc, unit, disable
        self._total = len(iterable) if total is None and isinstance(iterable, Sized) else total
        self.n, self._initial = initial, initial
        self._start = self._shown = time.monotonic()

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            yield item
            self.update(1)

    def update(self, n: int = 1) -> None:
        """Count ``n`` more items; log when a line is due."""
        self.n += n
        now = time.monotonic()
        if not self._disable and now - self._shown > LOG_INTERVAL_S:
            self._shown = now
            get_logger().info(
                tqdm.format_meter(self.n, self._total or 0, now - self._start, ncols=100, prefix=self._desc,
                                  unit=self._unit, initial=self._initial))

    def close(self) -> None:
        """Do nothing: no bar is on screen."""


def progress(iterable: Iterable[Any] | int, desc: str, unit: str = "it", initial: int = 0, leave: bool = False) -> Any:
    """Return a tqdm bar over ``iterable``, or a bar with ``.update(n)`` if ``iterable`` is a total count.

    Ranks above 0 get a disabled one. Without a terminal a line is logged every ``LOG_INTERVAL_S`` seconds.
    """
    source: dict[str, Any] = {"total": iterable} if isinstance(iterable, int) else {"iterable": iterable}
    common: dict[str,
                 Any] = {"desc": desc, "unit": unit, "initial": initial, "disable": os.environ.get("RANK", "0") != "0"}
    if sys.stderr.isatty():
        return tqdm(**source, **common, dynamic_ncols=True, leave=leave)
    return _LogBar(**source, **common)
