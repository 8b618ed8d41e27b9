"""Measurements that end in a planned way, for the tests of the runner."""
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
MODULE = "benchmarks.gpu.child"  # the program of a measurement


def piece(folder: Path, name: str) -> tuple[Any, dict[str, str]]:
    """A measurement in its reduced form, and the options of its program, for a process that has imported its engine.

    ``sys.path`` and ``folder`` get what the program needs.
    """
    sys.path += [str(path) for path in (ROOT, ROOT / "benchmarks") if str(path) not in sys.path]
    from benchmarks.gpu.catalog import MEASUREMENTS
    one, = (one for one in MEASUREMENTS if one.name == name)
    (folder / "scratch").mkdir(parents=True)
    setting = replace(one.setting, reduced=True, models=str(folder), scratch=str(folder / "scratch"))
    return one, {"function": one.function, "setting": json.dumps(asdict(setting)), "out": str(folder / "rows.json")}


def check_piece(folder: Path, one: Any) -> None:
    """Assert that the measurement filled all of its tables."""
    tables = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    assert set(tables) == set(one.tables) and all(tables.values()), tables


def good(setting: Any) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """One row."""
    yield {"Doctor": [{"size": setting.size, "reduced": setting.reduced}]}


def bad(setting: Any) -> Iterator[dict[str, list[dict[str, Any]]]]:
    yield from good(setting)
    raise RuntimeError("out of everything")


def hanging(setting: Any) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """A row, then nothing, with a child that would outlive it; the first rank cleans up at SIGTERM, the second one is
    deaf to it. ``models`` is a folder that gets the numbers of both processes."""
    yield from good(setting)
    rank, folder = os.environ.get("RANK", "0"), Path(setting.models)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if rank == "1" else lambda *_: sys.exit())
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"rank {rank} hangs")
    (folder / f"pids-{rank}").write_text(f"{os.getpid()} {child.pid}", encoding="utf-8")
    try:
        time.sleep(600)
    finally:
        (folder / "cleaned").touch()
