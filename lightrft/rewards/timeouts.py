"""Time budgets of rewards that stop answering, and the queue that a few threads share."""
import threading
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from lightrft.rewards.base import Outcome

SILENT = 8  # time limits without any answer until a reward is given up
NOT_TRIED = Outcome(None, "timeout", "not tried: the responses before it took too long")


class RewardBudget:
    """Bounds the cost of a reward that never answers to ``SILENT`` time limits, for any number of waiting groups.

    There is one for each reward and collection: all responses begun before a wait for scores. ``patient``: each
    response that is tried has the whole limit, because a time-out is its own fault.
    """

    def __init__(self, limit_s: float, patient: bool = False) -> None:
        self.limit_s, self.patient = limit_s, patient
        self.lost_s = 0.0  # lost since the last answer, per parallel judge
        self._lock = threading.Lock()

    @property
    def spent(self) -> bool:
        """True once the reward is given up."""
        return self.lost_s >= SILENT * self.limit_s

    def lose(self, seconds: float) -> None:
        """Record an attempt without an answer; ``seconds`` is its time over the number of parallel judges."""
        with self._lock:
            self.lost_s += seconds

    def answered(self) -> None:
        """Record an answer of the reward."""
        with self._lock:
            self.lost_s = 0.0


class GroupBudget:
    """Bounds the cost of a group that always times out: a tenth of the limit after 3 time-outs in a row, 0 after 16.

    There is one for each reward and group.
    """

    def __init__(self, reward: RewardBudget) -> None:
        self.reward, self.timeouts = reward, 0  # in a row

    def deadline_s(self) -> float:
        """Return the seconds for the next response; 0: do not try it."""
        if self.reward.spent or (self.timeouts >= 16 and not self.reward.patient):
            return 0.0
        if self.reward.patient:
            return self.reward.limit_s
        return self.reward.limit_s / (1 if self.timeouts < 3 else 10)

    def answered(self) -> None:
        """Record that a response of the group was judged."""
        self.timeouts = 0
        self.reward.answered()


T = TypeVar("T")


class Backlog(Generic[T]):
    """Queue for ``takers`` threads that hands out several things of one kind at a time.

    A free thread takes its share of the waiting things, without waiting for a full batch. Calls grow with the backlog.
    """

    def __init__(self, takers: int) -> None:
        self.takers = takers
        self._lines: dict[Hashable, deque[T]] = {}  # the first queue is served next
        self._closed = False
        self._changed = threading.Condition()

    def put(self, things: Iterable[T], kind: Hashable) -> None:
        """Add things of one kind; raise ``RuntimeError`` once the queue is closed."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the reward workers have been shut down")
            self._lines.setdefault(kind, deque()).extend(things)
            self._changed.notify_all()

    def take(self, most: int) -> list[T]:
        """Wait for and return at most ``most`` things of one kind, the oldest first; none if closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closed)
            if not self._lines:
                return []
            kind, line = next(iter(self._lines.items()))
            del self._lines[kind]
            share = min(most, -(-len(line) // self.takers))
            taken = [line.popleft() for _ in range(share)]
            if line:
                self._lines[kind] = line  # behind the other kinds
            return taken

    def close(self) -> None:
        """Accept no more things."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
