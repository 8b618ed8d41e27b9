"""Managers and servers that are shut down whatever the test does."""
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lightrft.config.schema import RewardConfig
from lightrft.rewards import remote
from lightrft.rewards.manager import RewardManager
from lightrft.tests.support.processes import POLL_S
from lightrft.tests.support.scorers import OTHER, save_scorer, train_judge


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    """Between tries of a server; how they grow has a test of its own."""
    monkeypatch.setattr(remote, "BACKOFF_S", 0.01)


@pytest.fixture(scope="session")
def scorers(tmp_path_factory):
    """Two reward models; the second one has another template, and knows its moments."""
    home = tmp_path_factory.mktemp("scorers")
    return save_scorer(home / "a", 1), save_scorer(home / "b", 2, OTHER, mean=0.5, std=2.0)


@pytest.fixture(scope="session")
def judge(tmp_path_factory):
    """A judge that ``lightrft grm`` has trained."""
    return train_judge(tmp_path_factory.mktemp("judge"))


@pytest.fixture
def make_manager():
    managers = []

    def make(*reward, **options):
        managers.append(RewardManager(RewardConfig(reward=[str(entry) for entry in reward], **options)))
        return managers[-1]

    yield make
    for manager in managers:
        manager.shutdown()


@pytest.fixture
def serve():
    """Start a server whose POST answers ``reply(body) -> (status, bytes, *headers)``; returns (url, bodies it got).

    Headers are pairs; those of the requests are added to ``seen``.
    """
    servers = []

    def start(reply, seen=None):
        bodies = []

        class Handler(BaseHTTPRequestHandler):

            def do_POST(self):
                bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if seen is not None:
                    seen.append(dict(self.headers))
                status, answer, *headers = reply(bodies[-1])
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args):
                return None

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        servers[-1].daemon_threads = True
        threading.Thread(target=servers[-1].serve_forever, args=(POLL_S, ), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/rm", bodies

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
