"""Processed media on disk, kept between runs and shared by the ranks of a node: one safetensors file per medium."""
import hashlib
import json
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import Any
from uuid import uuid4

import torch
from safetensors import safe_open, SafetensorError

from lightrft.datasets.media import Medium
from lightrft.types import MediaTensors
from lightrft.utils.errors import UserError
from lightrft.utils.file_mode import save_tensors
from lightrft.utils.logging import get_logger

_FORMAT = "3"  # of the files, and of what this package makes of a medium
_PACKAGES = ("lightrft", "transformers", "torch", "torchvision", "pillow", "soxr", "soundfile", "av"
             )  # that decide about tensors
_SCANS = 16  # the folder is measured again each time that a rank has written this part of the budget
_ROOM = 0.9  # of the budget, to which the files are reduced


def settings_of(processor: Any, *more: Any) -> str:
    """Hash everything that the tensors of a medium depend on: the processor, packages, and ``more`` options."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = ""
    parts = {name: getattr(processor, name).to_dict() for name in ("image_processor", "video_processor",
                                                                   "feature_extractor")
             if getattr(processor, name, None) is not None}  # yapf: disable
    own = {name: value for name, value in vars(processor).items() if isinstance(value, (str, int, float, bool))}
    text = json.dumps([_FORMAT, type(processor).__name__, own, parts, versions, more], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass
class DiskCache:
    """Files below ``folder``, at most about ``budget`` bytes; the least recently read are removed first.

    The name of a file is a hash of the medium's content and of ``settings``. Files are written atomically, so ranks
    need no lock; a damaged one is rebuilt. A folder that cannot be written is reported once, and from then on only
    read.

    Raises:
        UserError: the folder cannot be made.
    """
    folder: Path
    budget: int
    settings: str

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--media_cache_dir {self.folder}: {error.strerror}. Name another folder, or leave the "
                            "option out") from error
        self._lock, self._writes, self._since = Lock(), True, 0
        self._shrink()

    def path(self, key: str, medium: Medium) -> Path | None:
        """Return the file of ``medium``, whose role in a prompt is in ``key``; None: its content is not known here."""
        if not _by_content(medium):
            return None
        name = hashlib.blake2b(f"{self.settings}\0{key}".encode(), digest_size=20).hexdigest()
        return self.folder / name[:2] / f"{name}.safetensors"

    def read(self, path: Path) -> MediaTensors | None:
        """Read a file; None: there is none, or it is damaged."""
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
            os.utime(path)
        except (FileNotFoundError, PermissionError):
            return None
        except (SafetensorError, OSError, ValueError) as error:
            get_logger().warning("%s is damaged (%s): its medium is processed again", path, error)
            return None
        made = MediaTensors(about.get("kind", ""), tensors, about.get("text", ""), float(about.get("cut_s", 0)))
        if about.get("sum") != _checksum(made):
            get_logger().warning("%s is damaged (its sum differs): its medium is processed again", path)
            return None
        return made

    def write(self, path: Path, made: MediaTensors) -> None:
        """Write a file under another name and rename it; a failure is logged."""
        if not self._writes:
            return
        whole = path.with_name(f"{path.stem}.{uuid4().hex}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            tensors = {name: tensor.contiguous() for name, tensor in made.tensors.items()}
            about = {"kind": made.kind, "text": made.text, "cut_s": str(made.cut_s), "sum": _checksum(made)}
            save_tensors(tensors, whole, about)
            whole.replace(path)
        except (OSError, SafetensorError) as error:
            self._writes = False
            with suppress(OSError):
                whole.unlink()
            get_logger().warning("--media_cache_dir %s cannot be written (%s): nothing more is kept", self.folder,
                                 error)
            return
        with self._lock:
            self._since += path.stat().st_size if path.exists() else 0
            full = self._since > self.budget / _SCANS
        if full:
            self._shrink()

    def _shrink(self) -> None:
        """Measure the folder; beyond the budget, remove what was not read for the longest time."""
        with self._lock:
            self._since, files = 0, []
            for path in self.folder.glob("??/*.safetensors"):
                try:
                    found = path.stat()
                except OSError:  # another rank removed it
                    continue
                files.append((found.st_mtime, found.st_size, path))
            used = sum(size for _, size, _ in files)
            for _, size, path in sorted(files) if used > self.budget else ():
                if used <= _ROOM * self.budget:
                    break
                path.unlink(missing_ok=True)
                used -= size


def _by_content(medium: Medium) -> bool:
    """Return True if the key of a medium is a hash of its content, as of all but URLs."""
    if isinstance(medium.source, tuple):
        return all(map(_by_content, medium.source))
    return not isinstance(medium.source, str)


def _checksum(made: MediaTensors) -> str:
    total = zlib.crc32(f"{made.kind}\0{made.text}".encode())
    for name, tensor in sorted(made.tensors.items()):
        total = zlib.crc32(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode(), total)
        total = zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"
