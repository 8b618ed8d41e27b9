"""Cache files with a teacher's most probable tokens per position, keyed by the contents of model and sequences."""
import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from safetensors import safe_open, SafetensorError
from torch import Tensor

from lightrft.ops.segment import segment_sum
from lightrft.strategy.base import StrategyBase
from lightrft.trainer.offline.reference_cache import digests, made_folder, part_of
from lightrft.types import Experience
from lightrft.utils.errors import UserError
from lightrft.utils.file_mode import save_tensors
from lightrft.utils.hub import model_digest

_FORMAT = "1"  # of the files
_FILE_BYTES = 256 << 20  # held by a rank before they are written
TopTokens = tuple[Tensor, Tensor]  # log-probs float32 [N, k + 1], the last of all other tokens; ids int64 [N, k]


def positions(exp: Experience) -> list[int]:
    """Count the tokens of each sequence that a model predicts."""
    index = torch.zeros(exp.num_tokens, dtype=torch.long)
    index[exp.actions] = 1
    return segment_sum(index, exp.cu_seqlens).tolist()


class TeacherCache:
    """Likeliest tokens by the content of a sequence, in safetensors files of one folder per teacher and ``k``.

    Every rank writes files of its own and reads those of all, a sequence at a time.

    Args:
        folder: of all caches; ranks share it.
        path: folder or hub id of the teacher.
        k: tokens per position.
        vocab: tokens that count.
        bf16: the teacher computes in bfloat16.
        settings: of the media, see :func:`digests`.

    Raises:
        UserError: the folder cannot be made.
    """

    def __init__(self, folder: str, path: str, k: int, vocab: int, bf16: bool, strategy: StrategyBase,
                 settings: str = "") -> None:
        self.settings = settings
        name = f"teacher-{_FORMAT}-{model_digest(path)}-k{k}-v{vocab}{'-bf16' * bf16}" if strategy.is_main else ""
        self.folder = made_folder("teacher_cache_dir", folder) / strategy.all_gather_object(name)[0]
        self.folder.mkdir(exist_ok=True)
        self.k, self.strategy = k, strategy
        self.asked: set[bytes] = set()
        self._new: list[tuple[bytes, Tensor, Tensor]] = []
        self.open()

    def open(self) -> None:
        """Index the files of all ranks, after they were written; a damaged one counts as empty. A collective.

        Raises:
            UserError: the ranks see different files, so they would compute different rows.
        """
        self.strategy.barrier()
        self.known: dict[bytes, tuple[Any, int, int]] = {}
        for file in sorted(self.folder.glob("*.safetensors")):
            with suppress(OSError, SafetensorError):
                stored = safe_open(file, "pt")
                ends = stored.get_tensor("ends").tolist()
                keys = (key.tobytes() for key in stored.get_tensor("keys").numpy())
                self.known.update(zip(keys, ((stored, *span) for span in zip([0, *ends], ends))))
        seen = hashlib.blake2b(b"".join(sorted(self.known)), digest_size=16).digest()
        if len({*self.strategy.all_gather_object(seen)}) > 1:
            raise UserError(f"--teacher_cache_dir {self.folder.parent}: a rank cannot see the files of another rank. "
                            "Name a folder that all ranks share")

    def lacking(self, exp: Experience) -> list[int]:
        """Return the sequences that are neither known nor were lacking before; the same on all ranks."""
        found = []
        for i, (digest, count) in enumerate(zip(digests(exp, self.settings), positions(exp))):
            if count and digest not in self.known and digest not in self.asked:
                self.asked.add(digest)
                found.append(i)
        return found

    def add(self, exp: Experience, found: TopTokens) -> None:
        """Add the tokens of all sequences."""
        parts = (values.split(positions(exp)) for values in found)
        self._new += zip(digests(exp, self.settings), *parts)
        if sum(logprobs.nbytes + ids.nbytes for _, logprobs, ids in self._new) > _FILE_BYTES:
            self.write()

    def write(self) -> None:
        """Write the added entries to one file, atomically."""
        if not self._new or self.strategy.mesh.data.replica:
            self._new = []
            return
        keys, logprobs, ids = zip(*self._new)
        joined = b"".join(keys)
        content = {"keys": torch.from_numpy(np.frombuffer(joined, dtype=np.uint8).copy().reshape(-1, 16)),
                   "ends": torch.tensor([*map(len, ids)]).cumsum(0), "logprobs": torch.cat(logprobs),
                   "ids": torch.cat(ids).int()}  # yapf: disable
        file = self.folder / f"{hashlib.blake2b(joined, digest_size=16).hexdigest()}.safetensors"
        save_tensors(content, part := part_of(file))
        os.replace(part, file)
        self._new = []

    def read(self, exp: Experience) -> TopTokens:
        """Return the tokens of all sequences."""
        wanted = [digest for digest, count in zip(digests(exp, self.settings), positions(exp)) if count]
        logprobs, ids = (self._column(name, wanted) for name in ("logprobs", "ids"))
        return (torch.cat([torch.zeros(0, self.k + 1), *logprobs]),
                torch.cat([torch.zeros(0, self.k, dtype=torch.long), *(each.long() for each in ids)]))

    def _column(self, name: str, wanted: Iterable[bytes]) -> list[Tensor]:
        spans = (self.known[digest] for digest in wanted)
        return [stored.get_slice(name)[start:end] for stored, start, end in spans]
