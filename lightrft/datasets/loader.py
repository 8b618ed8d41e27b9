"""Loader of global batches, the same on every rank; one number is its whole position."""
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar
from zlib import crc32

from lightrft.datasets.blend import Blend
from lightrft.datasets.loading import DataError
from lightrft.utils.env import World
from lightrft.utils.logging import get_logger

Item = TypeVar("Item")
SAMPLED = 64  # rows that identify a data set


class MixedDataset(Sequence[Item]):
    """Rows of several data sets, one after another.

    Attributes:
        sizes: rows of each data set.
        probs: mixing probability of each, or empty.
    """
    sizes: list[int]
    probs: list[float]


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

    Raises:
        DataError: fewer rows than one batch.
    """

    def __init__(self, dataset: Sequence[Item], batch_size: int, shuffle: bool = True, seed: int = 0) -> None:
        if not 0 < batch_size <= len(dataset):
            raise DataError(f"a batch of {batch_size} rows cannot be filled: the data has {len(dataset)}. The nearest "
                            f"batch size that works is {len(dataset) if batch_size > 0 else 1}")
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

    def steps(self, episodes: int, partial: bool = False) -> int:
        """Return the full batches in ``episodes`` episodes; with ``partial`` the rows left at the end are one more."""
        return (self.draws(episodes) + (self.batch_size - 1 if partial else 0)) // self.batch_size

    def draws(self, episodes: int) -> int:
        """Return the number of rows in ``episodes`` episodes."""
        return episodes * self.blend.rows

    def __iter__(self) -> Iterator[list[Item]]:
        return self

    def __next__(self) -> list[Item]:
        return [row for _, row in self.draw(self.batch_size)]

    def draw(self, count: int) -> list[tuple[int, Item]]:
        """Return the next ``count`` rows, each with its number in the endless stream."""
        start, self.position = self.position, self.position + count
        return [(place, self.dataset[self._row(place)]) for place in range(start, self.position)]

    def _row(self, place: int) -> int:
        episode, offset = divmod(place, self.blend.rows)
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
                            f"{self.blend.sizes}. Use the same data, --max_samples and --prompt_max_len, or start anew")
        wanted = Blend(state["sizes"], state["probs"], state["shuffle"], state["seed"])
        if (wanted.probs, wanted.shuffle, wanted.seed) != (self.blend.probs, self.blend.shuffle, self.blend.seed):
            _warn(f"the data order goes on as in the checkpoint: seed {wanted.seed}, shuffle {wanted.shuffle}, "
                  f"probabilities {wanted.probs}")
        if state["rows"] != self._rows:
            _warn("the data has as many rows as that of the checkpoint, but other ones: the run goes on after the "
                  f"first {state['position']} rows of the order, and rows that were used may come again")
        self.blend, self.position, self._cached = wanted, state["position"], (-1, [])


def _warn(text: str) -> None:
    """Log a warning on one rank, because all ranks see the same data."""
    if World.from_env().is_main:
        get_logger().warning(text)
