"""Two real ranks under torchrun: one dies, raises or hangs; the other says which, where, and leaves."""
import os
import re
import signal
import socket
import subprocess
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import DistNetworkError, HashStore

from lightrft.tests import support
from lightrft.tests.support.warm import warm_environ, warm_python
from lightrft.utils import watchdog
from lightrft.utils.watchdog import Watchdog

WORKER = Path(support.__file__).with_name("watchdog_rank.py")
MODES = ("fine", "exit", "async", "raise", "hang", "stop")


def launch(mode: str):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        warm_python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
        "--master-port",
        str(port),
        str(WORKER), mode
    ]
    environment = {**os.environ, **warm_environ(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


@pytest.fixture(scope="module")
def runs():
    """All modes at once (they mostly sleep): mode -> (exit code, output)."""
    processes = {mode: launch(mode) for mode in MODES}
    lines = []
    for line in processes["stop"].stdout:
        lines.append(line)
        if sum("READY" in seen for seen in lines) == 2:
            break
    processes["stop"].send_signal(signal.SIGTERM)
    results: dict = {}
    began = time.monotonic()
    for mode, process in processes.items():
        output, _ = process.communicate(timeout=120)
        results[mode] = (process.returncode, output + ("".join(lines) if mode == "stop" else ""))
    results["seconds"] = time.monotonic() - began
    return results


@pytest.mark.dist
def test_quiet_when_all_is_well(runs):
    code, output = runs["fine"]
    assert code == 0, output
    assert "rank 0 is done" in output and "rank 1 is done" in output and "Traceback" not in output, output


@pytest.mark.dist
def test_a_rank_that_dies_is_named_with_its_phase(runs):
    code, output = runs["exit"]
    assert code != 0, output
    assert "rank 1 died without a message" in output and "in phase fault" in output, output
    assert "-- rank 0 stops for that reason, in phase waiting" in output, output


@pytest.mark.dist
def test_a_rank_that_dies_is_named_by_a_wait_outside_of_torch(runs):
    """As DeepSpeed waits for what it has gathered ahead: no frame of torch.distributed is in the traceback."""
    code, output = runs["async"]
    assert code != 0 and "rank 1 died without a message" in output, output
    assert "Fatal Python error: Segmentation fault" in output and "in misbehave" in output, "no stack of the crash"
    assert "rank 0 raised" not in output and re.search("rank 0 stops for that reason, in phase waiting", output), output


@pytest.mark.dist
def test_an_exception_reaches_the_other_rank_with_its_stack(runs):
    code, output = runs["raise"]
    assert code != 0, output
    report = output[output.index("rank 1 raised ValueError: the reward of sample 17 is broken, in phase fault"):]
    assert "in misbehave" in report and "-- rank 0 stops for that reason, in phase waiting" in report, output
    assert "dist.barrier()" in report, output


@pytest.mark.dist
def test_a_hanging_rank_is_named_with_its_stack(runs):
    code, output = runs["hang"]
    assert code != 0, output
    assert "rank 1 made no progress for" in output or "rank 0 made no progress for" in output, output
    assert "in phase fault" in output and "time.sleep(100)" in output, output


@pytest.mark.dist
def test_everything_ends_within_a_minute(runs):
    assert runs["seconds"] < 60, f"{runs['seconds']:.0f} s"


@pytest.mark.dist
def test_sigterm_lets_every_rank_leave_its_loop(runs):
    _, output = runs["stop"]
    assert "rank 0 is done" in output and "rank 1 is done" in output and "stops for that reason" not in output, output


def test_one_process_needs_no_store():
    with Watchdog(0, 1, lambda: "alone", 0.0, None) as watchdog:
        time.sleep(0.01)
    assert not watchdog._thread.is_alive(), "a thread for nothing"
    with pytest.raises(ValueError, match="needs a store"):
        Watchdog(0, 2, lambda: "", 1.0, None)


class Clock:
    """A clock that the test sets."""
    now = 0.0

    def __call__(self):
        return self.now


def test_a_long_phase_that_ticks_is_progress():
    clock = Clock()
    watched = Watchdog(0, 2, lambda: "rollout", 100.0, HashStore(), clock=clock)
    assert watched._stuck() == 0.0
    clock.now = 90.0
    assert watched._stuck() == 90.0, "nothing has happened"
    watchdog.tick()
    assert watched._stuck() == 0.0
    clock.now = 150.0
    assert watched._stuck() == 60.0


@pytest.mark.parametrize("starting, limit, seconds", [(True, 15, 60), (False, 15, 15), (True, 90, 90), (False, 90, 90)])
def test_before_its_first_step_a_rank_may_be_silent_for_longer(starting, limit, seconds):
    store = HashStore()
    Watchdog(1, 2, lambda: "loading", 100.0, store, started=lambda: not starting)._beat(1, 0.0)
    watched, beat = Watchdog(0, 2, lambda: "", 100.0, store, silence_s=limit), store.get("beat/1")
    silent = [watched._is_silent(beat) for _ in range(seconds + 1)]  # the first look hears it
    assert silent == [False] * seconds + [True]
    assert not watched._is_silent(b"another"), "it speaks again"


@pytest.mark.parametrize("state, words", [
    ("stopped", r"stands still \(its process exists: .*\): silent for 15 s. --silence_timeout_s waits for longer"),
    ("killed", r"died without a message \(killed, crashed, or out of memory\)$"),
    ("elsewhere", "was silent for 15 s: it died without a message .*, or it stands still. --silence_timeout_s"),
])  # yapf: disable
def test_a_silent_rank_is_dead_only_if_its_process_is_gone(state, words, monkeypatch):
    store, child = HashStore(), subprocess.Popen(["sleep", "100"])
    with monkeypatch.context() as context:
        context.setattr(watchdog.os, "getpid", lambda: child.pid)
        context.setattr(watchdog, "process_space", lambda here=watchdog.process_space(): here +
                        (state == "elsewhere") * "2")
        Watchdog(1, 2, lambda: "forward", 100.0, store)._beat(1, 0.0)
    child.send_signal(signal.SIGKILL if state == "killed" else signal.SIGSTOP)
    if state == "killed":
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    watched = Watchdog(0, 2, lambda: "", 100.0, store)
    watched._publish_silent(1, 15.0)
    child.kill()
    child.wait()
    failure = watched._failure()
    assert failure["rank"] == 1 and failure["phase"] == "forward" and re.match(words, failure["what"]), failure


@pytest.mark.parametrize("said", ["nothing", "done", "failure"])
def test_a_rank_whose_process_has_ended_is_dead_at_the_next_look_unless_it_said_why(said, monkeypatch):
    store, child = HashStore(), subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    other, watched = (Watchdog(rank, 2, lambda: "forward", 100.0, store) for rank in (1, 0))
    with monkeypatch.context() as context:
        context.setattr(watchdog.os, "getpid", lambda: child.pid)
        other._beat(1, 0.0)
    assert not watched._is_gone(1)
    if said == "done":
        other._stop.set()
        other._thread = SimpleNamespace(join=lambda: None)  # it was not started
        other._end()
    elif said == "failure":
        other._publish(1, "raised", "")
    child.communicate()
    assert watched._is_gone(1) == (said == "nothing")


def raised(error, file):
    """The error and its traceback, which ends in ``file``."""
    try:
        exec(compile("raise error", file, "exec"), {"error": error})
    except Exception as caught:
        return caught, "".join(traceback.format_exception(caught))


@pytest.mark.parametrize("error, file, blamed", [
    (ValueError("no"), "torch/distributed/distributed_c10d.py", True),
    (ValueError("no"), "deepspeed/runtime/zero/partition_parameters.py", True),
    (DistNetworkError("recvValue failed"), "a.py", True),
    (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1"), "a.py", True),
    (RuntimeError("Read error [127.0.0.1]:1: Connection reset by peer"), "a.py", True),
    (RuntimeError("NCCL error: remote process exited"), "a.py", True),
    (RuntimeError("index out of range"), "a.py", False),
    (ConnectionResetError("Connection reset by peer"), "lightrft/rewards/remote.py", False),
    (ValueError("no"), "lightrft/datasets/rows.py", False),
])  # yapf: disable
def test_a_silent_rank_is_blamed_for_errors_of_collectives_alone(error, file, blamed, monkeypatch):
    """A rank that loads a library is silent too, and is not why another one cannot read its data."""
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.0)
    store = HashStore()
    Watchdog(1, 2, lambda: "loading", 100.0, store, started=lambda: False)._beat(1, 0.0)
    first = Watchdog(0, 2, lambda: "", 100.0, store)._cause_elsewhere(*raised(error, file))
    assert (first is not None and first["rank"] == 1) == blamed


SIGNALS = """
import os, signal, sys, time
from lightrft.utils import watchdog
watchdog.install_signal_handlers()
assert not watchdog.stop_requested() and watchdog.stop_exit_code() == 0, "asked too early"
number = getattr(signal, sys.argv[1])
os.kill(os.getpid(), number)
assert watchdog.stop_requested(), "not asked"
os.kill(os.getpid(), number)  # torchrun's echo
if sys.argv[2] == "again":
    time.sleep(2.1)
    os.kill(os.getpid(), number)
sys.exit(watchdog.stop_exit_code())
"""

CODES = {("SIGTERM", ""): 143, ("SIGINT", ""): 130, ("SIGTERM", "again"): 143, ("SIGINT", "again"): -2}


@pytest.fixture(name="signalled", scope="module")
def fixture_signalled(tmp_path_factory):
    """The program with each signal, all at once."""
    program = tmp_path_factory.mktemp("signals") / "signals.py"
    program.write_text(SIGNALS, encoding="utf-8")
    return {words: subprocess.Popen([warm_python(), program, *words], stderr=subprocess.PIPE, text=True,
                                    env=os.environ | warm_environ()) for words in CODES}  # yapf: disable


@pytest.mark.parametrize("name,again", CODES)
def test_signals_ask_first_and_a_second_interrupt_aborts(name, again, signalled):
    code, run = CODES[name, again], signalled[name, again]
    said = run.communicate(timeout=60)[1]
    assert run.returncode == code, said
    assert ("KeyboardInterrupt" in said) == (code == -2), said


def test_a_stop_that_comes_when_the_work_is_complete_is_no_failure(monkeypatch):
    monkeypatch.setattr(watchdog._Stop, "received", 15)
    assert watchdog.stop_requested() and watchdog.stop_exit_code() == 143
    watchdog.clear_stop_request()
    assert not watchdog.stop_requested() and watchdog.stop_exit_code() == 0
