"""Pool of killable worker processes. Each process has one thread of the trainer, which starts, feeds and kills it.

Processes are fresh interpreters (no fork of a process that runs torch threads, no import of the training script), start
with the first task, and are replaced when they time out or die.
"""
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from lightrft.rewards.timeouts import Backlog, NOT_TRIED, GroupBudget
from lightrft.rewards.base import Outcome, RewardInput
from lightrft.utils.errors import CaptureException, UserError
from lightrft.rewards.workers.worker import Info, Spec

logger = logging.getLogger(__name__)

LOAD_LIMIT_S = 120.0  # start of an interpreter and import of the user's file (which may import torch)
END_LIMIT_S = 2.0  # for an idle worker to close its event loop and end
MAX_CHUNK = 8  # responses per message, for functions that score one by one
MAX_CALL = 64  # responses per call of a function that takes lists; a larger group is one call
SHORT = 4096  # bytes of a message that fits into the pipe of a process that reads nothing
Row = tuple[RewardInput, GroupBudget]


class LoadError(UserError):
    """A worker could not load its reward."""


class NoProcessError(UserError):
    """The system gives no process for a worker."""


class WorkerDied(RuntimeError):
    """The worker process ended in the middle of a task."""


@dataclass
class Task:
    """Responses for one reward, each with its group's time budget; scored in one call (``together``) or one by one."""
    spec: Spec
    rows: list[Row]
    together: bool
    future: "Future[list[Outcome]]" = field(default_factory=Future)
    info: "Future[Info]" = field(default_factory=Future)

    def units(self) -> list[list[Row]]:
        """Return the rows in the smallest parts that may be sent: groups, or single responses. A task without rows,
        which only loads the reward, has one part."""
        if not self.together:
            return [[row] for row in self.rows]
        return [list(unit) for _, unit in groupby(self.rows, lambda row: row[0].group)] or [[]]


def start_process(module: str) -> "tuple[subprocess.Popen[bytes], Connection]":
    """Start a fresh interpreter, in a session of its own, that runs ``main(fd, parent)`` of ``module``: with its end of
    a pipe, and the id of this process. Return it, and the other end.

    Raises:
        NoProcessError: the system gives no process.
    """
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    try:
        pipe, child_end = Pipe()
        with child_end:
            code = (f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; "
                    f"main({child_end.fileno()}, {os.getpid()})")
            return subprocess.Popen([sys.executable, "-c", code], pass_fds=[child_end.fileno()],
                                    stdin=subprocess.DEVNULL, start_new_session=True, env=env), pipe
    except OSError as error:
        raise NoProcessError(
            f"a worker process cannot be started: {error.strerror}. Raise the limits on processes (ulimit -u) and open "
            "files (ulimit -n), free memory, or ask for fewer workers (--reward_workers, --env_workers)") from error


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process of :func:`start_process`, and all that it has started, at once; callable from any thread.

    Also after its end, as long as nobody has waited for it: until then its id is that of its group alone.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class Worker:
    """One worker process and its pipe."""

    def __init__(self) -> None:
        self.has_answered = False
        self.process, self.pipe = start_process("lightrft.rewards.workers.worker")

    def signal_kill(self) -> None:
        """Kill the process and its children at once; callable from any thread."""
        kill_group(self.process)

    def end(self) -> None:
        """Let the idle process close its event loop and end."""
        self.pipe.close()
        try:
            self.process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.discard()

    def discard(self) -> None:
        """Kill the process, and release its process entry and the pipe."""
        self.signal_kill()
        self.process.wait()
        self.pipe.close()

    def receive(self, limit_s: float) -> Any:
        """Return the next message. Raises ``TimeoutError`` after ``limit_s``, ``WorkerDied`` if the process ended."""
        try:
            if not self.pipe.poll(limit_s):
                raise TimeoutError
            return self.pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            self.signal_kill()  # what it has started lives on; its own exit code stays
            raise WorkerDied(f"the worker process ended with exit code {self.process.wait()}") from error

    def start(self, spec: Spec, batch: list[RewardInput], limit_s: float) -> Info:
        """Send a chunk and wait until the reward is loaded (first time only).

        Raises:
            TimeoutError: a process that has answered before did not take the chunk within ``limit_s``.
            LoadError: the reward could not be imported.
            WorkerDied: the process has ended.
        """
        self._send((spec, batch), limit_s if self.has_answered else LOAD_LIMIT_S)
        word, answer = self.receive(limit_s) if self.has_answered else self._loaded(spec)
        self.has_answered = True
        if word == "loading":
            word, answer = self._loaded(spec)
        if word == "failed":
            raise LoadError(answer)
        return answer

    def _loaded(self, spec: Spec) -> Any:
        try:
            return self.receive(LOAD_LIMIT_S)
        except TimeoutError as error:
            raise LoadError(f"{spec.path or spec.kind} was not imported within {LOAD_LIMIT_S:.0f} s") from error

    def _send(self, message: Any, limit_s: float) -> None:
        """Send a message. A process that has not read a long one after ``limit_s`` is killed: writing would block."""
        raw, timer = ForkingPickler.dumps(message), threading.Timer(limit_s, self.signal_kill)
        if len(raw) > SHORT:
            timer.start()
        try:
            self.pipe.send_bytes(raw)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WorkerDied("the worker process had ended") from error
        finally:
            timer.cancel()


