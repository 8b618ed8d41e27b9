"""Move the files of an earlier run aside instead of overwriting them."""
import itertools
from pathlib import Path


def backup_path(path: Path) -> Path | None:
    """Rename a file or folder to the first free ``STEM.1.SUFFIX``, ...; return its new path, or None."""
    if not path.exists():
        return None
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    return path.rename(next(name for name in names if not name.exists()))
