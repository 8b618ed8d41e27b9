"""Finds the files of one split in a folder of data files, and refuses folders that would mix splits or double rows."""
import re
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

from lightrft.datasets.row_formats import DataError, READERS

_KINDS = {"train": "train training", "test": "test testing eval evaluation",
          "validation": "validation valid val dev eval evaluation"}  # yapf: disable
SPLIT_WORDS = {
    word: frozenset(kind for kind, of_kind in _KINDS.items() if word in of_kind.split()) for words in _KINDS.values()
    for word in words.split()
}
"""Word in the name of a file or folder -> the kinds of splits that it may mean."""
_HIDDEN = (".", "_", "~")  # .ipynb_checkpoints, ._a.jsonl of macOS, __MACOSX, _temporary of Spark, ~$a.csv of Excel
_SHARD = re.compile(r"(?P<name>.*)-\d{5}-of-(?P<total>\d{5})")
_CHOICE = "Name the files that you want as entries of their own (--prompt_data, --train_data or --eval_data)"


def files_of_split(folder: Path, split: str) -> list[Path]:
    """Find files named ``<split>.*``, ``<split>-00000-of-00002.*`` or ``<split>_*``, or all files in ``<split>/``.

    Hidden files and folders are left out: names that begin with a full stop, ``_`` or ``~``.

    Raises:
        DataError: there is none, a file names two splits, or files may hold the same rows: they have several formats,
            or one is a copy of another, or their names count shards differently. Or a shard is absent.
    """
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in READERS and file.is_file())
    files = [file for file in files if not hidden(file.relative_to(folder))]
    chosen = [file for file in files if split in _names(file.relative_to(folder))]
    if not chosen:
        there = ", ".join(str(file.relative_to(folder)) for file in files[:8]) or "no data file at all"
        raise DataError(f"{folder}: no file of split {split!r} (it has {there}). Name a file of the folder, or another "
                        "split (--prompt_split or --train_split; --eval_split)")
    for file in chosen:
        _check_one_split(file.relative_to(folder), folder)
    _check_formats(chosen, folder)
    _check_copies(chosen, folder)
    _check_shards(chosen, folder)
    return chosen


def hidden(path: Path) -> bool:
    """Return True if a part of a relative path is a name that programs give to files of their own."""
    return any(part.startswith(_HIDDEN) for part in path.parts)


def _names(path: Path) -> list[str]:
    """Return the names of splits that the path of a file may mean: those of its folders, and what its own begins
    with."""
    starts = [path.stem[:mark.start()] for mark in re.finditer(r"[-_.]", path.stem)]
    return [*path.parts[:-1], *starts, path.stem]


def _check_one_split(path: Path, folder: Path) -> None:
    names = [*_names(path), *path.stem.split("_", 1)[1:]]  # train_test.jsonl, but not train_test_cases.jsonl
    kinds = [(name, SPLIT_WORDS[name]) for name in names if name in SPLIT_WORDS]
    other = next((pair for pair in combinations(kinds, 2) if not pair[0][1] & pair[1][1]), None)
    if other is not None:
        (first, _), (second, _) = other
        raise DataError(f"{folder}: {path} is named after two splits, {first!r} and {second!r}, so its rows may belong "
                        f"to either. Rename or move it. {_CHOICE}")


def _check_formats(files: list[Path], folder: Path) -> None:
    by_format = {file.suffix.lower(): file for file in files}
    if len(by_format) > 1:
        raise DataError(f"{folder}: the files of the split have several formats ({_listed(by_format.values(), folder)})"
                        f", which may hold the same rows twice. {_CHOICE}")


def _check_copies(files: list[Path], folder: Path) -> None:
    """Refuse two files of the same bytes; those of the same size are read."""
    sizes: dict[int, list[Path]] = {}
    for file in files:
        sizes.setdefault(file.stat().st_size, []).append(file)
    for first, second in (pair for same in sizes.values() for pair in combinations(same, 2)):
        if first.stat().st_size and first.read_bytes() == second.read_bytes():
            raise DataError(f"{folder}: {_listed((first, second), folder)} are the same bytes, so every row would be "
                            f"there twice. Remove one of them. {_CHOICE}")


def _check_shards(files: list[Path], folder: Path) -> None:
    """Refuse shards of two writings of the same rows, and a set of shards that is not whole."""
    sets: dict[Path, dict[int, list[Path]]] = {}
    for file, shard in ((file, _SHARD.fullmatch(file.stem)) for file in files):
        if shard is not None:
            sets.setdefault(file.with_name(shard["name"]), {}).setdefault(int(shard["total"]), []).append(file)
    for by_total in sets.values():
        if len(by_total) > 1:
            raise DataError(f"{folder}: {_listed((shards[0] for shards in by_total.values()), folder)} count their "
                            f"shards differently, so each may hold rows of the other. Remove one set. {_CHOICE}")
        [(total, shards)] = by_total.items()
        if len(shards) < total:
            raise DataError(f"{folder}: has {len(shards)} of the {total} shards of {_listed(shards[:1], folder)}, so "
                            f"rows would be absent. Download the others. {_CHOICE}")


def _listed(files: Iterable[Path], folder: Path) -> str:
    return " and ".join(str(file.relative_to(folder)) for file in files)
