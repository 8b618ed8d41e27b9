"""What waits for a few threads."""
import threading
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

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
