"""Rows of a run in progress, in one file per rank, from which a killed run resumes; joined in order at the end."""
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightrft.config.options import show
from lightrft.rewards.base import TRANSIENT
from lightrft.strategy.base import StrategyBase
from lightrft.utils.errors import UserError
from lightrft.utils.trajectory_saver import json_line

IDENTITY = "identity.json"
Row = dict[str, Any]


class RowFiles:
    """Files of groups of rows, such as the responses to a prompt, under the numbers of the groups.

    A group is one line, so it is either there or not. All ranks must see the same folder; creating it is a collective.

    Args:
        folder: of the files; it is removed by :meth:`finish`.
        identity: options and data that the rows depend on, by name; a folder of another run is refused.

    Attributes:
        done: numbers of the groups that earlier runs have written.
        unscored: rows of further groups, which wait for scores: their reward did not answer (see ``TRANSIENT``).

    Raises:
        UserError: the folder holds rows of a run with another identity.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], strategy: StrategyBase) -> None:
        self.folder, self.strategy = folder, strategy
        found = strategy.all_gather_object(self._opened(dict(identity)) if strategy.is_main else None)[0]
        if isinstance(found, UserError):
            raise found
        self.done: set[int] = {number for number, rows in found.items() if rows is None}
        self.unscored: dict[int, list[Row]] = {number: rows for number, rows in found.items() if rows is not None}
        self._file = open(folder / f"rank_{strategy.rank:05d}.jsonl", "a", encoding="utf-8")

    def _opened(self, identity: dict[str, Any]) -> dict[int, list[Row] | None] | UserError:
        """Prepare the folder on rank 0; return the numbers in it, with the rows that wait for scores."""
        wanted = json.loads(json.dumps(identity, default=str))
        files = _rank_files(self.folder)
        if not _begun(self.folder, files):
            while files:
                files.pop().unlink()
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / IDENTITY).write_text(json.dumps(wanted), encoding="utf-8")
        if refusal := _of_another_run(self.folder, wanted):
            return refusal
        for file in files:
            _cut_incomplete(file)
        return {number: rows if _waits(rows) else None for number, rows in self._groups().items()}

    def add(self, number: int, rows: list[Row]) -> None:
        """Write a group; it survives the end of this process."""
        self._file.write(json_line({"number": number, "rows": rows}))
        self._file.flush()

    def _groups(self) -> dict[int, list[Row]]:
        """Read the groups of all ranks; of one that was scored again, the rows that have scores."""
        found: dict[int, list[Row]] = {}
        for file in _rank_files(self.folder):
            with open(file, encoding="utf-8") as lines:
                for group in map(json.loads, lines):
                    if group["number"] not in found or _waits(found[group["number"]]):
                        found[group["number"]] = group["rows"]
        return found

    def close(self) -> None:
        """Wait until every rank has written its rows; a collective."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.strategy.barrier()

    def rows(self) -> list[Row]:
        """Return the rows in the order of their groups, once all ranks are :meth:`closed <close>`."""
        return [row for _, rows in sorted(self._groups().items()) for row in rows]

    def finish(self) -> None:
        """Remove the folder: its rows are in the output. The identity goes first; without it rows do not count."""
        (self.folder / IDENTITY).unlink()
        shutil.rmtree(self.folder)


def refuse_other_run(folder: Path, identity: Mapping[str, Any]) -> None:
    """Refuse a ``folder`` that :class:`RowFiles` would refuse; nothing is written."""
    if _begun(folder, _rank_files(folder)):
        refusal = _of_another_run(folder, json.loads(json.dumps(dict(identity), default=str)))
        if refusal:
            raise refusal


def _begun(folder: Path, files: list[Path]) -> bool:
    """Return True if rows of a run are in ``files`` of the folder."""
    return (folder / IDENTITY).exists() and any(file.stat().st_size for file in files)


def _rank_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank_*.jsonl"))


def _of_another_run(folder: Path, wanted: Mapping[str, Any]) -> UserError | None:
    """Return the error of a folder of a run with another identity than the ``wanted`` one."""
    try:
        saved = json.loads((folder / IDENTITY).read_text(encoding="utf-8"))
    except ValueError as error:
        return UserError(
            f"{folder / IDENTITY}: is damaged ({error}), so nothing says of which run the rows in the folder "
            "are. Remove the folder")
    others = [f"{name} {show(wanted.get(name))} (was {show(saved.get(name))})"
              for name in [*saved, *wanted] if saved.get(name) != wanted.get(name)]  # yapf: disable
    return UserError(f"{folder} holds an unfinished run with other options or data: "
                     f"{', '.join(dict.fromkeys(others))}. Finish it with those, or remove the folder") if others \
        else None


def _waits(rows: list[Row]) -> bool:
    """Return True if a row has no score because its reward did not answer, which may be over."""
    return any(row.get("unscored") in TRANSIENT for row in rows)


def _cut_incomplete(file: Path) -> None:
    """Remove a last line that a killed process has begun."""
    data = file.read_bytes()
    if data and not data.endswith(b"\n"):
        with open(file, "r+b") as opened:
            opened.truncate(data.rfind(b"\n") + 1)


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write a jsonl file; one that is there is replaced at once."""
    part = path.with_name(f"{path.name}.tmp")
    with open(part, "w", encoding="utf-8") as file:
        file.writelines(map(json_line, rows))
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
