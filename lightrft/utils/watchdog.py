"""Watchdog of the ranks: if one dies, raises or hangs, the others report it, its phase and its stack, and exit."""
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from types import FrameType, TracebackType
from typing import Any, Protocol

from lightrft.utils.env import World, process_space
from lightrft.utils.errors import ExpectedError, leave_error
from lightrft.utils.logging import get_logger

BEAT_S = 1.0
SILENCE_S = 15.0
START_SILENCE_S = 60.0  # until the first step: a large library may hold the interpreter while it loads
EXIT_CODE = 1
_GRACE_S = 3.0
_LAST_SECONDS = 20
_SECOND_SIGNAL_S = 2.0
_RANK_0_FIRST_S = 10.0
_COLLECTIVES = tuple(os.path.join(*folders, "") for folders in (("torch", "distributed"), ("deepspeed", )))
# of errors that a wait for an asynchronous collective raises, which need not come from one of those folders
_LOST_PEER = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
_FINE_CODES = (None, 0, 128 + signal.SIGINT, 128 + signal.SIGTERM)
_RUNS = count()  # in this process
_DIED = "died without a message (killed, crashed, or out of memory)"
_STANDS = "stands still (its process exists: stopped, swapped out, or in a library that holds the interpreter)"
_PATIENCE = "--silence_timeout_s waits for longer"
_LOST = "the watchdog's store is gone: the rank or agent that hosts it has died"


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str) -> None:
        """Write a key."""

    def get(self, key: str) -> bytes:
        """Read a key."""

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys exist."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""


class Progress:
    """Progress of this process: ``ticks`` counts the calls of :func:`tick`."""
    ticks: int = 0


def tick() -> None:
    """Report progress within a phase, such as one more token of every sequence; cheap enough for any loop."""
    Progress.ticks += 1


def connect_store(world: World) -> Store | None:
    """Open a separate connection to the store at MASTER_ADDR:MASTER_PORT (a blocked collective does not block it).

    Call this when the process group exists. Returns None for one process.
    """
    if world.world_size == 1:
        return None
    from datetime import timedelta

    from torch.distributed import PrefixStore, TCPStore
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world.world_size, False,
                     timedelta(seconds=60), wait_for_workers=False)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"lightrft/watchdog/{restarts}/{next(_RUNS)}", store)


def main_stack() -> str:
    """Format the current stack of the main thread, innermost call last."""
    identity = threading.main_thread().ident
    frame = sys._current_frames().get(identity) if identity is not None else None
    return "".join(traceback.format_stack(frame)) if frame is not None else "(no Python frame)\n"


def _is_near(beat: dict[str, Any]) -> bool:
    """Return True if the process number of a rank's ``beat`` means the same process here."""
    return beat.get("space") == process_space()


