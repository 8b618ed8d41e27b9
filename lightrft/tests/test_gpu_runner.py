"""The runner of ``make gpu`` and its page: a call of any length, what fails or hangs, and what a second call does."""
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import lightrft

ROOT = Path(lightrft.__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="installed without its repository")
if (ROOT / "benchmarks").exists():
    sys.path.append(str(ROOT))
    from benchmarks.gpu import process as gpu_process
    from benchmarks.gpu import runner as gpu_runner
    from benchmarks.gpu.catalog import Measurement, MEASUREMENTS
    from benchmarks.gpu.page import INTROS, MOST, render, summary
    from benchmarks.gpu.runner import PAGE, RESULTS, Runner
    from benchmarks.gpu.store import Record, Store

GRACE_S = 2.0  # what is deaf to SIGTERM is waited for
GOOD, BAD, HANGING = (f"lightrft.tests.support.gpu_measurements:{name}" for name in ("good", "bad", "hanging"))


def planned(name, function=GOOD, seconds=60, **options):
    return Measurement(name, function, ("Doctor", ), seconds, **options)


def runner(folder, **options):
    (folder / "models").mkdir(parents=True, exist_ok=True)
    return Runner(Store(folder / "out.json"), folder / "models", reduced=True, **options)


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split(")")[1].split()[0] == "Z"


def nothing_is_left(folder):
    """Of a measurement that hung, whose ranks have left the numbers of their processes in ``folder``."""
    files = list(folder.glob("pids-*"))
    pids = [int(pid) for file in files for pid in file.read_text(encoding="utf-8").split()]
    assert (folder / "cleaned").exists() == ("pids-0" in [file.name for file in files])
    assert [pid for pid in pids if not gone(pid)] == [], "a process outlived its measurement"


@pytest.fixture(name="recorded", scope="module")
def fixture_recorded(tmp_path_factory):
    """A call with measurements that fail, hang and are good, in a thread: its limit passes beside other tests."""
    run = runner(tmp_path_factory.mktemp("recorded"))
    chosen = [planned("bad", BAD), planned("hanging", HANGING, 8, ranks=2), planned("good", ranks=2)]

    def call():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu_process, "GRACE_S", GRACE_S)
            return run.run(chosen, minutes=30)

    with ThreadPoolExecutor(1) as thread:
        yield run, chosen, thread.submit(call)


