"""HTTP server of rewards: one thread per connection reads requests, and one thread scores waiting requests in
batches."""
import json
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lightrft.config.serve_schema import ServerConfig
from lightrft.rewards.base import RewardInput, Score
from lightrft.rewards.reward_requests import BadRequest, FORMS, read_json, Reader
from lightrft.utils.errors import CaptureException, UserError
from lightrft.utils.logging import get_logger

BATCH = 256  # texts that are scored together, if no request alone has more: a later one waits for all of them
LAST_ANSWERS_S = 5.0  # for the answers under way when the server ends
CHUNK = 1 << 16  # bytes
DISCARDED = 1 << 26  # bytes of a refused body that are read all the same: else the client may not see the answer
TICK_S = 0.1  # between looks at the stop request

Scorer = Callable[[list[RewardInput]], list[Score]]


@dataclass
class Asked:
    """Texts of one request, and the future of their scores."""
    items: list[RewardInput]
    future: "Future[list[Score]]" = field(default_factory=Future)


class RequestQueue:
    """Queue of requests; :meth:`work` scores those that wait, of several requests in one call."""

    def __init__(self, score: Scorer) -> None:
        self.score, self.requests, self.texts, self.calls = score, 0, 0, 0
        self._waiting: deque[Asked] = deque()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return sum(len(asked.items) for asked in [*self._waiting])

    def ask(self, items: list[RewardInput], limit_s: float) -> list[Score]:
        """Wait for the scores of ``items``.

        Raises:
            TimeoutError: they are not there after ``limit_s``; they are then no longer needed.
            BadRequest: they cannot be scored.
        """
        asked = Asked(items)
        with self._changed:
            self._waiting.append(asked)
            self._changed.notify()
        try:
            return asked.future.result(limit_s)
        except FutureTimeout as error:  # until Python 3.11 another class
            raise TimeoutError from error
        finally:
            asked.future.cancel()

    def work(self, wait_s: float) -> bool:
        """Score the requests that wait, up to ``BATCH`` texts; False if none has come within ``wait_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting, wait_s)
            taken = self._take()
        wanted = [asked for asked in taken if asked.future.set_running_or_notify_cancel()]
        if wanted:
            self._answer(wanted)
        return bool(taken)

    def _take(self) -> list[Asked]:
        taken, texts = list[Asked](), 0
        while self._waiting and (not taken or texts + len(self._waiting[0].items) <= BATCH):
            taken.append(self._waiting.popleft())
            texts += len(taken[-1].items)
        return taken

    def _answer(self, taken: list[Asked]) -> None:
        """Score requests together; if that fails, each alone, so that one does not spoil the others."""
        scores: list[Score] = []
        with CaptureException() as captured:
            scores = self.score([item for asked in taken for item in asked.items])
        if captured.cause is not None and len(taken) > 1:
            for asked in taken:
                self._answer([asked])
        elif captured.cause is not None:
            get_logger().warning(f"a request could not be scored\n{captured.text}")
            taken[0].future.set_exception(_refusal(captured.cause))
        else:
            self.calls, self.requests, self.texts = self.calls + 1, self.requests + len(taken), self.texts + len(scores)
            rest = iter(scores)
            for asked in taken:
                asked.future.set_result([next(rest) for _ in asked.items])


def _refusal(error: BaseException) -> BadRequest:
    """Return an error that a client can fix; other errors stay in the log."""
    if isinstance(error, UserError):
        return BadRequest(str(error))
    return BadRequest(f"{type(error).__name__}: the texts could not be scored; the log of the server has the cause",
                      500)


class RewardServer(ThreadingHTTPServer):
    """Server of ``score``; :meth:`run` works until it is asked to stop.

    Args:
        ends, starts: of a :class:`Reader`.

    Raises:
        UserError: the address cannot be used.
    """
    daemon_threads, request_queue_size = True, 128

    def __init__(self, cfg: ServerConfig, score: Scorer, ends: tuple[str, ...] = (), starts: tuple[str,
                                                                                                   ...] = ()) -> None:
        self.cfg, self.queue, self.reader = cfg, RequestQueue(score), Reader(ends, cfg.max_texts, starts)
        self.under_way, self.stopping, self._lock = 0, False, threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in cfg.host else socket.AF_INET
        try:
            super().__init__((cfg.host, cfg.port), Handler)
        except OSError as error:
            raise UserError(f"--host {cfg.host} --port {cfg.port}: cannot listen there ({error.strerror or error}); "
                            "choose another port, or 0 for a free one") from error

    @property
    def url(self) -> str:
        """Address of the server, with the port that it has got."""
        host = f"[{self.cfg.host}]" if ":" in self.cfg.host else self.cfg.host
        return f"http://{host}:{self.server_port}"

    def run(self, stop_requested: Callable[[], bool]) -> None:
        """Score requests in this thread; after a stop request answer those that have come, and close."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": TICK_S}, daemon=True)
        thread.start()
        while not stop_requested():
            self.queue.work(TICK_S)
        self.stopping = True
        self.shutdown()
        end = time.monotonic() + LAST_ANSWERS_S
        while self.under_way and time.monotonic() < end:
            self.queue.work(TICK_S)
        self.server_close()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count an answer that is under way."""
        with self._lock:
            self.under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self.under_way -= 1

    def health(self) -> dict[str, Any]:
        """Return what ``/health`` answers: requests, texts and passes so far, texts that wait."""
        queue = self.queue
        return {"status": "stopping" if self.stopping else "ok", "requests": queue.requests, "texts": queue.texts,
                "batches": queue.calls, "waiting": len(queue)}  # yapf: disable

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of a connection; a client that has left is none."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            get_logger().warning(f"a connection failed: {error!r}")


class Handler(BaseHTTPRequestHandler):
    """Reads requests of one connection, and writes answers."""
    protocol_version, server_version, sys_version = "HTTP/1.1", "lightrft", ""
    disable_nagle_algorithm = True
    server: RewardServer

    def setup(self) -> None:
        """Extend the base: no read or write of the connection takes longer than a request may."""
        super().setup()
        self.connection.settimeout(self.server.cfg.request_timeout_s)

    def do_GET(self) -> None:
        """Answer ``/health``; the body of such a request is not read, and would be taken for the next one."""
        self.close_connection |= "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        if self._route == "/health":
            self._send(200, self.server.health())
        else:
            self._refuse(BadRequest(f"{self._route}: there are GET /health and POST {', '.join(FORMS)}",
                                    405 if self._route in FORMS else 404))  # yapf: disable

    def do_POST(self) -> None:
        """Score the texts of a request."""
        with self.server.answering():
            try:
                self._send(200, self._answer())
            except BadRequest as error:
                self._refuse(error)

    @property
    def _route(self) -> str:
        return self.path.partition("?")[0]

    def _answer(self) -> dict[str, Any]:
        raw = self._body()
        if self._route not in FORMS:
            raise BadRequest(f"{self._route}: there are GET /health and POST {', '.join(FORMS)}", 404)
        if self.server.stopping:
            raise BadRequest("the server is about to end", 503)
        read, answer = FORMS[self._route]
        return answer(self._scores(read(self.server.reader, read_json(raw))))

    def _scores(self, items: list[RewardInput]) -> list[Score]:
        limit_s = self.server.cfg.request_timeout_s
        try:
            return self.server.queue.ask(items, limit_s)
        except TimeoutError as error:
            raise BadRequest(f"not scored within {limit_s:g} s (--request_timeout_s); try again, with fewer texts",
                             503) from error

    def _body(self) -> bytes:
        lengths, most = self.headers.get_all("Content-Length", []), int(self.server.cfg.max_body_mib * 2**20)
        stated = lengths[0] if len(lengths) == 1 and "Transfer-Encoding" not in self.headers else ""
        if not (stated.isascii() and stated.isdecimal()) or len(stated) > 15:  # a proxy may see another end of the body
            self.close_connection = True
            raise BadRequest("a request needs one Content-Length, and no Transfer-Encoding", 411)
        if int(stated) <= most:
            return b"".join(self._read(int(stated)))
        for _ in self._read(min(int(stated), DISCARDED)):
            continue
        self.close_connection = True
        raise BadRequest(f"a body of {stated} bytes is more than {most} (--max_body_mib); send several requests", 413)

    def _read(self, length: int) -> Iterator[bytes]:
        """Yield ``length`` bytes as they come, all within the time limit of a request."""
        end, limit_s = time.monotonic() + self.server.cfg.request_timeout_s, self.server.cfg.request_timeout_s
        while length:
            try:
                part = self.rfile.read1(min(length, CHUNK))
            except TimeoutError:
                part = b""
            if not part or time.monotonic() > end:
                self.close_connection = True
                raise BadRequest(f"the body ended early, or did not come within {limit_s:g} s (--request_timeout_s)",
                                 408)
            length -= len(part)
            yield part

    def _refuse(self, error: BadRequest) -> None:
        self._send(error.status, {"error": str(error)})

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        raw = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        if status == 503:
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        """Log requests for debugging only."""
        get_logger().debug(format % args)
