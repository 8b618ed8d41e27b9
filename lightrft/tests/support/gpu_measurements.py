"""Measurements that end in a planned way, for the tests of the runner."""
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def good(setting: Any) -> dict[str, list[dict[str, Any]]]:
    """One row."""
    return {"Doctor": [{"size": setting.size, "reduced": setting.reduced}]}


def bad(setting: Any) -> None:
    raise RuntimeError("out of everything")


def hanging(setting: Any) -> None:
    """With a child that would outlive it; ``models`` is a folder that gets the child's number."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(setting.models) / "child").write_text(str(child.pid), encoding="utf-8")
    time.sleep(600)
