"""Time limits of rewards that stop answering, and the queue of a few threads."""
import threading
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from lightrft.rewards.base import Outcome

SILENT = 8  # limits without any answer, until a reward is given up
NOT_TRIED = Outcome(None, "timeout", "not tried: the responses before it took too long")


class Silence:
    """Bounds what a reward that answers nothing can cost, however many groups wait for it: ``SILENT`` limits.

    One for each reward and collection: everything begun until scores are waited for.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.lost_s = 0.0  # since the last answer, of all that can judge at once
        self._lock = threading.Lock()

    @property
    def over(self) -> bool:
        """Whether the reward is given up."""
        return self.lost_s >= SILENT * self.limit_s

    def add(self, seconds: float) -> None:
        """An attempt has ended without an answer; ``seconds`` is its share of the time of all that judge at once."""
        with self._lock:
            self.lost_s += seconds

    def end(self) -> None:
        """The reward has answered."""
        with self._lock:
            self.lost_s = 0.0


class Patience:
    """Bounds what a group that always hangs can cost: 3 time-outs in a row, a tenth of the limit; 16, nothing.

    One for each reward and group.
    """

    def __init__(self, limit_s: float, silence: Silence) -> None:
        self.limit_s, self.silence = limit_s, silence
        self.streak = 0

    def deadline_s(self) -> float:
        """Seconds the next response gets; 0: do not even try."""
        if self.silence.over:
            return 0.0
        return self.limit_s if self.streak < 3 else (self.limit_s / 10 if self.streak < 16 else 0.0)

    def answered(self) -> None:
        """A response of the group has been judged."""
        self.streak = 0
        self.silence.end()


T = TypeVar("T")


class Backlog(Generic[T]):
    """A queue for ``takers`` threads. Things of one kind travel together: a thread that is free takes its share of
    those that wait, so that nothing waits for company, and calls grow with the work that has piled up."""

    def __init__(self, takers: int) -> None:
        self.takers = takers
        self._lines: dict[Hashable, deque[T]] = {}  # the first one is served next
        self._closed = False
        self._changed = threading.Condition()

    def put(self, things: Iterable[T], kind: Hashable) -> None:
        """``RuntimeError`` once it is closed."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the reward workers have been shut down")
            self._lines.setdefault(kind, deque()).extend(things)
            self._changed.notify_all()

    def take(self, most: int) -> list[T]:
        """At most ``most`` of one kind, the oldest first; waits for them. Nothing: it is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closed)
            if not self._lines:
                return []
            kind, line = next(iter(self._lines.items()))
            del self._lines[kind]
            share = min(most, -(-len(line) // self.takers))
            taken = [line.popleft() for _ in range(share)]
            if line:
                self._lines[kind] = line  # after the others
            return taken

    def close(self) -> None:
        """Take in nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
