"""The doctor, the tests that need a GPU, and the quickstart, each as a user runs it."""
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.catalog import DOCTOR, QUICKSTART, Setting, TESTS
from benchmarks.gpu.store import ROOT, Row, Tables

MARK = "pytest.mark.gpu"


def run(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository; its output is printed, and returned."""
    done = subprocess.run(words, cwd=ROOT, env=os.environ | (environment or {}), stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, check=False)  # yapf: disable
    print(done.stdout, flush=True)
    return done


def doctor(setting: Setting) -> Tables:
    """Run the doctor; a finding that says "fail" is a finding, not a failure of the measurement."""
    command = [sys.executable, "-m", "lightrft.cli.doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    findings = json.loads(done.stdout)["findings"]
    return {DOCTOR: [{key: str(value).replace("|", "/") for key, value in one.items() if value} for one in findings]}


def tests(setting: Setting) -> Tables:
    """Run the test files with tests marked "gpu"; the others may need packages that are not here. Without a GPU the
    reduced form collects them, and each of them is skipped.

    Raises:
        SystemExit: one of them fails, or none ran.
    """
    files = [str(path) for path in (ROOT / "lightrft").rglob("test_*.py") if MARK in path.read_text(encoding="utf-8")]
    done = run(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-rs", *files)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped)", done.stdout)}
    if done.returncode or not counts.get("skipped" if setting.reduced else "passed"):
        raise SystemExit(f"pytest ended with {done.returncode}")
    return {TESTS: [{word: counts.get(word, 0) for word in ("passed", "skipped")}]}


def quickstart(setting: Setting) -> Tables:
    """Run the quickstart in one process.

    Raises:
        SystemExit: it failed.
    """
    out = Path(setting.scratch) / "quickstart"
    flags, environment = [], {"OUT": str(out), "NPROC": "1", "PYTHON": sys.executable}
    if setting.reduced:
        flags = "--max_steps 2 --rollout_batch_size 4 --train_batch_size 32 --max_eval_samples 16".split()
        environment |= {"PREPARE_ARGS": "--train_rows 64 --test_rows 16 --sft_rows 64", "SFT_ARGS": "--max_steps 2"}
    start = time.perf_counter()
    done = run("bash", "examples/quickstart/run_quickstart.sh", *flags, environment=environment)
    if done.returncode:
        raise SystemExit(f"the quickstart ended with {done.returncode}")
    return {QUICKSTART: [curve(out) | {"all, s": time.perf_counter() - start}]}


def curve(run: Path) -> Row:
    """Return the held-out score before and after a run, and the time of its steps but the first."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    scores = [line["eval/all/pass@1"] for line in lines if "eval/all/pass@1" in line]
    steps = [line["time/step_s"] - line.get("time/eval_s", 0.0) for line in lines if "time/step_s" in line]
    mean = sum(steps[1:]) / max(len(steps) - 1, 1)
    return {"pass@1 before": scores[0], "pass@1 after": scores[-1], "steps": len(steps), "step, ms": 1e3 * mean}