class WorkerPool:
    """``count`` worker processes behind one queue; a budget gives the seconds per response (or per batch in one call).
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._backlog: Backlog[Task] = Backlog(count)
        self._threads: list[threading.Thread] = []
        self._workers: dict[int, Worker] = {}
        self._busy: set[int] = set()  # slots whose workers are at a task
        self._suspects: set[Spec] = set()  # rewards that timed out or died; their responses are sent one by one
        self._closed = False
        self._lock = threading.Lock()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that have been started."""
        return [worker.process.pid for worker in list(self._workers.values())]

    def submit(self, spec: Spec, batch: list[RewardInput], budgets: list[GroupBudget]) -> "list[Future[list[Outcome]]]":
        """Score each response on its own; return one future for each."""
        tasks = [Task(spec, [row], False) for row in zip(batch, budgets, strict=True)]
        self._put(tasks, spec)
        return [task.future for task in tasks]

    def submit_together(self, spec: Spec, batch: list[RewardInput],
                        budgets: list[GroupBudget]) -> "list[Future[list[Outcome]]]":
        """Score ``batch`` in calls that split no group; the futures hold their outcomes in order."""
        rows = iter(zip(batch, budgets, strict=True))
        sizes = calls([item.group for item in batch], min(MAX_CALL, -(-len(batch) // self.count)))
        tasks = [Task(spec, list(islice(rows, size)), True) for size in sizes]
        for task in tasks:
            self._put([task], object())
        return [task.future for task in tasks]

    def load(self, spec: Spec) -> "Future[Info]":
        """Start the workers that are not running yet; they import ``spec`` in the background."""
        tasks = [Task(spec, [], True) for _ in range(self.count)]
        for task in tasks:
            self._put([task], object())
        return tasks[0].info

    def shutdown(self) -> None:
        """End the workers, and kill busy ones. Responses that they were scoring come back unscored."""
        self._backlog.close()
        with self._lock:
            self._closed = True
        for slot, worker in list(self._workers.items()):
            if slot in self._busy:
                worker.signal_kill()
        for thread in self._threads:
            thread.join(timeout=10.0)

    def _put(self, tasks: list[Task], kind: object) -> None:
        self._backlog.put(tasks, kind)
        with self._lock:
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._run, args=(slot, ), daemon=True) for slot in range(self.count)
                ]
                for thread in self._threads:
                    thread.start()

    def _run(self, slot: int) -> None:
        while tasks := self._backlog.take(MAX_CHUNK):
            self._busy.add(slot)
            chunk = replace(tasks[0], rows=[row for task in tasks for row in task.rows])
            with CaptureException() as captured:
                outcomes = self._score(slot, chunk)
            if captured.cause is not None:
                cause = "load" if isinstance(captured.cause, LoadError) else "shutdown" if self._closed else "internal"
                outcomes = [Outcome(None, cause, captured.text)] * len(chunk.rows)
            self._busy.discard(slot)
            if not chunk.info.done():
                chunk.info.set_exception(captured.cause or RuntimeError("the reward workers have been shut down"))
            remaining = iter(outcomes)
            for task in tasks:
                task.future.set_result(list(islice(remaining, len(task.rows))))
        if slot in self._workers:
            self._workers.pop(slot).end()

    def _score(self, slot: int, task: Task) -> list[Outcome]:
        """Score a chunk. A response that times out or kills the process fails; a fresh process scores the rest.

        In a chunk of several the culprit is unknown, because outcomes are sent together. The responses without an
        outcome are sent again, one by one; those to a function of lists group by group.
        """
        done: list[Outcome] = []
        rest, alone = task.units(), task.spec in self._suspects
        while rest and not self._closed:
            if rest[0] and rest[0][0][1].deadline_s() == 0:
                done += [NOT_TRIED] * len(rest.pop(0))
                continue
            sent = rest[:1] if alone else rest
            scored, failure = self._attempt(slot, task, [row for unit in sent for row in unit])
            while rest and len(scored) >= len(rest[0]):
                count = len(rest.pop(0))
                done, scored = done + scored[:count], scored[count:]
            if failure is not None and len(sent) > 1:
                alone = True
                if not task.together:
                    self._suspects.add(task.spec)
            elif failure is not None:
                done += [failure] * len(rest.pop(0))
        return done + [Outcome(None, "shutdown")] * (len(task.rows) - len(done))

    def _attempt(self, slot: int, task: Task, sent: list[Row]) -> tuple[list[Outcome], Outcome | None]:
        """Return the outcomes that the worker sent, and its failure if it timed out or died (else None)."""
        scored: list[Outcome] = []
        worker = self._ready(slot, task, sent)
        start = time.monotonic()
        try:
            while len(scored) < len(sent):
                budget = sent[len(scored)][1]
                deadline = budget.deadline_s() or budget.reward.limit_s / 10
                outcomes = worker.receive(deadline)
                for _, budget in sent[len(scored):len(scored) + len(outcomes)]:
                    budget.answered()
                scored += outcomes
                start = time.monotonic()
            return scored, None
        except TimeoutError:
            to_blame = len(sent) == 1 and deadline >= budget.reward.limit_s  # it had all of its time
            text = f"no reward within {deadline:g} s (--reward_timeout_s){_of_call(task, sent)}"
            failure = Outcome(None, "timeout", text, fault="timeout" if to_blame else "")
            sent[len(scored)][1].timeouts += 1
        except WorkerDied as error:
            to_blame = len(sent) == 1 and not self._closed
            failure = Outcome(None, "worker_died", f"{error}{_of_call(task, sent)}",
                              fault="worker_died" if to_blame else "")
        sent[len(scored)][1].reward.lose((time.monotonic() - start) / self.count)
        self._discard(slot)
        return scored, failure

    def _ready(self, slot: int, task: Task, sent: list[Row]) -> Worker:
        """Return a worker that has loaded the reward and is scoring ``sent``; replace one that died or has stood still
        since its last task."""
        limit_s = sent[0][1].reward.limit_s if sent else LOAD_LIMIT_S
        for fresh in ([False, True] if slot in self._workers else [True]):
            worker = self._spawn(slot) if fresh else self._workers[slot]
            with CaptureException() as captured:
                info = worker.start(task.spec, [item for item, _ in sent], limit_s)
            if captured.cause is None:
                if not task.info.done():
                    task.info.set_result(info)
                return worker
            self._discard(slot)
            if isinstance(captured.cause, TimeoutError):
                logger.warning(
                    "a reward worker stood still after its last task and took no other one within %g s "
                    "(--reward_timeout_s); a new process replaces it", limit_s)
                for _, budget in sent[:1]:
                    budget.reward.lose(limit_s / self.count)
            elif not isinstance(captured.cause, WorkerDied):
                raise captured.cause
        raise LoadError(
            f"the worker process ended while it imported {task.spec.path or task.spec.kind}: {captured.cause}")

    def _spawn(self, slot: int) -> Worker:
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward workers have been shut down")
            self._workers[slot] = Worker()
            return self._workers[slot]

    def _discard(self, slot: int) -> None:
        worker = self._workers.pop(slot, None)
        if worker is not None:
            worker.discard()


def _of_call(task: Task, sent: list[Row]) -> str:
    return (f". The function takes lists, so this leaves all {len(sent)} responses of the group unscored. Remedy: a "
            "compute_score is called for each response") if task.together and len(sent) > 1 else ""


def calls(groups: Sequence[Hashable], size: int) -> list[int]:
    """Return the number of responses of each call: about ``size``, at most ``MAX_CALL`` or one group.

    Adjacent responses of equal ``groups`` stay in one call.
    """
    found, open_ = list[int](), 0
    for group in (len(list(run)) for _, run in groupby(groups)):
        if open_ and open_ + group > MAX_CALL:
            found, open_ = [*found, open_], 0
        open_ += group
        if open_ >= size:
            found, open_ = [*found, open_], 0
    return [*found, open_] if open_ else found
