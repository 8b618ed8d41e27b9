"""Run the measurements that are missing, each in its own process, until the minutes are over; then render the page.

    python -m benchmarks.gpu [--minutes 32] [--only NAME ...] [--again NAME ...] [--reduced] [--out FOLDER]

The most valuable ones run first. A measurement that fails, hangs or runs out of memory is recorded with its error; the
others run all the same. One that is still running at the end is ended, and the figures that it has are kept; the next
call runs it again and continues. Results and page are two files: docs/data/gpu.json and docs/gpu.md, or gpu.json and
gpu.md in the folder of --out; the figures are printed too.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

from benchmarks.gpu.catalog import Measurement, MEASUREMENTS
from benchmarks.gpu.page import render, summary
from benchmarks.gpu.process import call, GRACE_S
from benchmarks.gpu.store import gpus, machine, missing, Record, ROOT, Store

RESULTS, PAGE = ROOT / "docs" / "data" / "gpu.json", ROOT / "docs" / "gpu.md"
MODELS = "lightrft-random-models"  # folder of its own in --models, removed once all is measured
ERROR_LINES = 25  # of the output of a failed measurement
LEAST_MINUTES = 4.0
START_S = 20.0  # a shorter rest is left alone: it would import torch and end
END_S = 2 * GRACE_S + 3  # to end a measurement and to write the page
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


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
        """Run what has no result within ``minutes``; return the names that are left or were ended by the clock.

        Raises:
            KeyboardInterrupt: SIGINT or SIGTERM arrived; what the running measurement has is stored.
        """
        end, done, left = self.clock() + 60 * minutes - END_S, self.store.done(), []
        for measurement in measurements:
            name, seconds = measurement.name, end - self.clock()
            if name in done:
                continue
            if reason := missing(measurement.needs, measurement.ranks, self.reduced):
                self._say(name, f"skipped, {reason}")
            elif seconds < START_S or self._measure(measurement, seconds).status == "cut":
                left.append(name)
        return left

    def _measure(self, measurement: Measurement, seconds: float) -> Record:
        self._say(measurement.name, f"about {measurement.seconds} s")
        record = self.measure(measurement, seconds)
        self._say(measurement.name, f"{record.status} after {record.seconds:.0f} s")
        return record

    @staticmethod
    def _say(name: str, text: str) -> None:
        print(f"{name}: {text}", flush=True)

    def measure(self, measurement: Measurement, seconds: float) -> Record:
        """Run one measurement and store its record; its processes end with it, at its limit or after ``seconds``."""
        record, limit, start = Record(measurement.name, "cut"), min(measurement.limit, seconds), self.clock()
        with tempfile.TemporaryDirectory() as folder:
            out, log, why = Path(folder) / "rows.json", Path(folder) / "log", "interrupted"
            try:
                code = self._call(measurement, out, log, limit)
                record.status, why = ("ok", "") if code == 0 and out.exists() else ("failed", f"exit code {code}")
            except subprocess.TimeoutExpired:
                record.status, why = "cut" if limit < measurement.limit else "failed", f"ended after {limit:.0f} s"
            finally:
                record.tables = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
                record.error = error_text(why, log) if why else ""
                record.seconds, record.machine = self.clock() - start, machine(self.reduced)
                self.store.write(record)
        return record

    def _call(self, measurement: Measurement, out: Path, log: Path, limit: float) -> int:
        """Return the exit code of a measurement.

        Raises:
            subprocess.TimeoutExpired: it was ended after ``limit`` seconds.
        """
        scratch = out.with_name("scratch")
        scratch.mkdir()
        setting = replace(measurement.setting, reduced=self.reduced, models=str(self.models), scratch=str(scratch))
        command = self._command(measurement, "--setting", json.dumps(asdict(setting)), "--out", str(out))
        with log.open("w", encoding="utf-8") as output:
            return call(command, limit, output, self._environment())

    @staticmethod
    def _command(measurement: Measurement, *words: str) -> list[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(measurement.ranks)]
        child = ["-m", "benchmarks.gpu.child", "--function", measurement.function]
        return [sys.executable, *(launcher if measurement.ranks > 1 else []), *child, *words]

    def _environment(self) -> dict[str, str]:
        """Return the environment of a measurement: the repository can be imported without being installed, no hub is
        asked for what is not here, and the end of the output is there when the measurement is ended."""
        path = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        on_cpu = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if self.reduced else {}
        return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), **ENVIRONMENT} | on_cpu


def error_text(why: str, log: Path) -> str:
    """Return why a measurement ended, and the last lines of its output."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-ERROR_LINES:] if log.exists() else []
    return "\n".join([why, *lines]).replace(str(ROOT), ".")


def in_reach(reduced: bool) -> list[Measurement]:
    """Return all measurements, or those with a reduced form."""
    return [measurement for measurement in MEASUREMENTS if measurement.reduced or not reduced]


