"""Two ranks and a hub on this machine: one rank asks it, the other reads the cache."""
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lightrft.config.schema import Config, DataConfig
from lightrft.config.tree import build
from lightrft.tests.support import tiny
from lightrft.tests.support.launch import ROOT
from lightrft.tests.support.processes import POLL_S
from lightrft.trainer import hub_files

SHA = "0" * 40
pytestmark = pytest.mark.dist


class Hub(ThreadingHTTPServer):
    """A hub with the model ``org/tiny``; ``asked`` holds the rank and the path of every request."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[tuple[str, str]]()
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_) -> None:
        pass

    def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": SHA, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        rank = re.search(r"origin/(rank-\d)", self.headers["User-Agent"])
        self.server.asked.append((rank[1] if rank else "", self.path))
        path = self.path.partition("?")[0]
        if re.match(r"/api/models/org/tiny(/revision/\w+)?$", path):
            files = [{"rfilename": file.name} for file in self.server.folder.iterdir()]
            return self.answer(200, json.dumps({"id": "org/tiny", "sha": SHA, "siblings": files}).encode())
        if re.match(r"/api/models/org/tiny/tree/\w+$", path):
            files = [{"type": "file", "path": file.name, "size": file.stat().st_size, "oid": file.name}
                     for file in self.server.folder.iterdir()]  # yapf: disable
            return self.answer(200, json.dumps(files).encode())
        found = re.fullmatch(r"/org/tiny/resolve/\w+/([\w.]+)", path)
        if found and (file := self.server.folder / found[1]).is_file():
            return self.answer(200, file.read_bytes(), ETag=f'"{file.name}"')
        return self.answer(404, X_Error_Code="EntryNotFound" if "org/tiny" in path else "RepoNotFound")

    do_HEAD = do_GET


@pytest.fixture(name="hub")
def fixture_hub(tmp_path):
    """A hub that serves a tiny model."""
    folder = tiny.save_model(tmp_path / "model")
    with Hub(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(POLL_S, ))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(hub: Hub, tmp_path: Path, *names: str) -> str:
    environ = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "home"),
                            "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1",
                            "PYTHONPATH": str(ROOT)}  # yapf: disable
    command = [sys.executable, "-W", "ignore", "-m", "lightrft.tests.support.hub_rank", *names]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_one_rank_of_a_machine_asks_the_hub(hub, tmp_path):
    """A model that the hub lacks is refused by the part that reads it, on both ranks."""
    said = run(hub, tmp_path, "org/tiny", "org/absent")
    assert said.count("refused: cannot load the tokenizer of 'org/absent'") == said.count("refused") == 2, said
    assert {rank for rank, path in hub.asked if "org/tiny" in path} == {"rank-0"}, hub.asked
    assert any("model.safetensors" in path for _, path in hub.asked)


def test_names_of_the_hub_are_told_from_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    values = {"pretrain": "org/policy", "ref_pretrain": "here", "critic_pretrain": "org/policy",
              "teacher_model": "org/teacher", "reward_pretrain": ["help=org/judge", "here"]}  # yapf: disable
    assert hub_files._models(build(Config, values)) == ["org/policy", "org/teacher", "org/judge"]
    data = DataConfig(prompt_data=["org/rows@main", "here", "./gone.jsonl", "memory:1", "a/b/c"],
                      eval_data=["org/held", "org/rows@main"], eval_suite=["gsm8k", "math500=here"])
    assert hub_files._entries(data) == ["org/rows@main", "org/held"]
    assert hub_files._suites(data) == ["gsm8k"]


def test_rows_are_downloaded_and_not_read(tmp_path, monkeypatch):
    """``datasets.load_dataset`` finds the layout of a repository on the disk. Each rank reads the rows later, once."""
    pytest.importorskip("datasets")
    (tmp_path / "org" / "rows").mkdir(parents=True)
    (tmp_path / "org" / "rows" / "train.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.Dataset.to_list", lambda self: pytest.fail("the rows were read"))
    assert hub_files._fetch([], ["org/rows"], []) and list((tmp_path / "cache").rglob("*.arrow"))
    assert not hub_files._fetch([], ["rows.jsonl"], [])
