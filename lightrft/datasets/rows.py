"""Reads files, folders and hub ids into rows (dicts). Errors name the file, the row and the remedy."""
import codecs
import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lightrft.datasets.content import content
from lightrft.utils.errors import UserError
from lightrft.utils.hub import prefer_cache_without_network

Row = dict[str, Any]
_SURROGATE = re.compile("[\ud800-\udfff]")


class DataError(UserError):
    """Data cannot be used; the message names the location, the problem and the remedy."""


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

    def where(self, index: int) -> str:
        """Return file and row number of ``rows[index]`` as text for messages."""
        name, row = self.origin(index)
        return f"{name}, row {row}"


def place_of(uid: str, split: str) -> str:
    """Return the row of a ``uid`` (``ENTRY:INDEX``) of the ``split`` "train" or "eval" as text for messages."""
    entry, _, index = uid.partition(":")
    return f"row {int(index) + 1} of {'training' if split == 'train' else 'evaluation'} data {int(entry) + 1}"


_IN_MEMORY: dict[str, list[Row]] = {}


def hold_rows(rows: Iterable[Row]) -> str:
    """Keep rows of this program in memory, and return the entry under which :func:`load_rows` finds them.

    Its name is a hash of their content: a run resumes on the same rows, and other rows are another entry.
    """
    held = [_as_row(row, f"row {number}") for number, row in enumerate(rows, start=1)]
    digest = hashlib.blake2b(digest_size=8)
    for row in held:
        digest.update(repr(content(row)).encode())
    _IN_MEMORY[spec := f"memory:{digest.hexdigest()}"] = held
    return spec


def load_rows(spec: str, split: str = "train") -> Rows:
    """Read one ``--prompt_data`` entry.

    Args:
        spec: a parquet, json, jsonl, csv or arrow file, a folder that ``save_to_disk`` wrote, a folder of such files
            named after their split, or a hub id; ``path@data_dir`` picks a folder inside. Or a result of
            :func:`hold_rows`.
        split: the split to read; a single file is read whole.

    Raises:
        DataError: data is missing, empty or unreadable, or has rows of different types, texts that are no Unicode or
            duplicate ids.
    """
    path, data_dir = _split_spec(spec)
    local = Path(path).expanduser()
    if spec in _IN_MEMORY:
        rows = Rows(_IN_MEMORY[spec], [(spec, len(_IN_MEMORY[spec]))])
    elif spec.startswith("memory:"):
        raise DataError(f"{spec}: rows of a Python program, which are not in a file. Start that program again, or name "
                        "a file")
    elif local.is_dir():
        rows = _read_folder(local / data_dir, split)
    elif local.is_file():
        rows = _read_files([local])
    else:
        rows = _read_named(path, data_dir, split)
    if not rows:
        raise DataError(f"{spec}: holds no rows. Write the data again or name another file")
    _check_types(rows)
    _check_texts(rows)
    _check_ids(rows)
    return rows


def _split_spec(spec: str) -> tuple[str, str]:
    path, _, data_dir = spec.rpartition("@")
    return (path, data_dir) if path and not Path(spec).expanduser().exists() else (spec, "")


def _read_folder(folder: Path, split: str) -> Rows:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _read_saved(folder, split)
    return _read_files(_files_of_split(folder, split))


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """Find files named ``<split>.*``, ``<split>-00000-of-00002.*`` or ``<split>_*``, or all files in ``<split>/``."""
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in _READERS)
    wanted = [
        file for file in files
        if re.match(rf"{re.escape(split)}([-_.]|$)", file.stem) or split in file.relative_to(folder).parts[:-1]
    ]
    if not wanted:
        found = ", ".join(str(file.relative_to(folder)) for file in files[:8]) or "no data file at all"
        raise DataError(f"{folder}: no file of split {split!r} (found: {found}). Name a file of the folder, or another "
                        "split (--prompt_split or --train_split; --eval_split)")
    return wanted


def _read_files(files: list[Path]) -> Rows:
    parts = []
    for file in files:
        if file.suffix.lower() not in _READERS:
            raise DataError(f"{file}: unknown kind of file {file.suffix!r}; known: {', '.join(sorted(_READERS))}")
        if file.stat().st_size == 0:
            raise DataError(f"{file}: the file is empty. Write the data again")
        parts.append(_READERS[file.suffix.lower()](file))
    return Rows([row for part in parts for row in part], [(str(file), len(part)) for file, part in zip(files, parts)])


def _read_parquet(file: Path) -> list[Row]:
    try:
        return pq.ParquetFile(file).read().to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a complete parquet file ({error}). It may be cut off: copy or write it "
                        "again") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: a text column is not UTF-8 ({error}). Write the file again in UTF-8") from error


def _read_arrow(file: Path) -> list[Row]:
    for opener in (pa.ipc.open_file, pa.ipc.open_stream):
        try:
            return opener(pa.memory_map(str(file))).read_all().to_pylist()
        except pa.ArrowInvalid as error:
            reason = error
    raise DataError(f"{file}: not a complete arrow file ({reason}). It may be cut off: copy or write it again")


_MARKS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"),
          (codecs.BOM_UTF16_BE, "utf-16"))  # the mark of UTF-32 begins with that of UTF-16


def _read_text(file: Path) -> str:
    data = file.read_bytes()
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            raise DataError(f"{file}: {encoding.upper()}, not UTF-8. Convert the file: iconv -f {encoding} -t utf-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{file}, line {line}: not UTF-8 (byte {data[error.start]:#04x}). Convert the file: iconv "
                        "-f ENCODING -t utf-8, with the encoding it was written in, such as gbk, cp1251 or "
                        "latin1") from error


def _read_jsonl(file: Path) -> list[Row]:
    rows = []
    lines = _read_text(file).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            cut = " The file seems cut off: copy or write it again." if number == len(lines) else ""
            what = f"not valid JSON ({error.msg} at column {error.colno})"
            raise DataError(f"{file}, line {number}: {what}.{cut}") from error
        rows.append(_as_row(row, f"{file}, line {number}"))
    return rows


def _read_json(file: Path) -> list[Row]:
    text = _read_text(file)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return _read_jsonl(file)
        raise DataError(f"{file}, line {error.lineno}: not valid JSON ({error.msg}). The file may be cut off: copy or "
                        "write it again") from error
    if isinstance(content, dict) and len(content) == 1:
        content = next(iter(content.values()))
    if not isinstance(content, list):
        content = [content]
    return [_as_row(row, f"{file}, row {number}") for number, row in enumerate(content, start=1)]


def _as_row(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be an object of named columns, not {type(row).__name__}")
    return row


def _read_csv(file: Path) -> list[Row]:
    text = _read_text(file)
    mark = next((mark for mark in ",;\t" if mark in text.partition("\n")[0]), ",")
    reader = csv.DictReader(io.StringIO(text, newline=""), restkey="", strict=True, delimiter=mark)
    rows: list[Row] = []
    try:
        for row in reader:
            if "" in row or None in row.values():
                raise DataError(f"{file}, line {reader.line_num}: {'more' if '' in row else 'fewer'} fields than the "
                                f"header, which has {len(reader.fieldnames or [])}. Quote fields that hold {mark!r}")
            rows.append(row)
    except csv.Error as error:
        raise DataError(f"{file}, line {reader.line_num}: not valid CSV ({error})") from error
    return rows


_READERS = {
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}


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
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or Path(name).suffix in _READERS:
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
    """Return the key that must be unique within a file: column ``id`` or ``uid``, else verl's source, split, index."""
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
