"""Records of measurements, each with the machine that it ran on, in one JSON file."""
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "transformers", "numpy", "vllm", "sglang", "flash_attn", "deepspeed", "trl",
            "liger_kernel")
STATUS = ("ok", "failed", "cut")  # cut: ended with the call; the next one runs it again
Row = dict[str, Any]  # column -> text, number or None
Tables = dict[str, list[Row]]


@dataclass
class Record:
    """Result of one measurement.

    ``status``: one of ``STATUS``; ``tables``: the rows that it has, also of one that did not end well; ``error``: why
    it did not, and the end of its output.
    """
    name: str
    status: str
    tables: Tables = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0
    machine: dict[str, str] = field(default_factory=dict)


class Store:
    """The records in one file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self) -> dict[str, Record]:
        """Return all records, by the name of the measurement."""
        if not self.file.exists():
            return {}
        return {name: Record(name, **facts) for name, facts in json.loads(self.file.read_text("utf-8")).items()}

    def done(self) -> set[str]:
        """Return the names of the measurements that came to their end."""
        return {name for name, record in self.read().items() if record.status != "cut"}

    def write(self, record: Record) -> None:
        """Write a record in place of an earlier one."""
        self._save(self.read() | {record.name: record})

    def forget(self, name: str) -> None:
        """Remove the record of a measurement, if there is one."""
        self._save({key: record for key, record in self.read().items() if key != name})

    def _save(self, records: dict[str, Record]) -> None:
        """Replace the file; a process that is killed meanwhile leaves the old one."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        facts = {name: {key: value for key, value in asdict(record).items() if key != "name"}
                 for name, record in records.items()}  # yapf: disable
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        new.replace(self.file)


@lru_cache(maxsize=1)
def gpus() -> tuple[tuple[str, str, str], ...]:
    """Return (name, driver, memory) of every NVIDIA GPU that this process may use; empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [tuple(part.strip() for part in line.split(",")) for line in done.stdout.splitlines()]
    return tuple(each for each in found if len(each) == 3)[:_visible()]


def _visible() -> int | None:
    """Return the number of GPUs in CUDA_VISIBLE_DEVICES, whose list ends at an empty name or -1; None: all are."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if names is None else len(list(takewhile(lambda name: name.strip() not in ("", "-1"),
                                                         names.split(","))))  # yapf: disable


def machine(reduced: bool) -> dict[str, str]:
    """Describe this machine and its packages; without a GPU, or ``reduced``, its CPU."""
    if gpus() and not reduced:
        (name, driver, memory), count = gpus()[0], len(gpus())
        device = {"device": f"{count} x {name}, {memory}", "driver": driver}
    else:
        device = {"device": f"CPU ({platform.machine()}, {os.cpu_count()} cores)"}
    return device | {"python": platform.python_version()} | _versions() | {"commit": _commit(), "date": _today()}


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name.replace("_", "-"))
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def missing(needs: tuple[str, ...], ranks: int, reduced: bool) -> str:
    """Return why this machine cannot run a measurement, or an empty string."""
    if ranks > 1 and not reduced and len(gpus()) < ranks:
        return f"needs {ranks} GPUs, here {'is' if len(gpus()) == 1 else 'are'} {len(gpus())}"
    if "gpu" in needs and (reduced or not gpus()):
        return "needs a GPU"
    absent = [name for name in needs if name != "gpu" and importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)} is not installed" if absent else ""
