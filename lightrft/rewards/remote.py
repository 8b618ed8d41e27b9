"""Scoring over HTTP: several URLs share the work, a request goes to the least busy one, retries are bounded.

Reward servers: POST ``{"query", "queries", "prompts", "labels", "references"}`` (lists) -> ``{"rewards": [...]}``,
optionally with ``scores`` and ``extra_logs``; ``query`` and ``queries`` both hold prompt + response, for servers of
either dialect. Prompts that are chats are in ``messages`` too, for :mod:`lightrft.rewards.server`, and responses of
environments in ``turns``, as messages.

Judges: :mod:`lightrft.rewards.judge`.
"""
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import requests

from lightrft.rewards.timeouts import Backlog, NOT_TRIED, GroupBudget
from lightrft.rewards.base import Outcome, RewardInput
from lightrft.utils.errors import CaptureException
from lightrft.rewards.workers.user_file import outcomes_of

MAX_CHUNK = 32  # responses per request
LANES = 2  # requests in flight per server
TRIES = 3
BACKOFF_S = 0.2  # before the second try, doubled before each further one
REST_S = 5.0  # seconds for which a failed server is the last choice

_SPOILT = ("http_status", "wrong_json", "wrong_length", "timeout")  # one response can spoil a request like this
Row = tuple[RewardInput, GroupBudget, "Future[list[Outcome]]"]
Ask = Callable[[requests.Session, str, list[RewardInput], float], list[Outcome]]
"""Sends one request ``(session, url, responses, seconds)``; raises ``RequestFailed``."""


class RequestFailed(RuntimeError):
    """A request had no usable answer; ``cause`` is the countable reason.

    ``wait_s`` are the seconds after which the server asks to be tried again.
    """

    def __init__(self, cause: str, detail: str, wait_s: float = 0.0) -> None:
        super().__init__(detail)
        self.cause, self.wait_s = cause, wait_s


class Balancer:
    """Counts requests in flight per URL and picks the least busy URL that has not failed recently."""

    def __init__(self, urls: list[str]) -> None:
        self.in_flight = dict.fromkeys(urls, 0)
        self.served = dict.fromkeys(urls, 0)
        self._failed_at = dict.fromkeys(urls, -REST_S)
        self._lock = threading.Lock()

    def take(self, tried: list[str]) -> str:
        """Return the URL for the next request; ``tried`` ones only when there is no other."""
        with self._lock:
            now = time.monotonic()
            url = min(
                self.in_flight, key=lambda u:
                (tried.count(u), now - self._failed_at[u] < REST_S, self.in_flight[u], self.served[u]))
            self.in_flight[url] += 1
            return url

    def give_back(self, url: str, ok: bool) -> None:
        """Record the end of a request to ``url``."""
        with self._lock:
            self.in_flight[url] -= 1
            self.served[url] += ok
            self._failed_at[url] = -REST_S if ok else time.monotonic()


