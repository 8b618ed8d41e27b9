"""Columns of media in the rows of batch inference, from which training reads the media of their prompts."""
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightrft.datasets.media import Medium
from lightrft.datasets.media_rows import COLUMNS
from lightrft.datasets.media_store import MediaStore
from lightrft.inference.row_files import Row


class MediaColumns:
    """Writes the media of a prompt as the columns ``images``, ``videos`` and ``audios`` of a row.

    A file is its absolute path, and a URL stays one. A medium that the data holds as bytes becomes a file in
    ``folder``, one for each content, and its path starts at the folder around that.

    Args:
        store: of the media; None: there are none.
        folder: next to the file of the rows, for which the default of ``--media_root`` is the folder around both.
    """

    def __init__(self, store: MediaStore | None, folder: Path) -> None:
        self.store, self.folder = store, folder

    def of(self, keys: Iterable[str]) -> Row:
        """Return the columns for the media ``keys`` of a prompt, in order."""
        found: dict[str, list[Any]] = {}
        for medium in (self.store.media[key] for key in keys) if self.store is not None else ():
            found.setdefault(COLUMNS[medium.kind][0], []).append(self._value(medium))
        return found

    def _value(self, medium: Medium) -> Any:
        if isinstance(medium.source, tuple):
            return [self._value(frame) for frame in medium.source]
        return self._file(medium.key, medium.source) if isinstance(medium.source, bytes) else str(medium.source)

    def _file(self, key: str, content: bytes) -> str:
        path = self.folder / key.replace(":", "_")
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            part.write_bytes(content)
            part.replace(path)
        return f"{self.folder.name}/{path.name}"
