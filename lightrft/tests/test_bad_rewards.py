"""Rewards and servers that fail: refused at the start with the cause; while training their samples are unscored."""
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lightrft.tests.support import bad_input
from lightrft.tests.support.bad_input import options_of, refused, steps, write_reward
from lightrft.tests.support.launch import errors, finish, launch, no_orphans
from lightrft.tests.support.processes import POLL_S

pytestmark = [pytest.mark.dist, pytest.mark.slow]
home = bad_input.home
SOON = "from lightrft.rewards import remote\nremote.BACKOFF_S = 0.01\n"  # pauses between tries take longer than the run
HEAD = "def reward_func(queries, prompts, labels):\n    "
REWARDS = {
    "syntax": ("def reward_func(queries, prompts, labels)\n    return 1\n", ("reward.py, line 1", "correct the file")),
    "import": ("import no_such_module\n", ("reward.py raises while it is imported", "no_such_module")),
    "unclear": ("def one(a): return 1\ndef two(a): return 2\n", ("cannot tell which function", "path.py:function")),
    "raises": (HEAD + "raise KeyError('broken')\n", ("could be scored: exception", "broken", "--no_reward_probe")),
    "none": (HEAD + "return None\n", ("could be scored: none", "--no_reward_probe")),
    "short": (HEAD + "return [1.0] * (len(queries) + 1)\n", ("could be scored: wrong_length", "rewards for")),
    "nan": (HEAD + "return [float('nan')] * len(queries)\n", ("could be scored: not_finite", "the reward is nan")),
    "hangs": (HEAD + "import time; time.sleep(1000)\n", ("could be scored: timeout", "--reward_timeout_s")),
    "dies": (HEAD + "import os; os._exit(3)\n", ("could be scored: worker_died", "exit code 3")),
}


@pytest.mark.parametrize("name", REWARDS)
def test_reward_file(name: str, home: Path, tmp_path: Path) -> None:
    """Refused before training, with the cause."""
    text, words = REWARDS[name]
    path = write_reward(tmp_path, text)
    run = launch(tmp_path, options_of(home, tmp_path, reward=path, reward_timeout_s=0.1 if name == "hangs" else 0.5))
    assert run.wait() == [2], run.output
    own = run.output.split("was left unscored")[-1]
    assert own.count("Traceback") == (name in ("import", "raises")), run.output  # the one of the user's own file
    assert all(word in run.output for word in words) and len(errors(run.output)) == 1, run.output
    assert no_orphans(tmp_path)


@pytest.mark.parametrize("name,cause", [("raises", "exception"), ("none", "none"), ("short", "wrong_length"),
                                        ("nan", "not_finite"), ("hangs", "timeout")])
def test_a_reward_that_fails_while_training_leaves_samples_unscored(name: str, cause: str, home: Path,
                                                                    tmp_path: Path) -> None:
    path = write_reward(tmp_path, REWARDS[name][0])
    limit_s = 0.05 if name == "hangs" else 0.2
    finish(tmp_path, options_of(home, tmp_path, reward=path, reward_timeout_s=limit_s, reward_probe="false",
                                max_steps=1))  # yapf: disable
    row = steps(tmp_path)[0]
    assert row["reward/unscored"] == 32 and row[f"reward/unscored/{cause}"] == 32
    assert row["policy/optimizer_steps"] == 0, "trained on rewards that nobody gave"
    assert no_orphans(tmp_path)


class _Server(BaseHTTPRequestHandler):
    """Answers /broken with 500, /slow after 5 s, /words with text, /object without rewards, /good with ones."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/slow":
            time.sleep(5)
        good = {"rewards": [1.0] * len(body["query"])}
        answer = {"/words": "all good", "/object": {"verdict": 1}}.get(self.path, good)
        self.send_response(500 if self.path == "/broken" else 200)
        self.end_headers()
        self.wfile.write((answer if isinstance(answer, str) else json.dumps(answer)).encode())

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture(name="server", scope="module")
def server_fixture() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, args=(POLL_S, ), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(name="soon")
def soon_fixture(tmp_path: Path) -> Path:
    """A plug-in with which a server is asked again at once."""
    (tmp_path / "soon.py").write_text(SOON, encoding="utf-8")
    return tmp_path / "soon.py"


@pytest.mark.parametrize("path,cause", [(None, "unreachable"), ("/slow", "timeout"), ("/words", "wrong_json"),
                                        ("/object", "wrong_json"), ("/broken", "http_status")])
def test_reward_server(path: str | None, cause: str, server: str, soon: Path, home: Path, tmp_path: Path) -> None:
    url = server + path if path else "http://127.0.0.1:9"
    words = (f"could be scored: {cause}", url, "correct the reward, the server or the row")
    refused(home, tmp_path, *words, reward="none", plugin=soon, remote_rm_url=url,
            reward_timeout_s=0.1 if cause == "timeout" else 0.3)


def test_a_server_that_fails_while_training(server: str, soon: Path, home: Path, tmp_path: Path) -> None:
    options = options_of(home, tmp_path, reward="none", plugin=soon, remote_rm_url=server + "/words",
                         reward_probe="false", max_steps=1)  # yapf: disable
    finish(tmp_path, options)
    assert steps(tmp_path)[0]["reward/unscored/wrong_json"] == 32
