"""Progress on the console: bars with ETA on rank 0, plain log lines without a terminal."""
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from tqdm import tqdm

from lightrft.utils.logging import get_logger

LOG_INTERVAL_S = 10.0
PHASE_LOG_INTERVAL_S, PHASE_DELAY_S = 60.0, 2.0


class _LogBar:
    """Shows progress as one log line every ``interval`` seconds (files and pipes ignore carriage returns)."""

    def __init__(self, desc: str, unit: str, initial: int, disable: bool, interval: float, iterable: Iterable[Any] = (),
                 total: int | None = None) -> None:
        self._interval = interval
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
        if not self._disable and now - self._shown > self._interval:
            self._shown = now
            get_logger().info(
                tqdm.format_meter(self.n, self._total or 0, now - self._start, ncols=100, prefix=self._desc,
                                  unit=self._unit, initial=self._initial))

    def close(self) -> None:
        """Do nothing: no bar is on screen."""


def progress(iterable: Iterable[Any] | int, desc: str, unit: str = "it", initial: int = 0) -> Any:
    """Return a tqdm bar over ``iterable``, or a bar with ``.update(n)`` if ``iterable`` is a total count.

    Ranks above 0 get a disabled one. Without a terminal a line is logged every ``LOG_INTERVAL_S`` seconds.
    """
    return _bar(iterable, LOG_INTERVAL_S, desc=desc, unit=unit, initial=initial)


def phase(iterable: Iterable[Any] | int, desc: str, unit: str) -> Any:
    """Return a bar of one phase of a step, below that of the run: :func:`progress` for what is usually short.

    A phase that ends within ``PHASE_DELAY_S`` shows no bar. Without a terminal a line is logged only every
    ``PHASE_LOG_INTERVAL_S`` seconds.
    """
    return _bar(iterable, PHASE_LOG_INTERVAL_S, PHASE_DELAY_S, desc=desc, unit=unit, initial=0)


def _bar(iterable: Iterable[Any] | int, interval: float, delay: float = 0.0, **look: Any) -> Any:
    source: dict[str, Any] = {"total": iterable} if isinstance(iterable, int) else {"iterable": iterable}
    source["disable"] = os.environ.get("RANK", "0") != "0"
    if sys.stderr.isatty():
        return tqdm(**source, **look, delay=delay, dynamic_ncols=True, leave=False)
    return _LogBar(**source, **look, interval=interval)
