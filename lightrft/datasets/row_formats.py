"""Reads one file of rows: parquet, arrow, JSON, JSON lines or CSV."""
import codecs
import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lightrft.utils.errors import UserError

Row = dict[str, Any]


class DataError(UserError):
    """Data cannot be used; the message names the location, the problem and the remedy."""


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
        rows.append(as_row(row, f"{file}, line {number}"))
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
    return [as_row(row, f"{file}, row {number}") for number, row in enumerate(content, start=1)]


def as_row(row: Any, where: str) -> Row:
    """Return ``row`` as a dict, which it must be, or another mapping; ``where`` locates it in the error."""
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: a row must be an object of named columns, not {type(row).__name__}")
    return row if isinstance(row, dict) else dict(row)


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


READERS = {
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}
"""Suffix of a file -> its reader."""
