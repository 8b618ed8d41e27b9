"""Killable processes in which environments run. Nobody waits for them: a call returns a future at once."""
import json
import logging
import queue
import threading
import time
import weakref
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import count
from multiprocessing.reduction import ForkingPickler
from typing import Any

from lightrft.environments.base import EnvironmentSpec, Failure, Info, Step, Task, Turn
from lightrft.environments.observations import MAX_SHOWN_BYTES
from lightrft.rewards.workers.pool import kill_group, NoProcessError, start_process
from lightrft.utils.errors import UserError

logger = logging.getLogger(__name__)

Answer = Step | Failure
LOAD_LIMIT_S = 120.0  # start of an interpreter and import of the user's file
GRACE_S = 5.0  # beyond the limit of a call, which the worker keeps itself unless its loop stands still
_MOST_BYTES = (2 << 20) + MAX_SHOWN_BYTES  # of a message; the worker refuses larger answers itself
_LOOK_S = 0.2  # between two looks at deadlines
_CLOSE_S = 10.0  # that the end of a run waits for environments that close
_FIELDS = {field.name for field in fields(Step)}


@dataclass(eq=False)
class Call:
    """A call under way. Its time runs from ``sent`` on, which is that of the loading in a new worker."""
    future: "Future[Answer]"
    session: int
    sent: float = field(default_factory=time.monotonic)


class Closes:
    """Calls of ``close()`` that are under way; the first one that fails is logged."""

    def __init__(self) -> None:
        self._pending, self._warned = set["Future[Answer]"](), False

    def add(self, closing: "Future[Answer]") -> None:
        """Keep a call until it has ended."""
        self._pending.add(closing)
        closing.add_done_callback(self._ended)

    def wait(self) -> None:
        """Wait a while for all."""
        wait([*self._pending], _CLOSE_S)

    def _ended(self, closing: "Future[Answer]") -> None:
        self._pending.discard(closing)
        answer = closing.result()
        if isinstance(answer, Failure) and answer.cause != "worker_died" and not self._warned:
            self._warned = True
            logger.warning("close() of an environment failed (%s); further ones are not logged\n%s", answer.cause,
                           answer.detail)