def _runs(pid: int) -> bool:
    """Return True for a process of this machine that has not ended; one that nobody has waited for (a zombie) has."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or no Linux
        return True


def _in_collective(stack: str) -> bool:
    """Return True if a stack leads into torch's or DeepSpeed's communication."""
    return any(folder in stack for folder in _COLLECTIVES)


def _of_collective(error: Exception, text: str) -> bool:
    """Return True if an error with the traceback ``text`` may come from ranks that cannot reach each other."""
    from torch.distributed import DistError
    lost = isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_PEER)
    return lost or isinstance(error, DistError) or _in_collective(text)


class Watchdog:
    """Watches the other ranks from a thread, through a store; ``with Watchdog(...):`` around the whole run.

    Every second a rank writes its phase; rank r reads rank r + 1 and the list of failures. A rank that raised, whose
    process is gone (seen on its own machine), that was in one phase for longer than ``timeout_s`` without a
    :func:`tick`, or that wrote nothing for ``silence_s`` (before its first step at least :data:`START_SILENCE_S`) is a
    failure: every rank prints it with the phases and stacks that are known and exits with code 1. One process needs no
    store and no thread.
    An :class:`ExpectedError` is reported once (by the rank with ``speaks``; rank 0 is first); others exit quietly.

    Args:
        phase: returns the phase of this rank, e.g. ``timer.phase``; called in another thread. A new value is progress.
        timeout_s: most seconds in one phase without a tick.
        store: of :func:`connect_store`; None only with one process.
        started: returns whether this rank has ended its first step; called in another thread.
        silence_s: most seconds in which a rank writes nothing.
        clock: seconds, monotonic.
    """

    def __init__(self, rank: int, world_size: int, phase: Callable[[], str], timeout_s: float, store: Store | None,
                 started: Callable[[], bool] = lambda: True, clock: Callable[[], float] = time.monotonic,
                 silence_s: float = SILENCE_S) -> None:
        if world_size > 1 and store is None:
            raise ValueError(f"a watchdog over {world_size} ranks needs a store (connect_store)")
        self.rank, self.world_size, self.phase = rank, world_size, phase
        self.timeout_s, self.silence_s = timeout_s, silence_s
        self._store: Any = store
        self._started, self._clock = started, clock
        self._progress, self._since = ("", 0), clock()
        self._seen, self._silence = b"", 0.0
        self.speaks = True
        self._reporting = False
        self._stop = threading.Event()
        self._leaving = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="lightrft-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        show_crashes()
        if self.world_size > 1:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 stack: TracebackType | None) -> None:
        if self.world_size == 1:
            return
        if error is None or (isinstance(error, SystemExit) and error.code in _FINE_CODES):
            self._end()
        else:
            self.report_exception(error)

    def _end(self) -> None:
        """Mark this rank as done, so that it is no longer watched."""
        self._stop.set()
        self._thread.join()
        try:
            self._store.set(f"beat/{self.rank}", json.dumps({"done": True}))
        except RuntimeError:
            get_logger().debug("the store ended before this rank's watchdog")

    def report_exception(self, error: BaseException) -> None:
        """Publish an error of this rank; if another rank failed before it, log that. The caller re-raises the error.

        The process has 20 more seconds to end, even if a destructor hangs.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_LAST_SECONDS)
        text, self._reporting = "".join(traceback.format_exception(error)), True
        with self._leaving:  # the thread keeps beating, but must not end the process before the traceback is out
            try:
                if isinstance(error, ExpectedError):
                    self._announce(error)
                    return
                first = self._cause_elsewhere(error, text) if isinstance(error, Exception) else None
                if first is not None and "exit_code" in first:
                    self._quit(first)
                if first is None:
                    self._publish(self.rank, f"raised {type(error).__name__}: {error}", text)
                else:
                    get_logger().error(self._explain(first, f"it raised {type(error).__name__}: {error}"))
            except RuntimeError as lost:
                get_logger().error(f"{_LOST} ({lost})")
            finally:
                self._stop.set()

    def _announce(self, error: ExpectedError) -> None:
        """Publish an expected error; one that another rank has already reported is not repeated."""
        text, deadline = f"stopped the run: {error}", time.monotonic() + (_RANK_0_FIRST_S if self.rank else 0.0)
        while self._failure() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        first = self._failure()
        if first is None:
            self._publish(self.rank, text, "", error.exit_code)
        self.speaks = first is None or first["what"] != text

    def _quit(self, failure: dict[str, Any]) -> None:
        """End this process for an expected error that another rank has reported; rank 0 repeats it."""
        text = f"rank {failure['rank']} {failure['what']}, in phase {failure['phase']}"
        if not leave_error(text, False, stop_requested) and self.rank == 0:
            get_logger().error(text)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure["exit_code"])

    def _cause_elsewhere(self, error: Exception, text: str) -> dict[str, Any] | None:
        """Failure of another rank before this one raised: a published one, or, of an error with the traceback ``text``
        that came out of a collective, its end, or silence for three seconds. Else it may just be loading a library."""
        if _of_collective(error, text) and self._failure() is None:
            if (dead := self._dead_peers()) and self._failure() is None:
                self._publish_silent(dead[0], _GRACE_S)
        return self._failure()

    # -- the thread ---------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        """Beat, watch the neighbour, look for failures, once a second."""
        neighbour, count = (self.rank + 1) % self.world_size, 0
        while not self._stop.wait(BEAT_S):
            count += 1
            stuck = self._stuck()
            try:
                self._beat(count, stuck)
                if stuck > self.timeout_s and not self._reporting:
                    self._publish_stuck(stuck)
                if self._is_silent(self._read(f"beat/{neighbour}")) or self._is_gone(neighbour):
                    self._publish_silent(neighbour, self._silence)
                failure = self._failure()
            except RuntimeError as lost:
                failure = {"rank": "?", "what": f"-- {_LOST} ({lost})", "phase": "unknown", "stack": ""}
            if failure is not None:
                self._leave(failure, self._explain(failure, f"its stack:\n{main_stack()}"))

    def _stuck(self) -> float:
        """Return the seconds since the phase of this rank changed, or it ticked."""
        progress = self.phase(), Progress.ticks
        if progress != self._progress:
            self._progress, self._since = progress, self._clock()
        return self._clock() - self._since

    def _is_silent(self, beat: bytes) -> bool:
        """Return whether the neighbour, whose newest ``beat`` this is, has been silent for too long."""
        same = beat == self._seen and beat and b"done" not in beat
        self._seen, self._silence = beat, self._silence + BEAT_S if same else 0.0
        return self._silence >= (max(START_SILENCE_S, self.silence_s) if b"starting" in beat else self.silence_s)

    def _is_gone(self, rank: int) -> bool:
        """Return True for a rank of this machine whose process has ended without a last word. Whatever a process writes
        is there when it has ended, so it is read after the look at the process."""
        beat = self._read(f"beat/{rank}")
        known = json.loads(beat or b"{}")
        ended = "pid" in known and _is_near(known) and not _runs(known["pid"])
        return ended and self._read(f"beat/{rank}") == beat and self._failure() is None

    def _beat(self, count: int, stuck: float) -> None:
        value: dict[str, Any] = {"count": count, "phase": self.phase(), "seconds": round(stuck)}
        value |= {"space": process_space(), "pid": os.getpid()}
        value |= {} if self._started() else {"starting": True}
        self._store.set(f"beat/{self.rank}", json.dumps(value))

    def _read(self, key: str) -> bytes:
        return self._store.get(key) if self._store.check([key]) else b""

    def _publish(self, rank: int, what: str, stack: str, exit_code: int | None = None) -> dict[str, Any]:
        """Add a failure to the common list and return it."""
        beat = json.loads(self._read(f"beat/{rank}") or b"{}")
        phase = self.phase() if rank == self.rank else beat.get("phase", "unknown")
        failure = {"rank": rank, "what": what, "phase": phase, "stack": stack}
        failure |= {} if exit_code is None else {"exit_code": exit_code}
        self._store.set(f"failure/{self._store.add('failures', 1)}", json.dumps(failure))
        return failure

    def _publish_stuck(self, seconds: float) -> None:
        """Publish that this rank makes no progress. A rank in a collective waits, so that others can report first."""
        stack = main_stack()
        if seconds > self.timeout_s + (_GRACE_S if _in_collective(stack) else 0.0):
            self._publish(self.rank, f"made no progress for {seconds:.0f} s", stack)

    def _publish_silent(self, rank: int, seconds: float) -> None:
        """Publish that a rank wrote nothing for ``seconds``: it died, stands still, or, on another machine, either."""
        beat = json.loads(self._read(f"beat/{rank}") or b"{}")
        if not _is_near(beat):
            what = f"was silent for {seconds:.0f} s: it {_DIED}, or it stands still. {_PATIENCE}"
        else:
            what = f"{_STANDS}: silent for {seconds:.0f} s. {_PATIENCE}" if _runs(beat["pid"]) else _DIED
        self._publish(rank, what, "")

    def _failure(self) -> dict[str, Any] | None:
        """The earliest failure that any rank published."""
        first = self._read("failure/1")
        return json.loads(first) if first else None

    def _dead_peers(self) -> list[int]:
        """Ranks that beat once and are gone, or do not beat within the next three seconds; none matters once a failure
        is known."""
        before = {rank: self._read(f"beat/{rank}") for rank in range(self.world_size) if rank != self.rank}
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and self._failure() is None:
            if gone := [rank for rank in before if self._is_gone(rank)]:
                return gone
            time.sleep(0.1)
        return [
            rank for rank, beat in before.items() if beat and b"done" not in beat and self._read(f"beat/{rank}") == beat
        ]

    def _explain(self, failure: dict[str, Any], own: str) -> str:
        stack = f"\n{failure['stack'].rstrip()}" if failure["stack"] else " (its stack is unknown)"
        return (f"rank {failure['rank']} {failure['what']}, in phase {failure['phase']}{stack}\n"
                f"-- rank {self.rank} stops for that reason, in phase {self.phase()}; {own}")

    def _leave(self, failure: dict[str, Any], text: str) -> None:
        """Log the reason and end the process, whatever the main thread is blocked in."""
        with self._leaving:
            if self._stop.is_set():
                return
            if "exit_code" in failure:
                self._quit(failure)
            get_logger().error(text)
            for child in multiprocessing.active_children():
                child.terminate()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_CODE)


