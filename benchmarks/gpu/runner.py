"""Run the measurements that are missing, each in its own process, in pieces of a few minutes; then render the page.

    python -m benchmarks.gpu [--minutes 30] [--only NAME ...] [--again NAME ...] [--reduced] [--out FOLDER]

A measurement that fails, hangs or runs out of memory is recorded with its error; the others run all the same. A second
call continues where the first one ended. Results go to docs/data/gpu and the page to docs/gpu.md; with --out or
--reduced both go to one folder.
"""
import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

from benchmarks.gpu.catalog import Measurement, MEASUREMENTS
from benchmarks.gpu.page import render
from benchmarks.gpu.store import gpus, machine, missing, Record, ROOT, STATUS, Store

RESULTS, PAGE = ROOT / "docs" / "data" / "gpu", ROOT / "docs" / "gpu.md"
MODELS = "lightrft-random-models"  # folder of its own in --models, removed once all is measured
ERROR_LINES = 25  # of the output of a failed measurement
GRACE_S = 5.0  # between SIGTERM and SIGKILL
Process = tuple[int, str]  # number, and time of its start, which tells it from a later one of the same number


class Runner:
    """Runs measurements and stores their records.

    Args:
        models: folder that keeps random models between measurements.
        reduced: tiny shapes, on the CPU.
        clock: seconds, monotonic.
    """

    def __init__(self, store: Store, models: Path, reduced: bool = False,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.store, self.models, self.reduced, self.clock = store, models, reduced, clock

    def run(self, measurements: Iterable[Measurement], minutes: float) -> list[str]:
        """Run what has no result, as far as it surely ends in ``minutes``; return the names that are left."""
        end, done, left = self.clock() + 60 * minutes, self.store.done(), []
        for one in measurements:
            if one.name in done:
                continue
            if reason := missing(one.needs, one.ranks, self.reduced):
                self.store.write(Record(one.name, "skipped", error=reason, machine=machine(self.reduced)))
            elif self.clock() + one.limit > end:
                left.append(one.name)
            else:
                self._say(one.name, f"about {one.seconds} s")
                record = self.measure(one)
                self.store.write(record)
                self._say(one.name, f"{record.status} after {record.seconds:.0f} s")
        return left

    @staticmethod
    def _say(name: str, text: str) -> None:
        print(f"{name}: {text}", flush=True)

    def measure(self, one: Measurement) -> Record:
        """Run one measurement; its processes end with it, or at its limit."""
        log = self.store.folder / "logs" / f"{one.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            out, start = Path(folder) / "rows.json", self.clock()
            setting = replace(one.setting, reduced=self.reduced, models=str(self.models), scratch=folder)
            with log.open("w", encoding="utf-8") as output:
                command = self._command(one, "--setting", json.dumps(asdict(setting)), "--out", str(out))
                code = call(command, one.limit, output, self._environment())
            seconds = self.clock() - start
            ok = code == 0 and out.exists()
            tables = json.loads(out.read_text(encoding="utf-8")) if ok else {}
        why = f"ended after {one.limit} s, its limit" if code is None else f"exit code {code}"
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-ERROR_LINES:]
        error = "" if ok else "\n".join([why, *tail]).replace(str(ROOT), ".")
        return Record(one.name, "ok" if ok else "failed", tables, error, seconds, machine(self.reduced))

    @staticmethod
    def _command(one: Measurement, *words: str) -> list[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(one.ranks)]
        child = ["-m", "benchmarks.gpu.child", "--function", one.function]
        return [sys.executable, *(launcher if one.ranks > 1 else []), *child, *words]

    def _environment(self) -> dict[str, str]:
        """Return the environment of a measurement: the repository can be imported without being installed."""
        path = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        on_cpu = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if self.reduced else {}
        return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))} | on_cpu


def call(command: list[str], limit: float, output: IO[str], environment: dict[str, str]) -> int | None:
    """Run a command; return its exit code, or None if it was ended at its limit, with all its descendants."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
                               start_new_session=True)  # yapf: disable
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, its descendants and its process group: SIGTERM first, at which torchrun ends its
    ranks and engines clean up, SIGKILL after ``GRACE_S``."""
    own = family(process.pid)  # found now: the children of a process that has ended belong to nobody
    process.terminate()
    wait_for(process, own)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for number, _ in own & processes().keys():  # ranks of torchrun are in sessions of their own
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    wait_for(process, own)  # the next measurement needs their memory


