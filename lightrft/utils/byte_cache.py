"""Cache of values by key, within a number of bytes; and work on a key that several threads share."""
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import Generic, TypeVar

from lightrft.utils.errors import CaptureException

Value = TypeVar("Value")


class ByteCache(Generic[Value]):
    """Values by key; beyond ``budget`` bytes those not used for the longest time are dropped. Safe from any thread.

    Args:
        budget: bytes.
        size: computes the bytes of a value.
        least: number of values that are kept whatever they take.

    Attributes:
        nbytes: bytes of all values.
    """

    def __init__(self, budget: int, size: Callable[[Value], int], least: int = 0) -> None:
        self.budget, self.size, self.least, self.nbytes = budget, size, least, 0
        self._values: OrderedDict[str, Value] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Value | None:
        """Return the value of ``key``, which counts as used now; None: there is none."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def keep(self, key: str, value: Value) -> Value:
        """Keep ``value`` under ``key``, unless there is one, and drop what is beyond the budget; return ``value``."""
        with self._lock:
            if key not in self._values:
                self._values[key] = value
                self.nbytes += self.size(value)
            while self.nbytes > self.budget and len(self._values) > self.least:
                self.nbytes -= self.size(self._values.popitem(last=False)[1])
        return value


class OncePerKey(Generic[Value]):
    """Runs the work on a key in the first thread that asks; those that ask meanwhile get its result, or its error.

    A thread waits for work that runs, never for work in a queue, so the threads of one pool may share it.
    """

    def __init__(self) -> None:
        self._running: dict[str, Future[Value]] = {}
        self._lock = Lock()

    def __contains__(self, key: str) -> bool:
        return key in self._running

    def run(self, key: str, work: Callable[[str], Value]) -> Value:
        """Return ``work(key)``, or what another thread makes of ``key`` at this time."""
        own = Future[Value]()
        with self._lock:
            running = self._running.setdefault(key, own)
        if running is not own:
            return running.result()
        with CaptureException() as captured:
            own.set_result(work(key))
        if captured.cause is not None:
            own.set_exception(captured.cause)
        with self._lock:
            del self._running[key]
        return own.result()
