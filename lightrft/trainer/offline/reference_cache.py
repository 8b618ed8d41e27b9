"""Files that keep the log-probs of a reference model, by the contents of the model and of each sequence."""
import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from lightrft.strategy.base import StrategyBase
from lightrft.types import Experience
from lightrft.utils.errors import UserError
from lightrft.utils.hub import model_digest

_FORMAT = "1"  # of the files


def digests(exp: Experience, settings: str) -> Iterator[bytes]:
    """Hash every sequence: its tokens, which of them are in the loss, and its media with the ``settings`` of their
    processing (:attr:`lightrft.types.MediaSource.settings`)."""
    cu, media = exp.cu_seqlens.tolist(), exp.media or [()] * exp.num_seqs
    tokens, drawn = exp.token_ids.numpy(), exp.drawn.numpy()
    for start, end, keys in zip(cu, cu[1:], media):
        digest = hashlib.blake2b(tokens[start:end].tobytes(), digest_size=16)
        digest.update(drawn[start:end].tobytes())
        digest.update("\0".join((*keys, settings) if keys else ()).encode())
        yield digest.digest()


class ReferenceCache:
    """Summed log-probs by the content of a sequence, in one file per model; equal on every rank.

    Args:
        folder: of the files.
        path: folder or hub id of the reference model.
        bf16: it computes in bfloat16.
        settings: of the media, see :func:`digests`.

    Raises:
        UserError: the folder cannot be made.
    """

    def __init__(self, folder: str, path: str, bf16: bool, strategy: StrategyBase, settings: str = "") -> None:
        self.settings = settings
        self.file, known = Path(), dict[bytes, float]()
        if strategy.is_main:
            name = f"reference-{_FORMAT}-{model_digest(path)}{'-bf16' * bf16}.npz"
            self.file = made_folder("ref_cache_dir", folder) / name
            known = _read(self.file)
        self.known: dict[bytes, float] = strategy.all_gather_object(known)[0]

    def lacking(self, exp: Experience) -> list[int]:
        """Return the sequences that are not in the cache."""
        return [i for i, digest in enumerate(digests(exp, self.settings)) if digest not in self.known]

    def add(self, exp: Experience, sums: Tensor) -> None:
        """Add the sums [B] of all sequences."""
        self.known.update(zip(digests(exp, self.settings), sums.tolist()))

    def read(self, exp: Experience) -> Tensor:
        """Return the sums of all sequences, float64 [B]."""
        return torch.tensor([self.known[digest] for digest in digests(exp, self.settings)], dtype=torch.float64)

    def write(self) -> None:
        """Write the file atomically."""
        keys = np.frombuffer(b"".join(self.known), dtype=np.uint8).reshape(-1, 16)
        part = part_of(self.file)
        with open(part, "wb") as opened:
            np.savez(opened, keys=keys, sums=np.array([*self.known.values()]))
        os.replace(part, self.file)


def part_of(file: Path) -> Path:
    """Return a name for ``file`` while it is written, of this process alone: processes of other nodes may have the same
    number."""
    return file.with_suffix(f".{uuid4().hex}.part")


def made_folder(option: str, folder: str) -> Path:
    """Make the ``folder`` that an ``option`` names; raise a :class:`UserError` if it cannot be made."""
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--{option} {folder}: {error.strerror}. Name another folder") from error
    return path


def _read(file: Path) -> dict[bytes, float]:
    """Read a file; a damaged or missing one is empty."""
    with suppress(OSError, EOFError, ValueError, KeyError, BadZipFile), np.load(file) as stored:
        return {key.tobytes(): value for key, value in zip(stored["keys"], stored["sums"].tolist())}
    return {}
