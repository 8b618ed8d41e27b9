"""Folders of checkpoints: written and renamed, checked by their marker, rotated, moved aside."""
import contextlib
import json
import logging
import math
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

from lightrft.utils.errors import UserError
from lightrft.utils.sinks import backup_path

logger = logging.getLogger(__name__)
MARKER = "COMPLETE.json"
CRC_BYTES = 64 << 20  # larger files are checked by their size alone


def step_name(step: int) -> str:
    """Folder of the checkpoint of ``step``."""
    return f"step_{step:06d}"


def temporary_name(step: int) -> str:
    """Folder that the checkpoint of ``step`` is written to first."""
    return f".{step_name(step)}.tmp"


def fresh(folder: Path) -> None:
    """Create an empty ``folder``; remove what an interrupted run left next to it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in [*folder.parent.glob(".step_*.tmp"), *folder.parent.glob(".step_*.old")]:
        remove(left)
    folder.mkdir()


def write(path: Path, data: bytes) -> None:
    """Write and fsync."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the entries of ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def describe(path: Path) -> list[int]:
    """Return [size] of a file, or [size, CRC-32] up to 64 MiB."""
    size = path.stat().st_size
    return [size, zlib.crc32(path.read_bytes())] if size <= CRC_BYTES else [size]


def complete(temporary: Path, final: Path, info: dict[str, Any]) -> None:
    """Write the marker, then give ``temporary`` its ``final`` name; a checkpoint already there is replaced."""
    listed = {
        str(path.relative_to(temporary)): describe(path) for path in sorted(temporary.rglob("*")) if path.is_file()
    }
    for folder in {temporary, *(path.parent for path in temporary.rglob("*"))}:
        sync_folder(folder)
    write(temporary / MARKER, json.dumps({**info, "files": listed}, indent=1).encode())
    sync_folder(temporary)
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    sync_folder(final.parent)
    remove(old)


def remove(folder: Path) -> None:
    """Delete a folder, its marker first, so that a half-deleted one never counts as complete. Files that cannot be
    deleted stay."""
    with contextlib.suppress(OSError):
        (folder / MARKER).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def marker(folder: Path) -> dict[str, Any]:
    """Read the marker.

    Raises:
        ValueError: it describes no checkpoint.
    """
    info = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    kinds = {"step": int, "world_size": int, "metrics": dict, "files": dict}
    if not isinstance(info, dict) or not all(isinstance(info.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"it describes no checkpoint: {', '.join(kinds)} are missing or of another kind")
    if not all(isinstance(entry, list) and entry and isinstance(entry[0], int) for entry in info["files"].values()):
        raise ValueError("it gives no sizes of the files")
    return info


def fault(folder: Path) -> str | None:
    """Return the reason why ``folder`` is not a complete checkpoint; None if it is."""
    try:
        listed = marker(folder)["files"]
        for name, expected in listed.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if describe(path) != expected:
                return f"{name} is damaged or cut short"
    except FileNotFoundError:
        return f"{MARKER} is missing, so the checkpoint is incomplete"
    except (OSError, ValueError) as error:
        return f"{MARKER} cannot be read: {error}"
    return None


def folders(parent: Path) -> list[Path]:
    """Step folders, the newest first."""
    found = [path for path in parent.glob("step_*") if path.is_dir() and path.name.removeprefix("step_").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def back_up(parent: Path) -> Path | None:
    """Rename a folder that holds step folders to the first free ``NAME.1``, ``NAME.2``, ...; returns its new path."""
    backup = backup_path(parent, says=False) if folders(parent) else None
    if backup is None:
        return None
    logger.warning("this is a new run (no --load_checkpoint): the checkpoints in %s were moved to %s", parent, backup)
    return backup


def room(folder: Path) -> str:
    """Free space on the disk of ``folder``, as ``12.3 MiB free``."""
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.1f} MiB free"
    except OSError:
        return "free space unknown"


def newest(parent: Path) -> Path | None:
    """Find the newest complete checkpoint; log a warning for each newer one that is incomplete."""
    for folder in folders(parent):
        why = fault(folder)
        if why is None:
            return folder
        logger.warning("skipping the checkpoint %s: %s", folder, why)
    return None


def unusable(parent: Path) -> UserError | None:
    """Return the error of a folder whose checkpoints are not complete; None if it has none."""
    if (parent / MARKER).exists():
        return UserError(f"--ckpt_path {parent}: is one checkpoint. Name the folder that it is in")
    faults = [f"{folder.name}: {fault(folder)}" for folder in folders(parent)]
    return UserError(
        f"--load_checkpoint: no checkpoint of {parent} can be read ({'; '.join(faults)}). Copy it again, or "
        "drop --load_checkpoint: the run starts anew, and the folder is moved aside") if faults else None


def markers(parent: Path) -> dict[Path, dict[str, Any]]:
    """The markers of all step folders, the newest first; folders without one that can be read are left out."""
    found = {}
    for folder in folders(parent):
        with contextlib.suppress(OSError, ValueError):
            found[folder] = marker(folder)
    return found


def best(found: dict[Path, dict[str, Any]], metric: str | None) -> Path | None:
    """The folder with the highest finite ``metric``, by the markers; of equal ones the newest."""
    values = {path: info["metrics"].get(metric) for path, info in found.items()} if metric else {}
    finite = {path: value for path, value in values.items() if isinstance(value, (int, float)) and math.isfinite(value)}
    return max(finite, key=lambda path: finite[path]) if finite else None


def rotate(parent: Path, keep: int, keep_gib: float, metric: str | None) -> bool:
    """Remove all but the ``keep`` newest, then the oldest until ``keep_gib`` is kept; the newest and the best stay, and
    so do folders that are not complete.

    Returns:
        False when some were removed and the best is unknown, as no checkpoint has the ``metric``.
    """
    found = markers(parent)
    top, gib = best(found, metric), {path: sum(size for size, *_ in info["files"].values()) / 2**30
                                     for path, info in found.items()}  # yapf: disable
    kept_anyway = {next(iter(found)), top}
    stay = [path for index, path in enumerate(found) if index < keep or path in kept_anyway]
    total = sum(map(gib.__getitem__, stay))
    for path in reversed(list(stay)):
        if total > keep_gib and path not in kept_anyway:
            stay.remove(path)
            total -= gib[path]
    for path in found:
        if path not in stay:
            remove(path)
    return not metric or top is not None or len(stay) == len(found)
