"""Modes of files: safetensors, and so transformers and PEFT, writes files that their owner alone can read."""
import stat
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from safetensors.torch import save_file
from torch import Tensor


def mode_of_new_files(folder: Path) -> int:
    """Return the mode of a new file in ``folder``, as the umask of this process and the folder's defaults say."""
    probe = folder / f".{uuid4().hex}.tmp"  # reading the umask itself would change it for other threads
    probe.touch()
    try:
        return stat.S_IMODE(probe.stat().st_mode)
    finally:
        probe.unlink()


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the mode of a new file."""
    save_file(tensors, path, dict(metadata) if metadata else None)
    path.chmod(mode_of_new_files(path.parent))


def give_modes(folder: Path) -> None:
    """Give the files of ``folder``, which another library has written, the mode of new files."""
    mode = mode_of_new_files(folder)
    for file in folder.iterdir():
        if file.is_file() and not file.is_symlink():
            file.chmod(mode)