INTERRUPTED = """
import sys
from pathlib import Path
from benchmarks.gpu import process, runner
from benchmarks.gpu.catalog import Measurement
process.GRACE_S = float(sys.argv[2])
runner.MEASUREMENTS = [Measurement(name, "lightrft.tests.support.gpu_measurements:hanging", ("Doctor", ), 60)
                       for name in ("first", "second")]
sys.exit(runner.main(["--reduced", "--out", sys.argv[1], "--models", sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_call_and_its_measurement(number, tmp_path, recorded):
    """Nothing trains on, what the measurement had is stored and printed, and no other starts."""
    (tmp_path / "lightrft-random-models").mkdir()
    run = subprocess.Popen([sys.executable, "-c", INTERRUPTED,
                            str(tmp_path), str(GRACE_S)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                           env=os.environ | {"PYTHONPATH": str(ROOT)})
    while not (tmp_path / "lightrft-random-models" / "pids-0").exists() and run.poll() is None:
        time.sleep(0.05)
    run.send_signal(number)
    printed = run.communicate(timeout=60)[0]
    assert run.returncode == 130, printed
    nothing_is_left(tmp_path / "lightrft-random-models")
    record, = Store(tmp_path / "gpu.json").read().values()
    assert (record.name, record.status, record.error.splitlines()[0]) == ("first", "cut", "interrupted")
    assert "| `first` | 0.5b | True |" in printed and "second" not in printed
    assert "- `first`: ended with the call" in render([planned("first")], {"first": record})


def test_what_fails_or_hangs_is_recorded_and_the_rest_runs(recorded):
    run, chosen, left = recorded
    assert left.result() == []
    records = run.store.read()
    assert {name: record.status
            for name, record in records.items()} == {"bad": "failed", "hanging": "failed", "good": "ok"}
    assert "RuntimeError: out of everything" in records["bad"].error and records["bad"].error.startswith("exit code 1")
    assert records["hanging"].error.startswith("ended after 16 s") and "\nrank 1 hangs" in records["hanging"].error
    assert records["hanging"].seconds < 60
    assert all(record.tables == {"Doctor": [{"size": "0.5b", "reduced": True}]} for record in records.values())
    nothing_is_left(run.models)
    page = render(chosen, records)
    assert "RuntimeError: out of everything" in page and "- `bad`: failed" in page and "| `good` | 0.5b |" in page


def test_a_second_call_runs_what_has_no_result(tmp_path, monkeypatch):
    run, ran = runner(tmp_path), []

    def measure(one, seconds):
        ran.append(one.name)
        return keep(run, Record(one.name, {"b": "failed", "d": "cut"}.get(one.name, "ok")))

    monkeypatch.setattr(run, "measure", measure)
    chosen = [planned("a"), planned("b"), planned("c", needs=("not_a_package", )), planned("d")]
    assert run.run(chosen, minutes=30) == ["d"] == run.run(chosen, minutes=30)
    assert ran == ["a", "b", "d", "d"] and "c" not in run.store.read()
    run.run([*chosen[:2], replace(chosen[2], needs=())], minutes=30)
    assert ran[4:] == ["c"], "the reason is gone"


def keep(run, record):
    run.store.write(record)
    return record


def test_the_models_stay_until_all_is_measured(tmp_path, monkeypatch):
    """And nothing else in the folder of the user is removed."""
    monkeypatch.setattr(Runner, "measure",
                        lambda self, one, seconds: keep(self, Record(one.name, "ok", machine={"device": "CPU"})))
    own, models = tmp_path / "models" / "mine", tmp_path / "models" / gpu_runner.MODELS / "7b"
    for folder in (own, models):
        folder.mkdir(parents=True)
    command = ["--reduced", "--out", str(tmp_path / "out"), "--models", str(tmp_path / "models")]
    gpu_runner.main([*command, "--only", "doctor"])
    assert models.exists(), "the next piece needs it"
    gpu_runner.main(command)
    assert own.exists() and not models.parent.exists(), "17 GB would stay"


@pytest.mark.parametrize("slower", [0.7, 1, 1.5, 1.9])
def test_a_short_stay_ends_in_its_time_and_begins_with_what_is_worth_most(slower, tmp_path, monkeypatch):
    """For any minutes from four on: each gets what is left of the clock, and the next call goes on."""
    now = [0.0]
    run = runner(tmp_path, clock=lambda: now[0])

    def measure(one, seconds):
        took = min(slower * one.seconds, seconds)
        now[0] += took + gpu_process.GRACE_S
        return keep(run, Record(one.name, "ok" if took < seconds else "cut"))

    monkeypatch.setattr(run, "measure", measure)
    there = [
        replace(one, needs=()) for one in MEASUREMENTS if one.ranks == 1 and not {"vllm", "sglang"} & set(one.needs)
    ]
    kept, left = {}, [""]
    for minutes in (4, 7.5, 40):
        start = now[0]
        left = run.run(there, minutes)
        assert now[0] - start <= 60 * minutes
        kept[minutes] = len(run.store.done())
    names = [one.name for one in there]
    assert list(run.store.read()) == names and names[0] == "run-hf-0.5b" and names[2] == "update-7b"
    assert kept[4] >= 1 and kept[7.5] >= 3 and left == []


def test_one_gpu_takes_the_minutes_that_the_page_says(tmp_path, monkeypatch):
    """With SGLang, by the runner's own rule, if each takes two seconds more than planned. The engines need different
    environments, so each has a call. With a second GPU a call takes ten minutes more."""
    now, usual = [0.0], gpu_runner.usual_minutes(1)

    def measure(self, one, seconds):
        now[0] += min(one.seconds + 2, seconds)
        return keep(self, Record(one.name, "ok" if one.seconds + 2 < seconds else "cut"))

    monkeypatch.setattr(Runner, "measure", measure)

    def left(gpus, minutes, calls=1, without="sglang"):
        run = runner(tmp_path / f"{gpus}-{usual if gpus == 1 else minutes}-{calls}", clock=lambda: now[0])
        chosen = [
            replace(one, needs=(), ranks=1) for one in MEASUREMENTS if without not in one.needs and one.ranks <= gpus
        ]
        return [run.run(chosen, minutes) for _ in range(calls)][-1]

    assert left(1, usual) == [] and left(1, 9, without="vllm") == []
    first_call = sum(one.seconds + 2 for one in MEASUREMENTS if one.ranks == 1 and "sglang" not in one.needs)
    second_call = now[0] - first_call
    assert 0 < second_call <= 4 * 60 and now[0] <= 60 * usual, "the page says so"
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"planned to take {usual} minutes on one GPU, and {gpu_runner.usual_minutes(2)} with a second one" in page
    assert {one.name for one in MEASUREMENTS
            if one.ranks == 1} == set(Store(tmp_path / f"1-{usual}-1" / "out.json").read())
    both = left(2, usual), left(2, usual, calls=2), left(2, gpu_runner.usual_minutes(2))
    assert both[0] != [] and both[1:] == ([], []), "the page says so"


def test_the_page_shows_the_stored_results():
    assert PAGE.read_text(encoding="utf-8") == render(MEASUREMENTS,
                                                      Store(RESULTS).read()), ("run: python -m benchmarks.gpu --render")


def test_wheels_are_imported_by_this_process_and_by_measurements(tmp_path):
    """As on a machine without a network; the folder without a wheel is an error that says how to get them."""
    with pytest.raises(SystemExit, match="no wheel .* pip download"), gpu_runner.unpacked(tmp_path):
        pass
    info = "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n"
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "")
        wheel.writestr("carried-1.0.dist-info/METADATA", info)
        wheel.writestr("carried-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("carried-1.0.dist-info/RECORD", "")
    child = [sys.executable, "-c", "import carried"]
    with gpu_runner.unpacked(tmp_path):
        assert find_spec("carried") and subprocess.run(child, check=False).returncode == 0
    assert not find_spec("carried") and subprocess.run(child, check=False, capture_output=True).returncode == 1


def test_the_line_of_a_short_stay_keeps_its_files_and_copies_them(tmp_path):
    """As docs/gpu.md prints it, in a folder like the repository; here it only renders what an earlier call measured."""
    line, = re.findall(r"^python3 -m benchmarks\.gpu .*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(line) < 1900
    Store(tmp_path / "runs" / "gpu" /
          "gpu.json").write(Record("doctor", "ok", {"Doctor": [{"verdict": "fine"}]}, machine={"device": "H200"}))
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@" --render\n', encoding="utf-8")
    python.chmod(0o755)
    environment = os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for out in ("", str(tmp_path / "out")):
        (tmp_path / "out").mkdir(exist_ok=True)
        run = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment | {"OUT": out}, capture_output=True,
                             text=True, check=True, timeout=60)
        assert "| `doctor` | fine |" in run.stdout
        files = ["gpu.json", "gpu.md"]
        assert sorted(file.name for file in (tmp_path / "runs" / "gpu").iterdir()) == files
        assert sorted(file.name for file in (tmp_path / "out").iterdir()) == (files if out else [])


def test_the_summary_is_short_and_begins_with_figures():
    """Even if everything fails with long lines, and the tables are long."""
    rows = {title: [{"number": float(number), "words": "w" * 90} for number in range(9)] for title in INTROS}
    records = {one.name: Record(one.name, "failed", {title: rows[title] for title in one.tables},
                                "exit code 1\n" + "\n".join(f"{number} {'x' * 999}" for number in range(25)))
               for one in MEASUREMENTS}  # yapf: disable
    text = summary(MEASUREMENTS, records)
    assert len(text) <= MOST and text.startswith("Step-1 facts") and text.endswith(f"{len(records)} failed, 0 cut")
    assert "\nrun-hf-0.5b: failed, exit code 1\n" in text and "\n24 xxx" in text and "\n12 xxx" not in text
    assert "| `run-hf-0.5b` | 8 |" in text and summary(MEASUREMENTS, {}).strip() == "0 ok, 0 failed, 0 cut"


def test_a_prediction_is_beside_its_measurement():
    rows = [{"tokens per rank": 4096, "s": 1.0}, {"tokens per rank": 16384, "s": 1.5}]
    page = render(MEASUREMENTS, {"update-7b": Record("update-7b", "cut", {"Update": rows}, machine={"device": "GPU"})})
    assert "| `update-7b` | s | 1.12 | 1.5 |" in page and "| `update-0.5b` | s | 0.219 | - |" in page


def test_the_page_names_the_machines():
    h100 = {"device": "1 x NVIDIA H100, 81559 MiB", "driver": "580.1", "torch": "2.11.0"}
    rows = {"Doctor": [{"verdict": "ok", "number": 0.01234}]}
    page = render(MEASUREMENTS, {"doctor": Record("doctor", "ok", rows, machine=h100)})
    assert "- 1 x NVIDIA H100, 81559 MiB; driver 580.1, torch 2.11.0: `doctor`" in page
    assert "| `doctor` | ok | 0.0123 |" in page and "- `tests`: not run yet" in page and "Nothing" not in page


def test_without_a_gpu_nothing_is_stored(monkeypatch):
    monkeypatch.setattr(gpu_runner, "gpus", lambda: ())
    with pytest.raises(SystemExit, match="no NVIDIA GPU here"):
        gpu_runner.main([])
    with pytest.raises(SystemExit, match="unknown measurement doctr"):
        gpu_runner.main(["--reduced", "--only", "doctr"])