class Worker:
    """One process; a thread of the trainer writes to it, and another one reads."""

    def __init__(self, spec: EnvironmentSpec, limit_s: float, closes: Closes) -> None:
        self.loaded: "Future[Info]" = Future()
        self.closes, self._numbers = closes, count()
        self.limit_s, self.calls = limit_s, dict[int, Call]()
        self.sessions, self.retired = set[int](), False
        self.started, self.ready_at, self._problem = time.monotonic(), 0.0, ""
        self._lock, self._outbox = threading.Lock(), queue.SimpleQueue[bytes | None]()
        self.process, self._pipe = start_process("lightrft.environments.worker")
        self.send(("load", spec, limit_s))
        for target in (self._write, self._read):
            threading.Thread(target=target, daemon=True).start()

    @property
    def alive(self) -> bool:
        """True while it takes calls."""
        return not self.retired and self.process.returncode is None

    @property
    def busy(self) -> set[int]:
        """Sessions with a call under way."""
        with self._lock:
            return {call.session for call in self.calls.values()}

    def call(self, kind: str, session: int, *arguments: Any) -> "Future[Answer]":
        """Send a call; the future gets the answer, or a failure."""
        future, number = Future[Answer](), next(self._numbers)
        with self._lock:
            self.calls[number] = Call(future, session)
        self.send((kind, number, session, *arguments))
        if self.process.returncode is not None:
            self._lose(f"the worker process ended with exit code {self.process.returncode}")
        return future

    def end(self, session: int) -> None:
        """Close the environment of a session, once. Nobody waits for it."""
        with self._lock:
            if session not in self.sessions:
                return
            self.sessions.remove(session)
        self.closes.add(self.call("close", session))

    def send(self, message: tuple[Any, ...]) -> None:
        """Let the writing thread send a message."""
        self._outbox.put(bytes(ForkingPickler.dumps(message)))

    def expire(self, now: float) -> None:
        """Fail the calls whose time is over. A worker that does not end them itself takes no further session, and is
        killed when its last one is over; so is one that does not load its environment."""
        if not self.loaded.done():
            if now - self.started > LOAD_LIMIT_S:
                self._problem = f"the environment was not loaded within {LOAD_LIMIT_S:.0f} s"
                kill_group(self.process)
            return
        with self._lock:
            late = {number: call for number, call in self.calls.items()
                    if now - max(call.sent, self.ready_at) > self.limit_s + GRACE_S}  # yapf: disable
        for number in late:
            self._resolve(number, Failure("timeout", f"no answer within {self.limit_s:g} s (--env_timeout_s)"))
        if self.retired and not self.sessions and not self.calls:
            self.kill()

    def kill(self) -> None:
        """Kill the process and its children at once."""
        kill_group(self.process)
        self._outbox.put(None)
        self.process.wait()

    def _write(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError, OSError):
            while (raw := self._outbox.get()) is not None:
                self._pipe.send_bytes(raw)

    def _read(self) -> None:
        try:
            while True:
                self._receive(json.loads(self._pipe.recv_bytes(_MOST_BYTES)))
        except (EOFError, OSError, ValueError, RecursionError):
            self.kill()  # it is gone, but not what it has started; or it wrote what is no answer
        self._lose(f"the worker process ended with exit code {self.process.returncode}")

    def _receive(self, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._problem = message["failed"]
            self.loaded.set_exception(UserError(self._problem))
        elif "loaded" in message:
            self.ready_at = time.monotonic()
            self.loaded.set_result(Info(**message["loaded"] | {"tools": tuple(message["loaded"]["tools"])}))
        elif "failure" in message:
            self._resolve(message["call"], Failure(message["failure"], message["detail"]))
        else:
            self._resolve(message["call"], Step(**{name: message[name] for name in _FIELDS & message.keys()}))

    def _resolve(self, number: int, answer: Answer) -> None:
        with self._lock:
            call = self.calls.pop(number, None)
        if call is None:
            return
        call.future.set_result(answer)
        if isinstance(answer, Failure) and answer.cause == "timeout":  # its thread may hang for ever
            self.retired = True
            self.end(call.session)

    def _lose(self, text: str) -> None:
        text = self._problem or text
        if not self.loaded.done():
            self.loaded.set_exception(UserError(f"the environment: {text} while it was loaded"))
        with self._lock:
            numbers = [*self.calls]
            self.sessions.clear()
        for number in numbers:
            self._resolve(number, Failure("worker_died", text))


class EnvironmentPool:
    """``count`` workers at most; a session stays in its worker, and a new one goes to the worker with the fewest. They
    end with :meth:`shutdown`, or with this object, as where an error ends what would have called that.

    Args:
        limit_s: seconds for one call.
    """

    def __init__(self, spec: EnvironmentSpec, workers: int, limit_s: float) -> None:
        self.spec, self.count, self.limit_s = spec, workers, limit_s
        self._workers: list[Worker] = []
        self._homes: dict[int, Worker] = {}
        self._sessions, self._closes, self._closed = count(), Closes(), threading.Event()
        weakref.finalize(self, _end, self._workers, self._closed)
        self.info = self._first()
        threading.Thread(target=_look, args=(self._workers, self._closed), daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return [worker.process.pid for worker in self._workers if worker.process.returncode is None]

    def reset(self, task: Task, seed: int) -> "tuple[int, Future[Answer]]":
        """Begin a session; return its number, and the messages that come first."""
        session = next(self._sessions)
        worker = self._homes[session] = self._freest()
        worker.sessions.add(session)
        return session, worker.call("reset", session, task, seed)

    def step(self, session: int, turn: Turn) -> "Future[Answer]":
        """Pass a turn to its session."""
        return self._homes[session].call("step", session, turn)

    def cut_short(self, session: int) -> "Future[Answer]":
        """Tell a session that its response ends without its last answer."""
        return self._homes[session].call("cut_short", session)

    def close(self, session: int) -> None:
        """End a session, and close its environment. Nobody waits for it."""
        worker = self._homes.pop(session, None)
        if worker is not None:
            worker.end(session)

    def shutdown(self) -> None:
        """Close the sessions that are open, wait a while for all that close, and kill the workers."""
        for session, worker in [*self._homes.items()]:
            if session not in worker.busy:
                self.close(session)
        self._closes.wait()
        _end(self._workers, self._closed)

    def _first(self) -> Info:
        """Start the first worker, and return what it tells about the environment."""
        self._workers.append(Worker(self.spec, self.limit_s, self._closes))
        try:
            return self._workers[0].loaded.result(LOAD_LIMIT_S)
        except TimeoutError:
            self.shutdown()
            raise UserError(f"--environment {self.spec.title} was not loaded within {LOAD_LIMIT_S:.0f} s") from None
        except UserError:
            self.shutdown()
            raise

    def _freest(self) -> Worker:
        """Return the worker with the fewest sessions; a new one while there are fewer than ``count``."""
        self._workers[:] = [each for each in self._workers if each.process.returncode is None or each.sessions]
        alive = [worker for worker in self._workers if worker.alive]
        if len(alive) < self.count and all(worker.sessions for worker in alive):
            alive += self._another(bool(alive))
        return min(alive, key=lambda worker: len(worker.sessions))

    def _another(self, spare: bool) -> list[Worker]:
        """Start a worker; with ``spare``, others run, which take its sessions where the system gives no process."""
        try:
            self._workers.append(Worker(self.spec, self.limit_s, self._closes))
        except NoProcessError as error:
            if not spare:
                raise
            logger.warning("%s. The run goes on with the workers that it has", str(error))
            self.count = len(self._workers)
            return []
        return self._workers[-1:]


def _look(workers: list[Worker], closed: threading.Event) -> None:
    """Look at the deadlines of calls until the pool is closed."""
    while not closed.wait(_LOOK_S):
        for worker in [*workers]:
            worker.expire(time.monotonic())


def _end(workers: list[Worker], closed: threading.Event) -> None:
    """Kill the workers of a pool."""
    closed.set()
    for worker in workers:
        worker.kill()