def wait_for(process: subprocess.Popen[bytes], own: set[Process]) -> None:
    """Wait ``GRACE_S`` at most until the process and its family are gone."""
    deadline = time.monotonic() + GRACE_S
    while (process.poll() is None or own & processes().keys()) and time.monotonic() < deadline:
        time.sleep(0.05)


def family(pid: int) -> set[Process]:
    """Return a living process and all its descendants."""
    alive, own = processes(), set[Process]()
    found = {one for one in alive if one[0] == pid}
    while found:
        own, numbers = own | found, {number for number, _ in found}
        found = {one for one, parent in alive.items() if parent in numbers} - own
    return own


def processes() -> dict[Process, int]:
    """Return the number of the parent of every living process; empty without /proc."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *rest = file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if state not in "ZX":
            found[int(file.parent.name), rest[17]] = int(parent)
    return found


def known(reduced: bool) -> list[Measurement]:
    """Return all measurements, or those with a reduced form."""
    return [one for one in MEASUREMENTS if one.reduced or not reduced]


def unfinished(store: Store, reduced: bool) -> list[str]:
    """Return the names of all measurements that can run here and have no result; they may need the random models."""
    done = store.done()
    return [one.name for one in known(reduced) if one.name not in done and not missing(one.needs, one.ranks, reduced)]


def choose(args: argparse.Namespace) -> list[Measurement]:
    """Return the measurements of the command line.

    Raises:
        SystemExit: a name is unknown, or there is no GPU to measure.
    """
    all_of_them = known(args.reduced)
    names = [one.name for one in all_of_them]
    if wrong := [name for name in (*args.only, *args.again) if name not in names]:
        raise SystemExit(f"unknown measurement {', '.join(wrong)}; known: {', '.join(names)}")
    if not args.reduced and not gpus():
        raise SystemExit("no NVIDIA GPU here (nvidia-smi lists none): --reduced runs tiny shapes on the CPU")
    return [one for one in all_of_them if not args.only or one.name in args.only]


def usual_minutes(count: int) -> float:
    """Return the minutes of a call that measures all on ``count`` GPUs: several are also measured together."""
    return 40 if count > 1 else 30


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="start nothing that could end later than this (default: 30, with "
                        "several GPUs 40)")  # yapf: disable
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these measurements alone")
    parser.add_argument("--again", nargs="+", default=[], metavar="NAME", help="measure these again")
    parser.add_argument("--reduced", action="store_true", help="tiny shapes on the CPU, one to two minutes")
    parser.add_argument("--render", action="store_true", help="measure nothing, render the page")
    parser.add_argument("--out", type=Path, help=f"folder of results and page (default: {RESULTS.relative_to(ROOT)}, "
                        f"{PAGE.relative_to(ROOT)})")  # yapf: disable
    parser.add_argument(
        "--models", type=Path, default=Path(tempfile.gettempdir()),
        help=f"{MODELS} in this folder keeps the random models (17 GB) until all is measured "
        "(default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a measurement failed."""
    args = parse(argv)
    out = args.out or (ROOT / "runs" / "gpu-reduced" if args.reduced else RESULTS)
    page, store = PAGE if out == RESULTS else out / "gpu.md", Store(out)
    left: list[str] = []
    if not args.render:
        chosen = choose(args)
        for name in args.again:
            (out / f"{name}.json").unlink(missing_ok=True)
        models = args.models.absolute() / MODELS
        left = Runner(store, models, args.reduced).run(chosen, args.minutes or usual_minutes(len(gpus())))
        if not unfinished(store, args.reduced):
            shutil.rmtree(models, ignore_errors=True)
    records = store.read()
    page.write_text(render(MEASUREMENTS, records), encoding="utf-8")
    failed = [name for name, record in records.items() if record.status == "failed"]
    counts = [f"{sum(one.status == status for one in records.values())} {status}" for status in STATUS]
    print(f"{', '.join(counts)}, {len(left)} left; see {page}")
    for title, names in (("failed", failed), ("left for the next call", left)):
        if names:
            print(f"{title}: {', '.join(names)}")
    return int(bool(failed))
