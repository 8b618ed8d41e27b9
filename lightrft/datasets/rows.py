"""Reads files, folders and hub ids into rows (dicts). Errors name the file, the row and the remedy."""
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from lightrft.datasets import reasoning_gym
from lightrft.datasets.folders import check_rows, files_of_split, PACKINGS, saved_split
from lightrft.datasets.plain_values import PLAIN, plain_row
from lightrft.datasets.row_formats import as_row, DataError, READERS, Row
from lightrft.utils.hub import prefer_cache_without_network

_SURROGATE = re.compile("[\ud800-\udfff]")


class UnusableRow(DataError):
    """A row cannot be used for training; a policy decides if that stops the run."""


@dataclass
class Rows:
    """Rows of one spec, and the files they came from as ``(name, rows)`` in order.

    ``numbers`` are their indices in all files together; None: no row is left out. ``media_root``: folder at which
    relative paths of media start; None: that of the file.
    """
    rows: list[Row]
    files: list[tuple[str, int]]
    numbers: list[int] | None = None
    media_root: str | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def pick(self, indices: Iterable[int]) -> "Rows":
        """Return only the rows ``indices``, which keep their numbers."""
        wanted = list(indices)
        return replace(self, rows=[self.rows[i] for i in wanted], numbers=[self.number(i) for i in wanted])

    def media_home(self, index: int) -> str:
        """Return the file or folder at which relative paths of the media of ``rows[index]`` start."""
        return self.media_root or self.origin(index)[0]

    def number(self, index: int) -> int:
        """Return the index of ``rows[index]`` in all files together, counted from 0."""
        return index if self.numbers is None else self.numbers[index]

    def origin(self, index: int) -> tuple[str, int]:
        """Return file and row number (counted from 1) of ``rows[index]``."""
        index = self.number(index)
        for name, count in self.files:
            if index < count:
                return name, index + 1
            index -= count
        raise IndexError(f"row {index} is past the end of the data")

    @property
    def named(self) -> list[tuple[Row, str]]:
        """The rows, each with the text that names it in messages."""
        return [(row, self.where(index)) for index, row in enumerate(self.rows)]

    def where(self, index: int) -> str:
        """Return file and row number of ``rows[index]`` as text for messages."""
        name, row = self.origin(index)
        return f"{name}, row {row}"


def place_of(uid: str, split: str) -> str:
    """Return the row of a ``uid`` of the ``split`` "train" or "eval" as text for messages: ``ENTRY:INDEX``, or with the
    name of a suite, or of the row."""
    entry, _, index = uid.partition(":")
    row = f"row {int(index) + 1}" if index.isdecimal() else f"row {index!r}"
    data = {"train": "training", "eval": "evaluation"}.get(split, split)
    return f"{row} of {f'{data} data {int(entry) + 1}' if entry.isdecimal() else entry}"


_IN_MEMORY: dict[str, list[Row]] = {}


def hold_rows(rows: Iterable[Row]) -> str:
    """Keep rows of this program in memory, and return the entry under which :func:`load_rows` finds them.

    Values of numpy, pandas and torch become those that a file would give (:func:`plain_row`).
    Its name is a hash of their content: a run resumes on the same rows, and other rows are another entry.
    """
    held = [plain_row(as_row(row, f"row {number}")) for number, row in enumerate(rows, start=1)]
    digest = hashlib.blake2b(digest_size=8)
    for row in held:
        digest.update(repr(_content(row)).encode())
    _IN_MEMORY[spec := f"memory:{digest.hexdigest()}"] = held
    return spec