def unfinished(store: Store, reduced: bool) -> list[str]:
    """Return the names of all measurements that can run here and have no result; they may need the random models."""
    done = store.done()
    return [measurement.name for measurement in in_reach(reduced) if measurement.name not in done
            and not missing(measurement.needs, measurement.ranks, reduced)]  # yapf: disable


def choose(args: argparse.Namespace) -> list[Measurement]:
    """Return the measurements of the command line.

    Raises:
        SystemExit: a name is unknown, or there is no GPU to measure.
    """
    measurements = in_reach(args.reduced)
    names = [measurement.name for measurement in measurements]
    if wrong := [name for name in (*args.only, *args.again) if name not in names]:
        raise SystemExit(f"unknown measurement {', '.join(wrong)}; choose from {', '.join(names)}")
    if not args.reduced and not gpus():
        raise SystemExit("no NVIDIA GPU here (nvidia-smi lists none): --reduced runs tiny shapes on the CPU")
    return [measurement for measurement in measurements if not args.only or measurement.name in args.only]


def usual_minutes(count: int) -> float:
    """Return the minutes of a call that measures all on ``count`` GPUs: several are also measured together."""
    return 42 if count > 1 else 32


def minutes(text: str) -> float:
    """Parse the minutes of a call.

    Raises:
        argparse.ArgumentTypeError: less than four; nothing but a start fits into them.
    """
    value = float(text)
    if not value >= LEAST_MINUTES:
        raise argparse.ArgumentTypeError(f"{text} is less than {LEAST_MINUTES}, in which nothing can be measured")
    return value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=minutes, metavar="N", help="end after this time, 4 or more (default: 32, "
                        "with several GPUs 42)")  # yapf: disable
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these measurements alone")
    parser.add_argument("--again", nargs="+", default=[], metavar="NAME", help="measure these again")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="packages to use that are not installed, as "
                        "wheels; they are unpacked into a temporary folder")  # yapf: disable
    parser.add_argument("--reduced", action="store_true", help="tiny shapes on the CPU, one to two minutes")
    parser.add_argument("--render", action="store_true", help="measure nothing, render the page")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of results and page (default: "
                        f"{RESULTS.relative_to(ROOT)}, {PAGE.relative_to(ROOT)})")  # yapf: disable
    parser.add_argument(
        "--models", type=Path, metavar="FOLDER", default=Path(tempfile.gettempdir()),
        help=f"{MODELS} in this folder keeps the random models (17 GB) until all is measured "
        "(default: %(default)s)")
    return parser.parse_args(argv)


@contextmanager
def interruptible() -> Iterator[None]:
    """Context in which SIGTERM does what Ctrl-C does: the running measurement is ended, and its figures are kept. A
    second signal does not disturb that."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a measurement failed, 130 if SIGINT or SIGTERM ended the call."""
    args, interrupted = parse(argv), False
    out = args.out or (ROOT / "runs" / "gpu-reduced" if args.reduced else None)
    results, page = (out / "gpu.json", out / "gpu.md") if out else (RESULTS, PAGE)
    store = Store(results)
    if not args.render:
        try:
            with interruptible(), unpacked(args.wheels):
                measure_all(args, store)
        except KeyboardInterrupt:
            interrupted = True
    records = store.read()
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(MEASUREMENTS, records), encoding="utf-8")
    print(summary(MEASUREMENTS, records))
    failed = any(record.status == "failed" for record in records.values())
    return 128 + signal.SIGINT if interrupted else int(failed)


@contextmanager
def unpacked(wheels: Path | None) -> Iterator[None]:
    """Context in which this process and the measurements import the ``wheels`` of a folder, without a network.

    Raises:
        SystemExit: there are none, or pip could not unpack them.
    """
    if wheels is None:
        yield
        return
    if not (files := sorted(map(str, wheels.glob("*.whl")))):
        raise SystemExit(f"no wheel (*.whl) in {wheels}: pip download --no-deps -d {wheels} NAME==VERSION ...")
    with tempfile.TemporaryDirectory() as site:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target"]
        if code := subprocess.run([*pip, site, *files], check=False).returncode:
            raise SystemExit(f"pip could not unpack the wheels in {wheels}: it ended with {code}")
        before, sys.path[:0] = os.environ.get("PYTHONPATH"), [site]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (site, before)))
        try:
            yield
        finally:
            sys.path.remove(site)
            os.environ["PYTHONPATH"] = before or ""


def measure_all(args: argparse.Namespace, store: Store) -> None:
    """Run the chosen measurements, and remove the random models when no other needs them."""
    chosen, models = choose(args), args.models.absolute() / MODELS
    for name in args.again:
        store.forget(name)
    left = Runner(store, models, args.reduced).run(chosen, args.minutes or usual_minutes(len(gpus())))
    if not unfinished(store, args.reduced):
        shutil.rmtree(models, ignore_errors=True)
    if left:
        print(f"left for the next call: {', '.join(left)}")
