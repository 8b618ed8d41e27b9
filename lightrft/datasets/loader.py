"""Loader of global batches, the same on every rank; a single number is its position.

The order of the rows is a pure function of (sizes, probabilities, seed), so the position is enough to restore it.
"""
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar, overload
from zlib import crc32

import numpy as np

from lightrft.datasets.rows import DataError
from lightrft.utils.errors import UserError
from lightrft.utils.logging import warn_of_all

Item = TypeVar("Item")
Order = np.ndarray  # int64 [N], row indices of one episode
SAMPLED = 64  # rows that identify a data set


def check_probs(probs: Sequence[float], specs: Sequence[str]) -> None:
    """Require one non-negative probability per data set, with sum 1; raise ``ValueError`` otherwise."""
    if probs and (len(probs) != len(specs) or min(probs) < 0 or abs(sum(probs) - 1) > 1e-6):
        raise UserError(f"mixing probabilities {list(probs)}: need {len(specs)} numbers >= 0, one per data set, that "
                        f"sum to 1, for example {[round(1 / max(len(specs), 1), 4)] * len(specs)}")


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
        positions = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
        return order[np.argsort(positions, kind="stable")]

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


class MixedDataset(Sequence[Item]):
    """Rows of several data sets, one after another.

    Attributes:
        sizes: rows of each data set.
        probs: mixing probability of each, or empty.
    """
    sizes: list[int]
    probs: list[float]

    @abstractmethod
    def item(self, index: int) -> Item:
        """The row at ``index``."""

    @overload
    def __getitem__(self, index: int) -> Item:
        ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]:
        ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        return [self.item(i)
                for i in range(*index.indices(len(self)))] if isinstance(index, slice) else self.item(index)


def check_batch(size: int, rows: int, option: str) -> None:
    """Raise a :class:`DataError` if a batch of ``size`` cannot be filled from ``rows`` rows; ``option`` sets it."""
    if size < 1:
        raise DataError(f"--{option} {size}: a batch has at least one row; nearest valid value: 1")
    if size > rows:
        even = rows // 16 * 16 or rows  # which also divides into the usual optimizer steps
        raise DataError(f"--{option} {size}: a batch cannot be filled, the data has {rows} rows; give at most that, "
                        f"e.g. --{option} {even}")


class PromptLoader(Generic[Item]):
    """Iterates endlessly over batches of any sequence of rows (prompts, SFT examples).

    Rows are drawn episode by episode in one endless stream and cut into batches. The rows left at the end of an
    episode open the first batch of the next one, so none is lost and every batch is full. A batch counts as
    consumed once it is returned. Nothing depends on rank or world size.

    Args:
        dataset: the rows; a :class:`MixedDataset` brings its mixing probabilities.
        batch_size: rows per batch, over all ranks.
        shuffle: use a new order each episode.
        seed: seed of the order.
        option: option that sets the batch size, for messages.

    Raises:
        DataError: fewer rows than one batch.
    """

    def __init__(self, dataset: Sequence[Item], batch_size: int, shuffle: bool = True, seed: int = 0,
                 option: str = "rollout_batch_size") -> None:
        check_batch(batch_size, len(dataset), option)
        sizes, probs = [len(dataset)], []
        if isinstance(dataset, MixedDataset):
            sizes, probs = dataset.sizes, dataset.probs
        self.dataset, self.batch_size = dataset, batch_size
        self.blend = Blend(sizes, probs, shuffle, seed)
        self.position = 0  # rows returned so far
        self._cached: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        """Return the number of full batches per episode."""
        return self.blend.rows // self.batch_size

    @property
    def episode(self) -> int:
        """Number of episodes whose rows were all returned."""
        return self.position // self.blend.rows

    def steps(self, episodes: int) -> int:
        """Return the full batches in ``episodes`` episodes."""
        return self.draws(episodes) // self.batch_size

    def draws(self, episodes: int) -> int:
        """Return the number of rows in ``episodes`` episodes."""
        return episodes * self.blend.rows

    def __iter__(self) -> Iterator[list[Item]]:
        return self

    def __next__(self) -> list[Item]:
        return [row for _, row in self.draw(self.batch_size)]

    def ahead(self) -> list[Item]:
        """Return the rows of the next batch without consuming them."""
        return [self.dataset[self._row(number)] for number in range(self.position, self.position + self.batch_size)]

    def draw(self, count: int) -> list[tuple[int, Item]]:
        """Return the next ``count`` rows, each with its number in the endless stream."""
        start, self.position = self.position, self.position + count
        return [(number, self.dataset[self._row(number)]) for number in range(start, self.position)]

    def _row(self, number: int) -> int:
        """Row of the data with this number in the endless stream."""
        episode, offset = divmod(number, self.blend.rows)
        if self._cached[0] != episode:
            self._cached = (episode, self.blend.episode(episode).tolist())
        return self._cached[1][offset]

    def state_dict(self) -> dict[str, Any]:
        """Return the position and everything that it depends on."""
        blend = self.blend
        return {"position": self.position, "sizes": blend.sizes, "probs": blend.probs, "shuffle": blend.shuffle,
                "seed": blend.seed, "rows": self._rows}  # yapf: disable

    @cached_property
    def _rows(self) -> int:
        """Checksum of the content of a few rows."""
        step = max(len(self.dataset) // SAMPLED, 1)
        return crc32(repr([self.dataset[i] for i in range(0, len(self.dataset), step)]).encode())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the position of ``state``, in its order; the batch size may have changed.

        Raises:
            DataError: the data sets have other sizes than in ``state``.
        """
        if state["sizes"] != self.blend.sizes:
            raise DataError(f"the checkpoint was made with data sets of {state['sizes']} rows, now they have "
                            f"{self.blend.sizes}. Use the same data, --max_samples and --prompt_max_len, or start a "
                            "new run")
        wanted = Blend(state["sizes"], state["probs"], state["shuffle"], state["seed"])
        if (wanted.probs, wanted.shuffle, wanted.seed) != (self.blend.probs, self.blend.shuffle, self.blend.seed):
            warn_of_all(f"the data order continues as in the checkpoint: seed {wanted.seed}, shuffle {wanted.shuffle}, "
                        f"probabilities {wanted.probs}")
        if state["rows"] != self._rows:
            warn_of_all(
                "the data has the same number of rows as the checkpoint's, but other rows: the run continues after "
                f"the first {state['position']} rows of the order, and rows that were used may come again")
        self.blend, self.position, self._cached = wanted, state["position"], (-1, [])