def _content(value: Any) -> Any:
    """Return ``value`` with hashes in place of bytes, arrays and pictures, whose ``repr`` leaves content out.

    The ``repr`` of the result is the same in every process for equal values.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, Mapping):
        return {name: _content(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return value if {*map(type, value)} <= PLAIN else [_content(one) for one in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "bytes", _hash(value)
    if isinstance(value, Image.Image):
        return _picture(value)
    if hasattr(value, "__array__"):
        return _array(np.asarray(value))
    return value


def _hash(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _array(array: np.ndarray) -> Any:
    if array.dtype.hasobject:
        return "objects", array.shape, _content(array.tolist())
    return str(array.dtype), array.shape, _hash(array.tobytes())


def _picture(picture: Image.Image) -> Any:
    """Describe pixels, and what else decides how they are shown: colours, transparency, how the camera was held."""
    about = [picture.mode, picture.size, _content(picture.info)]
    try:
        return [*about, _hash(picture.tobytes()), picture.getpalette(None)]
    except (OSError, ValueError, SyntaxError, EOFError):  # a file that is broken, which is told where it is read
        return about


def has_no_file(spec: str) -> bool:
    """Return True for an entry whose rows are in memory, or are made when they are read."""
    return spec.startswith(("memory:", reasoning_gym.PREFIX))


def load_rows(spec: str, split: str = "train") -> Rows:
    """Read one ``--prompt_data`` entry.

    Args:
        spec: a parquet, json, jsonl, csv or arrow file, a folder that ``save_to_disk`` wrote, a folder of such files
            named after their split, or a hub id; ``path@data_dir`` picks a folder inside. Or a result of
            :func:`hold_rows`, or ``reasoning_gym:NAME?size=500``.
        split: the split to read; a single file is read whole.

    Raises:
        DataError: data is missing, empty or unreadable, or has rows of different types, texts that are no Unicode or
            duplicate ids.
    """
    path, data_dir = _split_spec(spec)
    local = Path(path).expanduser()
    if spec in _IN_MEMORY:
        rows = Rows(_IN_MEMORY[spec], [(spec, len(_IN_MEMORY[spec]))])
    elif spec.startswith(reasoning_gym.PREFIX):
        made = reasoning_gym.reasoning_gym_rows(spec, split)
        rows = Rows(made, [(spec, len(made))])
    elif spec.startswith("memory:"):
        raise DataError(f"{spec}: rows of a Python program, which are not in a file. Start that program again, or name "
                        "a file")
    elif local.is_dir():
        rows = _read_folder(local / data_dir, split)
    elif local.is_file():
        rows = _joined(_parts([local]))
    else:
        rows = _read_named(path, data_dir, split)
    if not rows:
        raise DataError(f"{spec}: holds no rows. Write the data again or name another file")
    rows.rows = [_with_objects(row) for row in rows.rows]
    _check_types(rows)
    _check_texts(rows)
    _check_ids(rows)
    return rows


_OBJECTS = ("extra_info", "reward_model")  # columns of verl that some programs write as JSON texts


def _with_objects(row: Row) -> Row:
    """Return a row with objects in place of their JSON texts in the columns of verl that hold objects."""
    texts = [name for name in _OBJECTS if isinstance(row.get(name), str) and row[name].lstrip().startswith("{")]
    objects = {}
    for name in texts:
        with suppress(ValueError):
            objects[name] = json.loads(row[name])
    return row | objects if objects else row


def _split_spec(spec: str) -> tuple[str, str]:
    path, _, data_dir = spec.rpartition("@")
    return (path, data_dir) if path and not Path(spec).expanduser().exists() else (spec, "")


def _read_folder(folder: Path, split: str) -> Rows:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    if saved := saved_split(folder, split):
        return _read_saved(saved, split)
    parts = _parts(files_of_split(folder, split))
    check_rows(parts, folder)
    return _joined(parts)


_PICKLES = (".pkl", ".pickle")


def _unknown_kind(file: Path) -> str:
    text = f"{file}: unknown kind of file {file.suffix!r}; known: {', '.join(sorted(READERS))}"
    if file.suffix.lower() in PACKINGS:
        return f"{text}. Unpack it"
    if file.suffix.lower() not in _PICKLES:
        return text
    return (f"{text}. Reading a pickle runs code that is in it. If you trust its author, convert it: python -c 'import "
            f"pandas as pd; pd.DataFrame(pd.read_pickle(\"{file}\")).to_parquet(\"{file.with_suffix('.parquet')}\")'")


def _parts(files: list[Path]) -> dict[Path, list[Row]]:
    """Read files of rows."""
    for file in files:
        if file.suffix.lower() not in READERS:
            raise DataError(_unknown_kind(file))
        if file.stat().st_size == 0:
            raise DataError(f"{file}: the file is empty. Write the data again")
    return {file: READERS[file.suffix.lower()](file) for file in files}


def _joined(parts: Mapping[Path, list[Row]]) -> Rows:
    return Rows([row for part in parts.values() for row in part],
                [(str(file), len(part)) for file, part in parts.items()])


def _read_saved(folder: Path, split: str) -> Rows:
    import datasets
    try:
        saved = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{folder}: not a complete saved data set ({error}). Copy or save it again") from error
    if isinstance(saved, datasets.DatasetDict):
        saved = _pick_split(saved, str(folder), split)
    return Rows(saved.to_list(), [(str(folder), len(saved))])


def _pick_split(splits: Any, name: str, split: str) -> Any:
    if split not in splits:
        raise DataError(f"{name}: no split {split!r}; it has {', '.join(splits)}. Choose one (--prompt_split or "
                        "--train_split; --eval_split)")
    return splits[split]


def _read_named(name: str, data_dir: str, split: str) -> Rows:
    """Read an entry that is no local file or folder: a hub id, or a mistyped path."""
    _check_hub_id(name)
    try:
        return read_hub(name, split, data_dir=data_dir)
    except DataError as error:
        raise DataError(f"{name}: no such file or folder, and {str(error).removeprefix(f'{name}: ')}") from error


def _check_hub_id(name: str) -> None:
    """Refuse a path that is mistyped, which no hub has."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or Path(name).suffix in READERS:
        raise DataError(f"{name}: no such file or folder. Check the path (relative ones start at {Path.cwd()})")


