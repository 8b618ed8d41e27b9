"""Progress on the console: bars with ETA on rank 0 (plain log lines without a terminal), and a line per step."""
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
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


HEADER_EVERY = 20
_WIDTH = 8

# Title, the metrics it shows (the first that is present), and their format.
_COLUMNS: tuple[tuple[str, tuple[str, ...], Callable[[float], str]], ...] = (
    ("reward", ("reward/mean", ), lambda x: f"{x:.3f}"),
    ("accuracy", ("reward/accuracy/mean", "reward/math/mean", "reward/exact/mean"), lambda x: f"{x:.3f}"),
    ("held-out", ("eval/all/pass@1", "eval/all/avg@1", "eval/accuracy"), lambda x: f"{x:.3f}"),
    ("loss", ("sft/loss", "loss"), lambda x: f"{x:.4f}"),
    ("length", ("rollout/response_len/mean", ), lambda x: f"{x:.1f}"),
    ("KL", ("policy/kl_ref", "policy/kl_old"), lambda x: f"{x:.1e}" if 0 < abs(x) < 1e-3 else f"{x:.4f}"),
    ("entropy", ("policy/entropy", ), lambda x: f"{x:.3f}"),
    ("tokens/s", ("perf/tokens_per_s", ), lambda x: f"{x:.0f}"),
    ("step s", ("time/step_s", ), lambda x: f"{x:.2f}"),
)
_HIDDEN_PHASES = ("other", "step", "forward", "backward", "optimizer", "update_other")  # shown as one: update


class StepTable:
    """Lines of the step table: the columns that the run reports, then the seconds of its phases.

    The header is repeated every ``HEADER_EVERY`` rows, and whenever a new column appears.
    """

    def __init__(self) -> None:
        self._titles: list[str] = []
        self._phases: list[str] = []
        self._rows = 0

    def lines(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Return the row of ``step``, after the header if it is due."""
        cells = {
            title: write(metrics[found]) for title, names, write in _COLUMNS
            if (found := next((name for name in names if name in metrics), None))
        }
        phases = {name: f"{metrics[f'time/{name}_s']:.2f}" for name in _phases(metrics)}
        new = (cells.keys() - set(self._titles)) | (phases.keys() - set(self._phases))
        self._titles = [title for title, *_ in _COLUMNS if title in cells or title in self._titles]
        self._phases += [name for name in phases if name not in self._phases]
        head = [self._header()] if new or self._rows % HEADER_EVERY == 0 else []
        self._rows = 1 if new else self._rows + 1
        row = f"{step:>6}" + "".join(f"{cells.get(title, ''):>{_width(title)}}" for title in self._titles)
        if self._phases:
            row += "  |" + "".join(f"{phases.get(name, ''):>{_width(name)}}" for name in self._phases)
        return head + [row]

    def _header(self) -> str:
        row = f"{'step':>6}" + "".join(f"{title:>{_width(title)}}" for title in self._titles)
        return row + ("  |" + "".join(f"{name:>{_width(name)}}" for name in self._phases) if self._phases else "")


def _width(title: str) -> int:
    return max(_WIDTH, len(title) + 1) if title in [t for t, *_ in _COLUMNS] else max(6, len(title) + 1)


def _phases(metrics: Mapping[str, float]) -> list[str]:
    names = [name.removeprefix("time/").removesuffix("_s") for name in metrics if name.startswith("time/")]
    return [name for name in names if name not in _HIDDEN_PHASES]
