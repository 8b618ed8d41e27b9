"""Counts what makes the suite long, in all of its processes: processes and engines that start, optimizer steps, and
commands ``python`` that import everything anew because :mod:`warm` could not fork them.

An event is one byte at the end of a file of its kind, so no process waits for another. What a fresh Python does is not
counted, only its start. ``growth.json`` has the figures of the whole suite: to grow beyond them is a decision. A part
of the suite is counted, and not judged. conftest.py makes this file a plugin of pytest.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import wraps
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "LIGHTRFT_SUITE_COUNTS"  # the folder of the files, which the first pytest makes
COMMITTED = Path(__file__).with_name("growth.json")
SLACK = 0.05  # runs that are killed at a random moment take different numbers of steps
KINDS = ("processes", "engines", "steps", "cold starts")
FOLDER, SAYS = pytest.StashKey[Path](), pytest.StashKey[list[str]]()


def watch() -> None:
    """Count from now on, in this process and in those that are forked from it; of what is imported already."""
    _count("processes", subprocess.Popen, "__init__")
    _count("processes", BaseProcess, "start")
    if step := sys.modules.get("lightrft.trainer.optimizer_step"):
        _count("steps", step.OptimizerStep, "run")
    if engines := sys.modules.get("lightrft.rollout.engines"):  # what a dry run plans is not built, and not checked
        _count("engines", engines, "check_own_weights", lambda cfg, actor, engine: cfg.engine_type != "hf")


def _count(kind: str, owner: Any, name: str, counts: Callable[..., bool] = lambda *args, **kwargs: True) -> None:
    function, folder = getattr(owner, name), os.environ.get(VARIABLE)
    if folder is None or hasattr(function, "counted"):
        return

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if counts(*args, **kwargs):
            add(Path(os.environ.get(VARIABLE, folder)), kind)
        return function(*args, **kwargs)

    counted.counted = True  # type: ignore[attr-defined]
    setattr(owner, name, counted)


def add(folder: Path, kind: str) -> None:
    """Count one event; none once the suite is over and its folder gone."""
    if folder.is_dir():
        with (folder / kind).open("ab", buffering=0) as file:
            file.write(b".")


def counted_in(folder: Path) -> dict[str, int]:
    """The events of each kind."""
    return {kind: (folder / kind).stat().st_size if (folder / kind).exists() else 0 for kind in KINDS}


def committed() -> dict[str, int]:
    """The figures of the whole suite; empty before the first are committed."""
    figures: dict[str, int] = json.loads(COMMITTED.read_text())
    return figures


def commit(counts: dict[str, int]) -> None:
    """Write the figures of a whole suite."""
    COMMITTED.write_text(json.dumps(counts, indent=4) + "\n")


def grown(counts: dict[str, int], figures: dict[str, int]) -> list[str]:
    """One sentence per kind that is more than its committed figure and :data:`SLACK`."""
    return [
        f"{counts[kind]:,} {kind} are more than the {most:,} of {COMMITTED.name} and {SLACK:.0%}: let new tests share "
        "those of others, or take the new figures with `make test ARGS=--commit-counts` and say why in the commit"
        for kind, most in figures.items() if counts[kind] > most * (1 + SLACK)
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that takes new figures."""
    parser.addoption("--commit-counts", action="store_true",
                     help=f"write what the whole suite counts to {COMMITTED.name}")


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder of the counts, once: workers, and the tests of tests, find it in their environment."""
    if VARIABLE not in os.environ:
        config.stash[FOLDER] = Path(tempfile.mkdtemp(prefix="suite-counts-"))
        os.environ[VARIABLE] = str(config.stash[FOLDER])


def pytest_collection_finish() -> None:
    """Count in this process, once the tests have imported what they run."""
    watch()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a whole suite that has grown, or take its figures."""
    config = session.config
    if FOLDER not in config.stash:
        return
    counts = counted_in(config.stash[FOLDER])
    config.stash[SAYS] = [", ".join(f"{count:,} {kind}" for kind, count in counts.items())]
    if not is_whole(config) or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return
    if config.getoption("--commit-counts"):
        commit(counts)
    elif sentences := grown(counts, committed()):
        config.stash[SAYS] += sentences
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def is_whole(config: pytest.Config) -> bool:
    """Return True if neither paths nor other words choose among the tests of ``make test``."""
    given = config.option
    chosen = given.keyword or given.deselect or given.ignore or given.ignore_glob or given.collectonly or given.maxfail
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and given.markexpr == "not whole" and not chosen


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the counts, and what has grown."""
    for sentence in config.stash.get(SAYS, []):
        terminalreporter.write_line(f"Counted: {sentence}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folder of the counts."""
    if FOLDER in config.stash:
        shutil.rmtree(config.stash[FOLDER], ignore_errors=True)
        os.environ.pop(VARIABLE, None)
