"""Order of the rows: a pure function of (sizes, probabilities, seed), so that a position alone restores it."""
from collections.abc import Sequence

import numpy as np

from lightrft.utils.errors import UserError

Order = np.ndarray  # int64 [N], row indices of one episode


def check_probs(probs: Sequence[float], specs: Sequence[str]) -> None:
    """Require one non-negative probability per data set, with sum 1; raise ``ValueError`` otherwise."""
    if probs and (len(probs) != len(specs) or min(probs) < 0 or abs(sum(probs) - 1) > 1e-6):
        raise UserError(f"--prompt_data_probs {list(probs)}: need {len(specs)} numbers >= 0, one per --prompt_data, "
                        f"that sum to 1, for example {[round(1 / max(len(specs), 1), 4)] * len(specs)}")


def apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Split ``total`` into whole numbers in proportion to ``shares`` (largest remainders)."""
    exact = [total * share / sum(shares) for share in shares]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[:total - sum(counts)]:
        counts[i] += 1
    return counts


class Blend:
    """Endless order of rows: episode after episode of ``rows`` draws each.

    Without probabilities an episode is every row once. With them, each data set gives its share of every episode: one
    with a share below its size continues in the next episode, one with a larger share starts over. So within a data
    set no row is drawn again before all others were drawn.

    Args:
        sizes: rows of each data set; the index covers the data sets one after another.
        probs: share of each data set, or empty.
        shuffle: use a new seeded order each episode (and pass); otherwise the order of the files, evenly interleaved.
    """

    def __init__(self, sizes: Sequence[int], probs: Sequence[float] = (), shuffle: bool = True, seed: int = 0) -> None:
        self.sizes, self.probs, self.shuffle, self.seed = list(sizes), list(probs), shuffle, seed
        self.rows = sum(sizes)
        if any(prob > 0 and size == 0 for prob, size in zip(self.probs, self.sizes)):
            raise UserError(f"a data set to mix in has no rows: sizes {self.sizes}, probabilities {self.probs}")

    def episode(self, number: int) -> Order:
        """Return the [rows] indices of one episode."""
        if not self.probs:
            return self._permutation(0, number, self.rows)
        counts = apportion(self.rows, self.probs)
        starts = np.cumsum([0, *self.sizes[:-1]])
        draws = [start + self._slice(i, number * count, count) for i, (start, count) in enumerate(zip(starts, counts))]
        order = np.concatenate(draws)
        if self.shuffle:
            return order[self._permutation(len(self.sizes) + 1, number, len(order))]
        places = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
        return order[np.argsort(places, kind="stable")]

    def _slice(self, source: int, start: int, count: int) -> Order:
        """Return draws ``start .. start + count`` of the endless passes over one data set."""
        size = max(self.sizes[source], 1)
        first, last = start // size, (start + max(count, 1) - 1) // size
        passes = np.concatenate([self._permutation(source + 1, number, size) for number in range(first, last + 1)])
        return passes[start - first * size:][:count]

    def _permutation(self, stream: int, number: int, size: int) -> Order:
        if not self.shuffle:
            return np.arange(size)
        return np.random.default_rng([self.seed, stream, number]).permutation(size)
