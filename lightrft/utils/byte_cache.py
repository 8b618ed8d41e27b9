"""Cache of values by key, within a number of bytes."""
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

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
