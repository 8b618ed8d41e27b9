"""Reads pickles that others wrote, for their tensors and plain containers: whatever else they name is not imported, and
an inert object takes its place. So nothing of them runs, and honest files with foreign objects beside their tensors
load."""
import datetime
import io
import pickle
import re
import zipfile
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy._core import multiarray
from torch._weights_only_unpickler import _get_allowed_globals
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from lightrft.utils.errors import UserError

# besides what torch.load(weights_only=True) reads: the classes of a DCP folder's metadata, containers, numbers
_PLAIN: dict[str, Any] = {
    **{f"{one.__module__}.{one.__name__}": one for one in (
        metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata, metadata.TensorProperties,
        metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo, filesystem._StoragePrefix, defaultdict)},
    **{f"pathlib{part}.{kind}": PurePosixPath for part in ("", "._local")
       for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")},
    **{f"builtins.{one.__name__}": one for one in (list, dict, tuple, frozenset, set, bytes, int, float, bool, str)},
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
}  # yapf: disable


class Inert:
    """Takes the place of an object whose class is not read: it accepts what a pickle does to it, and keeps nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> "Inert":
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    append = extend = add = __call__


class PlainUnpickler(pickle.Unpickler):
    """Unpickler that knows tensors and plain containers alone."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function of that name if it is harmless, else :class:`Inert`."""
        full = f"{module}.{name}"
        return _PLAIN[full] if full in _PLAIN else _get_allowed_globals().get(full, Inert)


def _load(file: BinaryIO, **kwargs: Any) -> Any:
    return PlainUnpickler(file, **kwargs).load()


PLAIN = SimpleNamespace(Unpickler=PlainUnpickler, load=_load, __name__="plain_pickle")  # as torch.load takes a module
_load_any = torch.load


def load_plain(file: Any, mmap: bool | None = None, **kwargs: Any) -> Any:
    """Read a file of ``torch.save`` as :class:`PlainUnpickler` does, onto the CPU.

    Raises:
        UserError: it is a program of TorchScript.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as parts:
            if any(name.endswith("/constants.pkl") for name in parts.namelist()):
                raise UserError(f"{file} is a program of TorchScript, no checkpoint: it is not read, for it could run")
    return _load_any(file, map_location="cpu", pickle_module=PLAIN, weights_only=False, mmap=mmap)


# of columns of rows, which unfinished groups carry with them
_VALUES: list[Any] = [
    multiarray._reconstruct, multiarray.scalar, np.ndarray, np.dtype,
    *map(type, map(np.dtype, "?bBhHiIlLqQefdgFDGSUVOMm")), datetime.datetime, datetime.date, datetime.time,
    datetime.timedelta, datetime.timezone, Decimal, deque, defaultdict
]


def load_state(path: Path) -> Any:
    """Read a file of ``torch.save`` in a checkpoint of this library: tensors, plain containers, and values of rows.

    Raises:
        UserError: it holds something else.
    """
    try:
        return _load_values(path)
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL (\S+)", str(error))
        raise UserError(
            f"{path} holds {match[1] if match else 'something'} beside tensors and plain values, and is not "
            "read: that could run code. If a column of the data brought it, start without "
            "--load_checkpoint, or remove the column") from error


def _load_values(file: Any) -> Any:
    with torch.serialization.safe_globals(_VALUES):
        return _load_any(file, map_location="cpu", weights_only=True)


def reads_again(value: Any) -> bool:
    """Return True if :func:`load_state` reads what ``torch.save`` makes of a value."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        _load_values(file)
    except (pickle.PickleError, AttributeError, TypeError):  # it is refused, or no pickle can be made of it
        return False
    return True


@contextmanager
def loads_are_plain() -> Iterator[None]:
    """Context in which ``torch.load`` of other packages is :func:`load_plain`."""
    torch.load = load_plain  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.load = _load_any


class PlainReader(FileSystemReader):
    """Reader of a DCP folder whose metadata, a pickle, is read by :class:`PlainUnpickler`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata.

        Raises:
            UserError: the file holds something else.
        """
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            found = PlainUnpickler(file).load()
        if not isinstance(found, Metadata):
            raise UserError(f"{self.path}/.metadata holds no metadata of torch.distributed.checkpoint: copy the folder "
                            "again")
        if not isinstance(found.storage_meta, metadata.StorageMeta):
            found.storage_meta = metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found