class Size:
    """Number of responses per request: halved after a late answer, doubled after one in less than half of the limit."""

    def __init__(self, most: int) -> None:
        self.most, self.limit = most, most
        self._lock = threading.Lock()

    def late(self, asked: int) -> None:
        """Record that a request of ``asked`` responses was not answered in time."""
        with self._lock:
            self.most = max(1, min(self.most, asked // 2))

    def soon(self, asked: int) -> None:
        """Record that a request of ``asked`` responses was answered in less than half of the limit."""
        with self._lock:
            if asked >= self.most:  # a smaller request proves nothing about larger ones
                self.most = min(self.limit, 2 * self.most)


class RemoteReward:
    """Scores responses on ``urls``, ``limit_s`` seconds per request. Its threads start with the first response.

    The reward of a response does not depend on the rest of the request, so responses may be sent at any time and in
    any combination.

    Args:
        ask: sends a request; None: that of reward servers.
        lanes: requests in flight; 0: ``LANES`` per URL.
        most: responses per request.
    """

    def __init__(self, urls: list[str], limit_s: float, ask: Ask | None = None, lanes: int = 0,
                 most: int = MAX_CHUNK) -> None:
        self.balancer = Balancer(urls)
        self.limit_s, self.size, self.ask = limit_s, Size(most), ask or ask_server
        self._backlog: Backlog[Row] = Backlog(lanes or LANES * len(self.balancer.in_flight))
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()

    def submit(self, batch: list[RewardInput], budgets: list[GroupBudget]) -> "list[Future[list[Outcome]]]":
        """Score ``batch``; return one future for each response."""
        rows: list[Row] = [(item, budget, Future()) for item, budget in zip(batch, budgets, strict=True)]
        self._backlog.put(rows, None)
        if not self._threads:
            self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(self._backlog.takers)]
            for thread in self._threads:
                thread.start()
        return [future for *_, future in rows]

    def shutdown(self) -> None:
        """Stop sending requests; waiting responses come back unscored."""
        self._closed.set()
        self._backlog.close()

    def _run(self) -> None:
        with requests.Session() as session:
            while rows := self._backlog.take(self.size.most):
                with CaptureException() as captured:
                    outcomes = self._score(session, rows)
                if captured.cause is not None:
                    outcomes = [Outcome(None, "internal", captured.text)] * len(rows)
                for (*_, future), outcome in zip(rows, outcomes, strict=True):
                    future.set_result([outcome])

    def _score(self, session: requests.Session, rows: list[Row]) -> list[Outcome]:
        """Return the outcomes of one request, or of one request per response if one may have spoilt the first."""
        outcomes = self._try(session, rows, TRIES)
        if len(rows) == 1 or outcomes[0] is NOT_TRIED or any(outcome.error not in _SPOILT for outcome in outcomes):
            return outcomes
        if outcomes[0].error == "timeout":
            self.size.late(len(rows))
        return [self._try(session, [row], 1)[0] for row in rows]

    def _try(self, session: requests.Session, rows: list[Row], tries: int) -> list[Outcome]:
        tried: list[str] = []
        failure, start = RequestFailed("shutdown", ""), time.monotonic()
        while len(tried) < tries and not self._closed.wait(self._pause_s(len(tried), failure)):
            limit_s = max(budget.deadline_s() for _, budget, _ in rows)
            if limit_s == 0:
                return [NOT_TRIED] * len(rows)
            url = self.balancer.take(tried)
            tried.append(url)
            try:
                return self._ask(session, url, rows, limit_s if len(rows) == 1 else self.limit_s)
            except RequestFailed as error:
                failure = error
            start = self._lost(rows, start)
            if failure.cause == "timeout" and len(rows) > 1:
                break  # a smaller request is answered sooner
        return [Outcome(None, failure.cause, str(failure))] * len(rows)

    def _pause_s(self, tried: int, failure: RequestFailed) -> float:
        """Seconds until the next try: growing, and as many as the server asks for, up to the limit of a request."""
        return max(BACKOFF_S * 2**(tried - 1), min(failure.wait_s, self.limit_s)) if tried else 0.0

    def _ask(self, session: requests.Session, url: str, rows: list[Row], limit_s: float) -> list[Outcome]:
        ok, start = False, time.monotonic()
        try:
            outcomes = self.ask(session, url, [item for item, *_ in rows], limit_s)
            ok = True
            if time.monotonic() - start < self.limit_s / 2:
                self.size.soon(len(rows))
            return outcomes
        except RequestFailed as error:
            if error.cause == "timeout" and len(rows) == 1:  # a larger request may just be too large
                rows[0][1].timeouts += 1
            raise
        finally:
            self.balancer.give_back(url, ok)
            for _, budget, _ in rows if ok else ():
                budget.answered()

    def _lost(self, rows: list[Row], start: float) -> float:
        """Count the time since ``start``, pauses between tries included, as lost; return the current time."""
        now = time.monotonic()
        for reward in {budget.reward for _, budget, _ in rows}:
            reward.lose((now - start) / self._backlog.takers)
        return now


def ask_server(session: requests.Session, url: str, batch: list[RewardInput], limit_s: float) -> list[Outcome]:
    """Send one request to a reward server. Raises ``RequestFailed`` if it is down, slow, or answers without rewards."""
    queries = [item.prompt + item.response for item in batch]
    body = {
        "query": queries, "queries": queries, "prompts": [item.prompt for item in batch], "labels":
        [item.label if item.reference is None else item.reference for item in batch], "references":
        [item.reference for item in batch]
    }
    if any(item.play is not None for item in batch):
        body["turns"] = [item.turns for item in batch]
    if any(item.messages for item in batch):
        body["messages"] = [_chat(item) for item in batch]
    if any(item.template_kwargs for item in batch):
        body["tools"] = [item.template_kwargs.get("tools") for item in batch]
        body["chat_template_kwargs"] = [{name: value for name, value in item.template_kwargs.items() if name != "tools"}
                                        for item in batch]  # yapf: disable
    answer = post(session, url, body, limit_s)
    if not isinstance(answer, dict) or not {"rewards", "scores"} & answer.keys():
        raise RequestFailed("wrong_json", f"{url}: expected {{\"rewards\": [...]}}, got {str(answer)[:300]}")
    return outcomes_of(answer, len(batch))


def _chat(item: RewardInput) -> list[dict[str, Any]]:
    """Return the prompt as a chat, for servers that render it themselves; of media only the kinds."""
    return [{**turn, "content": content if isinstance(content, str) else
             [{key: part[key] for key in ("type", "text") if key in part} for part in content or []]}
            for turn in item.messages for content in [turn.get("content")]]  # yapf: disable


def post(session: requests.Session, url: str, body: dict[str, Any], limit_s: float,
         headers: dict[str, str] | None = None) -> Any:
    """Send ``body`` and return the JSON of the answer. Raises ``RequestFailed`` if there is none within ``limit_s``."""
    try:
        reply = session.post(url, data=json.dumps(body, default=str),
                             headers={"Content-Type": "application/json"} | (headers or {}), timeout=limit_s)
        reply.raise_for_status()
        return reply.json()
    except requests.Timeout as error:
        raise RequestFailed(
            "timeout", f"{url}: no answer within {limit_s:g} s (--reward_timeout_s, or of a judge "
            "--judge_timeout_s)") from error
    except requests.HTTPError as error:
        wait = reply.headers.get("Retry-After", "")
        raise RequestFailed("http_status", f"{error}: {reply.text[:300]}", float(wait) if wait.isdecimal() else 0.0) \
            from error
    except requests.JSONDecodeError as error:
        raise RequestFailed("wrong_json", f"{url} answered no JSON: {reply.text[:300]!r}") from error
    except requests.RequestException as error:
        raise RequestFailed("unreachable", f"{url}: {error}") from error