class _Stop:
    """The signal that asked this process to stop, if any."""
    received: int = 0
    at: float = 0.0


def show_crashes() -> None:
    """Let a crash in native code print the Python stack of every thread; else its signal alone would be reported."""
    with suppress(AttributeError, OSError, RuntimeError):  # a program without an error output, or one that is no file
        if not faulthandler.is_enabled():
            faulthandler.enable()


@contextmanager
def signal_handlers() -> Iterator[None]:
    """Run a block with :func:`install_signal_handlers`, where Python allows it: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    install_signal_handlers()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def install_signal_handlers() -> None:
    """Turn SIGTERM and Ctrl-C into a request: :func:`stop_requested` becomes true, the trainer saves and exits.

    A second Ctrl-C (two seconds later or more: torchrun repeats the first) raises ``KeyboardInterrupt``. Note that
    torchrun kills its workers ``--shutdown-timeout`` (30) seconds after it was asked to stop.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if _Stop.received and number == signal.SIGINT and now - _Stop.at > _SECOND_SIGNAL_S:
            raise KeyboardInterrupt
        if not _Stop.received:
            _Stop.received, _Stop.at = number, now

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)


def stop_requested() -> bool:
    """Return True if SIGTERM or Ctrl-C has arrived. Ranks differ for a moment: decide with ``strategy.any_rank``."""
    return _Stop.received != 0


def clear_stop_request() -> None:
    """Clear the request when the work is complete: one that came too late to change anything is no failure."""
    _Stop.received = 0


def stop_exit_code() -> int:
    """Return 0 without a request, else 128 + signal (143 SIGTERM, 130 Ctrl-C): the run is saved but not complete."""
    return 128 + _Stop.received if _Stop.received else 0
