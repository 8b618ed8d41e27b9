"""Checkpoint folders on disk: which are complete, how one becomes complete, which go."""
import contextlib
import json
import logging
import math
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

from lightrft.utils.aside import move_aside

logger = logging.getLogger(__name__)
MARKER = "COMPLETE.json"
CRC_BYTES = 64 << 20  # larger files are checked by their size alone


def step_name(step: int) -> str:
    """Folder of the checkpoint of ``step``."""
    return f"step_{step:06d}"


def temporary_name(step: int) -> str:
    """Folder it is written under."""
    return f".{step_name(step)}.tmp"


def fresh(folder: Path) -> None:
    """An empty ``folder``; what an interrupted run left beside it is removed."""
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
    """[size] of a file, [size, CRC-32] up to 64 MiB."""
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
    """Delete a folder, its marker first, so that it is never taken for complete half-way. What cannot go stays."""
    with contextlib.suppress(OSError):
        (folder / MARKER).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def marker(folder: Path) -> dict[str, Any]:
    """The content of the marker."""
    return json.loads((folder / MARKER).read_text(encoding="utf-8"))


def fault(folder: Path) -> str | None:
    """Why ``folder`` is not a complete checkpoint; None if it is."""
    try:
        listed = marker(folder)["files"]
        for name, expected in listed.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if describe(path) != expected:
                return f"{name} is damaged or cut short"
    except FileNotFoundError:
        return f"{MARKER} is missing, so it was not written to its end"
    except (OSError, ValueError, KeyError) as error:
        return f"{MARKER} cannot be read: {error}"
    return None


def folders(parent: Path) -> list[Path]:
    """Step folders, the newest first."""
    found = [path for path in parent.glob("step_*") if path.is_dir() and path.name.removeprefix("step_").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def set_aside(parent: Path) -> Path | None:
    """Rename a folder that holds step folders to the first free ``NAME.1``, ``NAME.2``, ...; returns its new path."""
    aside = move_aside(parent) if folders(parent) else None
    if aside is None:
        return None
    logger.warning("this is a new run (no --load_checkpoint): the checkpoints in %s were moved to %s", parent, aside)
    return aside


def room(folder: Path) -> str:
    """``12.3 MiB free`` on the disk of ``folder``."""
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.1f} MiB free"
    except OSError:
        return "free space unknown"


def newest(parent: Path) -> Path | None:
    """The newest complete checkpoint; each newer one that is not is warned of."""
    for folder in folders(parent):
        why = fault(folder)
        if why is None:
            return folder
        logger.warning("skipping the checkpoint %s: %s", folder, why)
    return None


def best(complete_ones: list[Path], metric: str | None) -> Path | None:
    """The folder with the highest finite ``metric``; of equal ones the newest."""
    values = {path: marker(path)["metrics"].get(metric) for path in complete_ones} if metric else {}
    finite = {path: value for path, value in values.items() if value is not None and math.isfinite(value)}
    return max(finite, key=lambda path: finite[path]) if finite else None


def size_gib(folder: Path) -> float:
    """GiB on disk, by the marker."""
    return sum(entry[0] for entry in marker(folder)["files"].values()) / 2**30


def rotate(parent: Path, keep: int, keep_gib: float, metric: str | None) -> bool:
    """Remove all but the ``keep`` newest, then the oldest until ``keep_gib`` is kept; the newest and the best stay.

    Returns:
        False when some were removed and none could be told the best, as no checkpoint has the ``metric``.
    """
    complete_ones = [path for path in folders(parent) if (path / MARKER).is_file()]
    top = best(complete_ones, metric)
    kept_anyway = {complete_ones[0], top}
    stay = [path for index, path in enumerate(complete_ones) if index < keep or path in kept_anyway]
    total = sum(map(size_gib, stay))
    for path in reversed(list(stay)):
        if total > keep_gib and path not in kept_anyway:
            stay.remove(path)
            total -= size_gib(path)
    for path in complete_ones:
        if path not in stay:
            remove(path)
    return not metric or top is not None or len(stay) == len(complete_ones)
