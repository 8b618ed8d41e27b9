"""Reward servers over HTTP: several URLs share the work, each chunk goes to the least busy one, retries are bounded.

POST ``{"query", "queries", "prompts", "labels", "references"}`` (lists) -> ``{"rewards": [...]}``, optionally with
``scores`` and ``extra_logs``; ``query`` and ``queries`` both hold prompt + response, for servers of either dialect.
"""
import json
import queue
import threading
import time
from concurrent.futures import Future

import requests

from lightrft.rewards.base import Outcome, RewardInput
from lightrft.rewards.caught import Caught
from lightrft.rewards.user_file import outcomes_of

MAX_CHUNK = 32  # responses per request
LANES = 2  # requests in flight per server
TRIES = 3
BACKOFF_S = 0.2  # before the second try, doubled before each further one
REST_S = 5.0  # a server that failed is asked last for this long


class RequestFailed(RuntimeError):
    """A request without a usable answer; ``cause`` is the countable reason."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


class Balancer:
    """Counts requests in flight per URL and gives out the least busy one that has not failed just now."""

    def __init__(self, urls: list[str]) -> None:
        self.in_flight = dict.fromkeys(urls, 0)
        self.served = dict.fromkeys(urls, 0)
        self._failed_at = dict.fromkeys(urls, -REST_S)
        self._lock = threading.Lock()

    def take(self, tried: list[str]) -> str:
        """The URL for the next request; ``tried`` ones only when there is no other."""
        with self._lock:
            now = time.monotonic()
            url = min(
                self.in_flight, key=lambda u:
                (tried.count(u), now - self._failed_at[u] < REST_S, self.in_flight[u], self.served[u]))
            self.in_flight[url] += 1
            return url

    def give_back(self, url: str, ok: bool) -> None:
        """The request to ``url`` has ended."""
        with self._lock:
            self.in_flight[url] -= 1
            self.served[url] += ok
            self._failed_at[url] = -REST_S if ok else time.monotonic()


class RemoteReward:
    """Scores batches on ``urls``, ``limit_s`` seconds per request. Its threads start with the first batch."""

    def __init__(self, urls: list[str], limit_s: float) -> None:
        self.balancer = Balancer(urls)
        self.limit_s = limit_s
        self._tasks: queue.SimpleQueue[tuple[list[RewardInput], Future[list[Outcome]]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()

    def submit(self, batch: list[RewardInput]) -> "list[Future[list[Outcome]]]":
        """Score ``batch`` in chunks; the futures hold their outcomes in order."""
        lanes = LANES * len(self.balancer.in_flight)
        if not self._threads:
            self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(lanes)]
            for thread in self._threads:
                thread.start()
        size = max(1, min(MAX_CHUNK, -(-len(batch) // lanes)))
        chunks: list[tuple[list[RewardInput], Future[list[Outcome]]]]
        chunks = [(batch[i:i + size], Future()) for i in range(0, len(batch), size)]
        for chunk in chunks:
            self._tasks.put(chunk)
        return [future for _, future in chunks]

    def shutdown(self) -> None:
        """Send nothing further; what waits comes back unscored."""
        self._closed.set()
        for _ in self._threads:
            self._tasks.put(None)

    def _run(self) -> None:
        with requests.Session() as session:
            while (task := self._tasks.get()) is not None:
                batch, future = task
                with Caught() as caught:
                    outcomes = self._score(session, batch)
                future.set_result(outcomes if caught.cause is None else [Outcome(None, "internal", caught.text)] *
                                  len(batch))

    def _score(self, session: requests.Session, batch: list[RewardInput]) -> list[Outcome]:
        tried: list[str] = []
        failure = RequestFailed("shutdown", "")
        while len(tried) < TRIES and not self._closed.wait(BACKOFF_S * 2**(len(tried) - 1) if tried else 0.0):
            url = self.balancer.take(tried)
            tried.append(url)
            ok = False
            try:
                outcomes = outcomes_of(post(session, url, batch, self.limit_s), len(batch))
                ok = True
                return outcomes
            except RequestFailed as error:
                failure = error
            finally:
                self.balancer.give_back(url, ok)
        return [Outcome(None, failure.cause, str(failure))] * len(batch)


def post(session: requests.Session, url: str, batch: list[RewardInput], limit_s: float) -> dict[str, object]:
    """One request. ``RequestFailed`` when the server is down, slow, answers an error or no JSON object with rewards."""
    queries = [item.prompt + item.response for item in batch]
    body = {
        "query": queries, "queries": queries, "prompts": [item.prompt for item in batch], "labels":
        [item.label if item.reference is None else item.reference for item in batch], "references":
        [item.reference for item in batch]
    }
    try:
        reply = session.post(url, data=json.dumps(body, default=str), headers={"Content-Type": "application/json"},
                             timeout=limit_s)
        reply.raise_for_status()
        answer = reply.json()
    except requests.Timeout as error:
        raise RequestFailed("timeout", f"{url}: no answer within {limit_s:g} s (--reward_timeout_s)") from error
    except requests.HTTPError as error:
        raise RequestFailed("http_status", f"{error}: {reply.text[:300]}") from error
    except requests.JSONDecodeError as error:
        raise RequestFailed("wrong_json", f"{url} answered no JSON: {reply.text[:300]!r}") from error
    except requests.RequestException as error:
        raise RequestFailed("unreachable", f"{url}: {error}") from error
    if not isinstance(answer, dict) or not {"rewards", "scores"} & answer.keys():
        raise RequestFailed("wrong_json", f"{url}: expected {{\"rewards\": [...]}}, got {str(answer)[:300]}")
    return answer