def read_hub(name: str, split: str, config: str = "", data_dir: str = "") -> Rows:
    """Read one split of a data set of the Hugging Face hub.

    Raises:
        DataError: it cannot be had from there, or has no such split.
    """
    rows = _pick_split(fetch_hub(name, config, data_dir), name, split).to_list()
    return Rows(rows, [(name, len(rows))])


def fetch_hub(name: str, config: str = "", data_dir: str = "") -> Any:
    """Download a data set of the Hugging Face hub into its cache, and open its splits; no row is read.

    Raises:
        DataError: it cannot be had from there.
    """
    import datasets
    prefer_cache_without_network()
    try:
        return datasets.load_dataset(name, config or None, data_dir=data_dir or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{name}: it cannot be downloaded from the hub ({error})") from error


def fetch_entry(spec: str) -> None:
    """Download the data set of a ``--prompt_data`` entry, a hub id, into the hub's cache.

    Raises:
        DataError: it cannot be had from there, or is a mistyped path.
    """
    name, data_dir = _split_spec(spec)
    _check_hub_id(name)
    fetch_hub(name, data_dir=data_dir)


_KINDS = {bool: "bool", str: "text", dict: "object", list: "list", int: "number", float: "number"}


def _check_types(rows: Rows) -> None:
    """Require one kind of value per column in all rows (nulls, NaN and absent columns do not count)."""
    first: dict[str, tuple[str, int]] = {}
    for index, row in enumerate(rows.rows):
        for column, value in row.items():
            if value is None or isinstance(value, float) and value != value:
                continue
            kind = _KINDS.get(type(value), type(value).__name__)
            expected, at = first.setdefault(column, (kind, index))
            if kind != expected:
                raise DataError(f"{rows.where(index)}: mixed schema: column {column!r} holds {kind} here, {expected} "
                                f"in {rows.where(at)}. Write all rows in one schema")


def lone_surrogate(value: Any) -> str | None:
    """Return half of a surrogate pair that a text in ``value`` has, which no UTF-8 can hold; JSON and bytes of other
    programs may bring one."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, str):
            if not one.isascii() and (found := _SURROGATE.search(one)):
                return found[0]
        elif isinstance(one, dict):
            todo += [*one, *one.values()]
        elif isinstance(one, (list, tuple)) and one and not isinstance(one[0], (int, float)):  # sounds are long
            todo += one
    return None


def _check_texts(rows: Rows) -> None:
    """Require texts that a tokenizer can read and that files can hold."""
    for index, row in enumerate(rows.rows):
        for column, value in row.items():
            if half := lone_surrogate([column, value]):
                raise DataError(f"{rows.where(index)}: the column {column!r} has {half!r}, half of a surrogate pair, "
                                "which is not a character. Write the whole pair, or remove it")


def _row_id(row: Row) -> Any:
    """Return the key that must be unique within a file: column ``id`` or ``uid``, else verl's source, split, index.
    Rows of a rollout have the uid of their prompt, and are told apart by their index in its group."""
    if row.get("uid") is not None and row.keys() >= {"group_id", "index"}:
        return "uid and index", (str(row["uid"]), row.get("step"), row["index"])
    for column in ("id", "uid"):
        if row.get(column) is not None:
            return column, str(row[column])
    extra = row.get("extra_info")
    if isinstance(extra, dict) and extra.get("index") is not None:
        return "extra_info.index", (row.get("data_source"), extra.get("split"), str(extra["index"]))
    return None


def _check_ids(rows: Rows) -> None:
    seen: dict[Any, int] = {}
    for index, row in enumerate(rows.rows):
        key = _row_id(row)
        if key is None:
            continue
        earlier = seen.setdefault((rows.origin(index)[0], key), index)
        if earlier != index:
            raise DataError(f"{rows.where(index)}: duplicate id: {key[0]} {key[1]!r} is also in {rows.where(earlier)}. "
                            "Remove one of the rows, or rename the column if it is no id")
