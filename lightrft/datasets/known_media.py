"""Media by key: those of rows, and pictures that environments show, which are known as long as somebody has them."""
from base64 import b64decode
from collections import Counter
from collections.abc import Iterable
from weakref import WeakValueDictionary

from lightrft.datasets.media import Medium
from lightrft.utils.errors import UserError
from lightrft.utils.play import Shown


class KnownMedia(dict[str, Medium]):
    """Media of rows by key. A lookup also finds the pictures of environments, of which episodes and rollouts keep those
    that passes still read; one that is not known is a :class:`UserError`.

    Attributes:
        most: most media of each kind in one sequence: in a row that a data set keeps, and those that are expected.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most: dict[str, int] = {}
        self._kept, self._shown = set[str](), WeakValueDictionary[str, Shown]()
        self._expected = Counter[str]()

    def expect(self, kind: str, count: int) -> None:
        """Let a sequence have up to ``count`` media of a kind beside those of its row."""
        self._expected[kind] += count
        self.most[kind] = count + self.most.get(kind, 0)

    def keep(self, rows: Iterable[tuple[str, ...]]) -> set[str]:
        """Count the media of the rows that a data set keeps, and forget those that no data set keeps; return these."""
        for keys in rows:
            self._kept.update(keys)
            for kind, count in Counter(key.partition(":")[0] for key in keys).items():
                self.most[kind] = max(count + self._expected[kind], self.most.get(kind, 0))
        dropped = self.keys() - self._kept
        for key in dropped:
            del self[key]
        return dropped

    def show(self, picture: Shown) -> Shown:
        """Make a picture known; return the object that keeps it known, one for all equal pictures."""
        return self._shown.setdefault(picture.key, picture)

    def __missing__(self, key: str) -> Medium:
        if (picture := self._shown.get(key)) is None:
            raise UserError(f"no row of this run's data has the medium {key}, and no environment of this rank has "
                            "shown it: the ranks read different data")
        return Medium(key.partition(":")[0], key, b64decode(picture.data), "a picture of the environment")
