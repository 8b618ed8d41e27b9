"""The doctor, the tests that need a GPU, and the quickstart, each as a user runs it."""
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.gpu.catalog import DOCTOR, QUICKSTART, Setting, TESTS
from benchmarks.gpu.store import ROOT, Row, Tables

MARK = "pytest.mark.gpu"
POLL_S = 2.0


def start(*words: str, environment: dict[str, str] | None = None, stdout: int | None = None) -> subprocess.Popen[str]:
    """Start a command in the repository."""
    return subprocess.Popen(words, cwd=ROOT, env=os.environ | (environment or {}), stdout=stdout, text=True)


def doctor(setting: Setting) -> Iterator[Tables]:
    """Run the doctor; a finding that says "fail" is a finding, not a failure of the measurement."""
    command = [sys.executable, "-m", "lightrft.cli.doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    findings = json.loads(done.stdout)["findings"]
    yield {DOCTOR: [{key: str(value).replace("|", "/") for key, value in one.items() if value} for one in findings]}


def tests(setting: Setting) -> Iterator[Tables]:
    """Run the test files with tests marked "gpu"; the others may need packages that are not here. Without a GPU the
    reduced form collects them, and each of them is skipped.

    Raises:
        SystemExit: one of them fails, or none ran.
    """
    files = [str(path) for path in (ROOT / "lightrft").rglob("test_*.py") if MARK in path.read_text(encoding="utf-8")]
    counts: Counter[str] = Counter()
    with start(sys.executable, "-u", "-m", "pytest", "-v", "-m", "gpu", "-rs", *files,
               stdout=subprocess.PIPE) as pytest:
        for line in pytest.stdout or ():
            print(line, end="", flush=True)
            if outcome := re.match(r"\S+::.* (PASSED|FAILED|ERROR|SKIPPED)\b", line):
                counts[outcome[1].lower()] += 1
                yield {TESTS: [dict(counts)]}
    if pytest.returncode or not counts["skipped" if setting.reduced else "passed"]:
        raise SystemExit(f"pytest ended with {pytest.returncode}")


def quickstart(setting: Setting) -> Iterator[Tables]:
    """Run the quickstart in one process.

    Raises:
        SystemExit: it failed.
    """
    out = Path(setting.scratch) / "quickstart"
    flags, environment = [], {"OUT": str(out), "NPROC": "1", "PYTHON": sys.executable}
    if setting.reduced:
        flags = "--max_steps 2 --rollout_batch_size 4 --train_batch_size 32 --max_eval_samples 16".split()
        environment |= {"PREPARE_ARGS": "--train_rows 64 --test_rows 16 --sft_rows 64", "SFT_ARGS": "--max_steps 2"}
    began = time.perf_counter()
    run = start("bash", "examples/quickstart/run_quickstart.sh", *flags, environment=environment)
    ended = False
    while not ended:
        with suppress(subprocess.TimeoutExpired):
            ended = run.wait(POLL_S) is not None
        yield {QUICKSTART: [curve(out) | {"all, s": time.perf_counter() - began}]}
    if run.returncode:
        raise SystemExit(f"the quickstart ended with {run.returncode}")


def curve(run: Path) -> Row:
    """Return the held-out score before and after a run so far, and the time of its steps but the first."""
    file = run / "metrics.jsonl"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    scores = [line["eval/all/pass@1"] for line in lines if "eval/all/pass@1" in line] or [None]
    steps = [line["time/step_s"] - line.get("time/eval_s", 0.0) for line in lines if "time/step_s" in line]
    mean = 1e3 * sum(steps[1:]) / (len(steps) - 1) if len(steps) > 1 else None
    return {"pass@1 before": scores[0], "pass@1 after": scores[-1], "steps": len(steps), "step, ms": mean}
