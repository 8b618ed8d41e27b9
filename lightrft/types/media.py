"""Tensors of the media of prompts, and their source."""
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lightrft.utils.play import Shown


@dataclass(frozen=True)
class MediaTensors:
    """Tensors that a model's processor makes of one picture, video or sound.

    ``tensors`` have the processor's names and are those of a batch of one; ``text`` replaces the placeholder in the
    prompt. ``cut_s`` is how many seconds of a sound were left out at its end.
    """
    kind: str  # "image" | "video" | "audio"
    tensors: dict[str, Tensor]
    text: str
    cut_s: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class MediaSource(Protocol):
    """Source of media and of their tensors by key."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the media of the whole data, the same on every rank."""

    @property
    def most(self) -> dict[str, int]:
        """Most media of each kind in one sequence."""

    @property
    def settings(self) -> str:
        """Hash of everything but the content that decides about the tensors of a medium."""

    def show(self, picture: Shown) -> Shown:
        """Make a picture of an environment known; return the object that keeps it known."""

    def open(self, key: str) -> Any:
        """Decode the medium ``key``: a Pillow picture, ``samples`` and ``rate`` of a sound, or ``frames``."""

    def tensors(self, key: str) -> MediaTensors:
        """Return what the processor makes of the medium ``key``, on the CPU."""

    def prefetch(self, keys: Iterable[str]) -> None:
        """Make the tensors of media in the background."""

    def decode_ahead(self, keys: Iterable[str]) -> None:
        """Decode media in the background, for an engine that opens them."""

    def blank(self, kind: str) -> MediaTensors:
        """Return a small medium of ``kind``, for a rank that has none."""
