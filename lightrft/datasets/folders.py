"""Finds the files of one split in a folder of data files, and refuses folders that would mix splits or double rows."""
import re
from collections.abc import Iterable, Mapping
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

from lightrft.datasets.row_formats import DataError, READERS, Row

_KINDS = {"train": "train training", "test": "test testing eval evaluation",
          "validation": "validation valid val dev eval evaluation"}  # yapf: disable
SPLIT_WORDS = {
    word: frozenset(kind for kind, of_kind in _KINDS.items() if word in of_kind.split()) for words in _KINDS.values()
    for word in words.split()
}
"""Word in the name of a file or folder -> the kinds of splits that it may mean."""
_HIDDEN = (".", "_", "~")  # .ipynb_checkpoints, ._a.jsonl of macOS, __MACOSX, _temporary of Spark, ~$a.csv of Excel
_REPORT = ".dropped.jsonl"  # of the rows that LightRFT's script for sounds has left out of the files beside it
_SHARD = re.compile(r"(?P<name>.*)-\d{5}-of-(?P<total>\d{5})")
PACKINGS = (".gz", ".bz2", ".xz", ".zst", ".zip")
_CHOICE = "Name the files that you want as entries of their own (--prompt_data, --train_data or --eval_data)"


def files_of_split(folder: Path, split: str) -> list[Path]:
    """Find files named ``<split>.*``, ``<split>-00000-of-00002.*`` or ``<split>_*``, or all files in ``<split>/``.

    Hidden files and folders are left out: names that begin with a full stop, ``_`` or ``~``.

    Raises:
        DataError: there is none, a file names two splits, several folders have the split, or files may hold the same
            rows: they have several formats, or one is a copy of another, or their names count shards differently. Or
            a shard is absent.
    """
    files = _visible(folder)
    chosen = [file for file in files if split in _names(file.relative_to(folder))]
    if not chosen:
        there = ", ".join(str(file.relative_to(folder)) for file in files[:8]) or "no data file at all"
        raise DataError(f"{folder}: no file of split {split!r} (it has {there}). Name a file of the folder, or another "
                        "split (--prompt_split or --train_split; --eval_split)")
    for file in chosen:
        _check_one_split(file.relative_to(folder), folder)
    _check_formats(chosen, folder)
    _check_copies(chosen, folder)
    _check_configurations([file.relative_to(folder) for file in chosen], folder, split)
    _check_shards(chosen, folder)
    return chosen


def saved_split(folder: Path, split: str) -> Path | None:
    """Find the folder that ``save_to_disk`` wrote: ``folder``, or that of the split in it; None: there is none.

    Raises:
        DataError: files of the split are beside it.
    """
    whole = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    if not whole and not (folder / split / "state.json").is_file():
        return None
    for path in (file.relative_to(folder) for file in _visible(folder)):
        saved = any((folder / parent / "state.json").is_file() for parent in path.parents[:-1])
        if split in _names(path) and not saved:
            raise DataError(f"{folder}: is a saved data set, and has the file {path} beside it, which may hold other "
                            f"rows of the split. Move one of them. {_CHOICE}")
    return folder if whole else folder / split


def _visible(folder: Path) -> list[Path]:
    """Return the data files of a folder, and of those in it, that are not hidden."""
    files = sorted(file for file in folder.rglob("*") if _format(file) and file.is_file())
    return [file for file in files if not hidden(file.relative_to(folder))]


def _format(file: Path) -> str:
    """Return the suffix of a file of rows, with that of its packing (``.jsonl.gz``); empty for another file."""
    suffix = file.suffix.lower()
    packing = suffix if suffix in PACKINGS else ""
    kind = Path(file.stem).suffix.lower() if packing else suffix
    return kind + packing if kind in READERS else ""


def hidden(path: Path) -> bool:
    """Return True if a part of a relative path is a name that programs give to files of their own."""
    return path.name.endswith(_REPORT) or any(part.startswith(_HIDDEN) for part in path.parts)


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
    by_format = {_format(file): file for file in files}
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


def _check_configurations(paths: list[Path], folder: Path, split: str) -> None:
    """Refuse several folders that each have the split: the configurations of a clone from the hub."""
    folders = sorted({_configuration(path, split) for path in paths} - {Path()})
    if len(folders) > 1:
        raise DataError(f"{folder}: several folders have the split {split!r}: {', '.join(map(str, folders))}. They are "
                        f"configurations of a data set. Name the one that you want: {folder}@{folders[0]}")


def _configuration(path: Path, split: str) -> Path:
    """Return the folders of a file of the split, down to that which the split is named after."""
    above = path.parts[:-1]
    return Path(*above[:above.index(split)]) if split in above else path.parent


def check_rows(parts: Mapping[Path, list[Row]], folder: Path) -> None:
    """Refuse a file whose rows are all in another one, in any order and in other bytes. The shards of one writing count
    as one file."""
    writings: dict[Path, list[Path]] = {}
    for file in parts:
        writings.setdefault(_writing(file), []).append(file)
    if len(writings) < 2:
        return
    keys = [(files[0], {_key(row) for file in files for row in parts[file]}) for files in writings.values()]
    for (first, rows), (second, others) in permutations(keys, 2):
        if rows and rows <= others:
            raise DataError(f"{folder}: {_listed((first, second), folder)} have the same rows: each of the first is in "
                            f"the second too, so it would be there twice. Remove one of them. {_CHOICE}")


def _writing(file: Path) -> Path:
    """Return the path of a file without the number of its shard."""
    shard = _SHARD.fullmatch(file.stem)
    return file.with_name(shard["name"]) if shard is not None else file


def _key(value: Any) -> int:
    """Hash a value of a row; the order of columns, and columns that hold nothing, do not count."""
    if isinstance(value, str):
        return hash(value)
    if isinstance(value, dict):
        return hash(frozenset([(name, _key(item)) for name, item in value.items() if item is not None]))
    if isinstance(value, (list, tuple)):
        return hash(tuple([_key(item) for item in value]))
    return 0 if value != value else hash(value)  # NaN is not equal to itself


def _check_shards(files: list[Path], folder: Path) -> None:
    """Refuse shards of two writings of the same rows, and a set of shards that is not whole."""
    sets: dict[Path, dict[int, list[Path]]] = {}
    for file, shard in ((file, _SHARD.fullmatch(file.stem)) for file in files):
        if shard is not None:
            sets.setdefault(_writing(file), {}).setdefault(int(shard["total"]), []).append(file)
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
