"""Named spans of a training step; nested time is never counted twice."""
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

Event = Any  # torch.cuda.Event, or what has its record, synchronize and elapsed_time (milliseconds)


class Throttle:
    """Repeats some work at most every ``interval_s`` seconds, and in at most 1 / ``share`` of the time.

    Args:
        interval_s: seconds from the end of the work to its next start, at least.
        share: the work waits ``share`` times as long as it took.
        waits: it waits for ``interval_s`` before the first time, too.
    """

    def __init__(self, interval_s: float, share: float, waits: bool = False) -> None:
        self.interval_s, self.share = interval_s, share
        self._due = time.monotonic() + interval_s if waits else 0.0

    def __call__(self, work: Callable[[], Any]) -> None:
        """Do the work if it is due."""
        start = time.monotonic()
        if start >= self._due:
            work()
            end = time.monotonic()
            self._due = end + max(self.interval_s, self.share * (end - start))


class _Mark(NamedTuple):
    """End of an interval of time, in the span ``name`` (empty outside any)."""
    name: str
    host: float
    event: Event | None


class Timer:
    """``with timer("rollout"): ...`` adds to ``time/rollout_s``, less the time of spans inside it.

    So all spans and ``time/other_s`` (outside any span) sum up to ``time/step_s``, the seconds since the last
    :meth:`metrics`. A name, once known, is reported every step, as 0 when it did not run. For the main thread only.

    On a GPU (:meth:`follow`) a span ends when the device has done the work that was queued in it, not when the host has
    queued it. The host waits for the device only where seconds are read.

    Args:
        names: spans that are reported from the first step on.
        clock: seconds, monotonic.

    Attributes:
        steps: number of calls of :meth:`metrics`.
        gauge: function read at the end of every span and reported as ``perf/mem/<name>_gib``; None: not read.
    """

    def __init__(self, names: Sequence[str] = (), clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.gauge: Callable[[], float] | None = None
        self.steps = 0
        self._levels: dict[str, float] = {}
        self._seconds = dict.fromkeys(names, 0.0)
        self._stack: list[str] = []
        self._spans = 0
        self._left = ""  # the span that an exception is leaving, or has left
        self._mark = self._start = clock()
        self._marks: list[_Mark] = []  # since the last time that seconds were read
        self._new_event: Callable[[], Event] | None = None
        self._base: Event | None = None  # the device was at this event when the clock was at _mark

    def follow(self, event: Callable[[], Event]) -> None:
        """Measure by the device's time from now on, in events such as ``torch.cuda.Event(enable_timing=True)``."""
        self._settle()
        self._new_event, self._base = event, event()
        self._base.record()
        self._base.synchronize()
        self._add_to(self._stack[-1] if self._stack else "", self._clock())

    def _switch(self) -> None:
        """End an interval of the innermost span."""
        event = self._new_event() if self._new_event else None
        if event is not None:
            event.record()
        self._marks.append(_Mark(self._stack[-1] if self._stack else "", self._clock(), event))

    def _settle(self) -> None:
        """Add the intervals until now to their spans."""
        self._switch()
        base, start, last = self._base, self._mark, self._marks[-1].event
        if last is not None:
            last.synchronize()
        for name, host, event in self._marks:
            device = start + base.elapsed_time(event) / 1e3 if base is not None and event is not None else host
            self._add_to(name, max(host, device))
        self._base = last
        self._marks.clear()

    def _add_to(self, name: str, now: float) -> None:
        if name:
            self._seconds[name] += now - self._mark
        self._mark = now

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body under ``name``."""
        self._switch()
        self._seconds.setdefault(name, 0.0)
        self._stack.append(name)
        self._spans += 1
        self._left, done = "", False
        try:
            yield
            done = True
        finally:
            self._left = "" if done else self._left or name
            self._switch()
            self._stack.pop()
            if self.gauge is not None:
                self._levels[name] = self.gauge()

    @property
    def current(self) -> str:
        """The innermost span, ``"idle"`` outside any."""
        stack = list(self._stack)
        return stack[-1] if stack else "idle"

    def phase(self) -> str:
        """Name and number of the span, for the watchdog; changes when a span begins or ends. Safe from any thread.

        While an exception propagates, this is the span that raised it.
        """
        return f"{self._left or self.current} (span {self._spans})"

    def seconds(self, name: str) -> float:
        """Seconds counted for ``name`` since the last :meth:`metrics`."""
        self._settle()
        return self._seconds.get(name, 0.0)

    def metrics(self) -> dict[str, float]:
        """Return ``time/<name>_s`` of every known span, ``time/other_s``, ``time/step_s``, and the last reading of the
        gauge at the end of each span; start the next step."""
        self._settle()
        total = self._mark - self._start
        seconds = {f"time/{name}_s": value for name, value in self._seconds.items()}
        seconds["time/other_s"] = max(total - sum(self._seconds.values()), 0.0)
        seconds["time/step_s"] = total
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._start = self._mark
        self.steps += 1
        return seconds | {f"perf/mem/{name}_gib": level for name, level in self._levels.items()}
