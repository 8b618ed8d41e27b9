"""A server of reward models: its numbers and contracts in a process of its own; many, bad and late requests."""
import itertools
import json
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import requests
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification

from lightrft.cli.serve_rm import main
from lightrft.config.schema import RewardConfig
from lightrft.config.serve_schema import ServeConfig, ServerConfig
from lightrft.config.tree import options
from lightrft.models.tokenizer import load_tokenizer
from lightrft.rewards import server as server_module
from lightrft.rewards.base import RewardInput, Score
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.reward_requests import Reader
from lightrft.rewards.server import RewardServer
from lightrft.tests.support import launch
from lightrft.tests.support.scorers import plain, save_scorer

CHATS = [RewardInput(f"policy's own {i}+{i}? ", "4" * i, [{"role": "user", "content": f"{i}+{i}?"}])
         for i in range(1, 7)]  # yapf: disable
TEXTS = [RewardInput(f"{i}+{i}=", "4" * i) for i in range(1, 7)]
END = "<|im_end|>"


def totals(items, **where):
    manager = RewardManager(RewardConfig(**where))
    try:
        return [score.total for score in manager.collect(manager.submit(items))]
    finally:
        manager.shutdown()


def started(folder, *models, **given):
    """The command in a process of its own, and its URL."""
    flags = {"reward_pretrain": list(models), "port": 0, "max_len": 100, "max_texts": 8, **given}
    run = launch.launch(folder, flags, module="lightrft.cli.serve_rm")
    run.until("get_reward")
    found = re.search(r"(http://127.0.0.1:\d+)/get_reward", run.log(0))
    assert found, run.output
    return run, found[1]


def post(url, body, path="/get_reward"):
    return requests.post(url + path, data=body if isinstance(body, (bytes, str)) else json.dumps(body), timeout=20)


@pytest.fixture(scope="module")
def url(scorers, tmp_path_factory):
    """A server of the first model, which ends cleanly on Ctrl-C."""
    run, url = started(tmp_path_factory.mktemp("server"), scorers[0])
    yield url
    run.signal(signal.SIGINT)
    assert run.wait(20) == [0] and "stopped after" in run.output and "Traceback" not in run.output, run.output


def test_rewards_are_those_of_a_model_in_the_run(url, scorers):
    """Of chats, which the model renders by its own template, and of texts."""
    for items in (CHATS, TEXTS):
        near = totals(items, reward_pretrain=[scorers[0]])
        assert totals(items, remote_rm_url=[f"{url}/get_reward"]) == pytest.approx(near, abs=1e-6, rel=1e-5)
    assert totals(CHATS, remote_rm_url=[f"{url}/get_reward"]) == pytest.approx(plain(scorers[0], CHATS), abs=1e-4)


def test_weights_and_moments_are_those_of_a_run(scorers, tmp_path):
    """Two models in one process, and SIGTERM ends it."""
    given = {"reward": ["rm1=0.5", "rm2=2"]}
    run, url = started(tmp_path, *scorers, **given)
    near = totals(CHATS, reward_pretrain=list(scorers), **given)
    answer = post(url, {"query": [item.prompt + item.response for item in CHATS], "prompts": [i.prompt for i in CHATS],
                        "messages": [item.messages for item in CHATS]}).json()  # yapf: disable
    assert answer["rewards"] == pytest.approx(near, abs=1e-6, rel=1e-5)
    assert answer["extra_logs"]["rm2"] == pytest.approx(plain(scorers[1], CHATS), abs=1e-4)
    run.signal(signal.SIGTERM)
    assert run.wait(20) == [0], run.output
    flags = launch.flags({"reward_pretrain": [scorers[0]], "normalize_reward": True, "port": 0})
    with pytest.raises(SystemExit) as done:
        main(flags)
    assert done.value.code == 2, "the first one has no moments"


def test_a_query_that_begins_with_bos_is_scored_with_one(tmp_path):
    """Of a tokenizer that writes it: decoded tokens have it too. The score is that of Hugging Face."""
    tokenizer = load_tokenizer(save_scorer(tmp_path / "rm", 1))
    tokenizer.bos_token = "<unk>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A",
                                                                    special_tokens=[("<unk>", tokenizer.bos_token_id)])
    tokenizer.save_pretrained(tmp_path / "rm")
    ids = torch.tensor(
        [[tokenizer.bos_token_id, *tokenizer("1+1=2", add_special_tokens=False).input_ids, tokenizer.eos_token_id]])
    with torch.no_grad():
        wanted = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")(ids).logits.item()
    run, url = started(tmp_path, str(tmp_path / "rm"))
    texts = ["<unk>1+1=2", "1+1=2", f"<unk>1+1=2{END}"]
    for prompts in (None, ["<unk>1+1=", "1+1=", "<unk>1+1="]):
        got = post(url, {"query": texts, "prompts": prompts}).json()["rewards"]
        assert got == pytest.approx([wanted] * 3, abs=1e-5), prompts
    run.signal(signal.SIGTERM)
    assert run.wait(20) == [0], run.output


def test_the_contracts_of_openrlhf_lightrft_and_verl(url, scorers):
    wanted = totals(TEXTS, reward_pretrain=[scorers[0]])
    texts = [item.prompt + item.response for item in TEXTS]
    near = pytest.approx(wanted, abs=1e-5)
    prompts, labels = [item.prompt for item in TEXTS], ["2"] * len(TEXTS)
    answer = post(url, {"query": texts, "prompts": prompts, "labels": labels}).json()
    assert set(answer) == {"rewards", "scores", "extra_logs"} and answer["rewards"] == answer["scores"] == near
    ended = [f"{text}{END}\n" for text in texts]  # as decoded tokens end
    lightrft = {"queries": ended, "prompts": prompts, "references": labels, "images": [None, []]}
    assert post(url, lightrft).json()["rewards"] == near
    assert post(url, {"query": texts}).json()["rewards"] == pytest.approx(wanted, abs=1e-2), "prompts may be missing"
    verl = {"model": "rm", "input": ended, "use_activation": False}
    assert [row["probs"][-1] for row in post(url, verl, "/classify").json()["data"]] == near
    (one, ) = post(url, {"model": "rm", "input": ended[0]}, "/v1/embeddings").json()["data"]
    assert one["embedding"][-1] == pytest.approx(wanted[0], abs=1e-5)
    health = requests.get(f"{url}/health", timeout=20).json()
    assert health["status"] == "ok" and health["texts"] >= 25 and health["waiting"] == 0


def read(text):
    return Reader((END, "</s>"), 8).inputs({"input": text})[0].response


def test_end_tokens_behind_a_text_are_dropped():
    expected = re.compile(rf"(?:(?:{re.escape(END)}|</s>)\s*)+\Z")
    for pieces in itertools.product((END, "</s>", "\n", " ", "x"), repeat=5):
        assert read("".join(pieces)) == expected.sub("", "".join(pieces)), pieces
    assert Reader((), 8).inputs({"input": f"x{END}\n"})[0].response == f"x{END}\n"


def test_a_text_that_begins_with_bos_has_one():
    """That which the tokenizer writes; behind a prompt or in a chat it stays, where the prompt loses its own."""
    reader = Reader((END, ), 8, ("<s>", ))
    asked = {"query": ["<s>4", "4", "<s><s>4", "<s>a<s>4"], "prompts": ["", "", "", "<s>a"]}
    found = [(item.prompt, item.response) for item in reader.queries(asked)]
    assert found == [("", "4"), ("", "4"), ("", "<s>4"), ("<s>a", "<s>4")]
    assert [item.response for item in reader.inputs({"input": ["<s>4", "4"]})] == ["4", "4"]


@pytest.mark.parametrize("size", [100_000, 1_000_000])
def test_reading_a_text_of_end_tokens_takes_no_time(size):
    """In every order with other text, which no search from each of them may take in quadratic time."""
    run = END * (size // len(END))
    for text, left in ((run + "x", run + "x"), ("x" + run, "x"), (run, ""), ("x" + f"{END}\n" * (size // 11), "x"),
                       ("x" + " " * size, "x" + " " * size)):  # yapf: disable
        start = time.thread_time()
        assert read(text) == left
        assert time.thread_time() - start < 0.5


def test_a_text_that_is_too_long_is_not_scored(url):
    answer = post(url, {"query": ["4", "4" * 300]}).json()
    assert answer["rewards"][0] is not None and answer["rewards"][1] is None
    assert answer["errors"] == [None, "too_long"] and answer["scores"][1] is None
    refused = post(url, {"input": "4" * 300}, "/classify")
    assert refused.status_code == 400 and "input[0]: not scored: too_long" in refused.json()["error"]


TURN = {"role": "user", "content": [{"type": "image"}]}
BAD = [
    ("no json", "/get_reward", 400, "the body is no JSON"),
    ("[" * 100_000, "/get_reward", 400, "the body is no JSON"),
    (b"\xff\xfe", "/get_reward", 400, "the body is no JSON"),
    (["4"], "/get_reward", 400, "a JSON list; expected an object"),
    ({}, "/get_reward", 400, "queries: expected a list with one entry per text, got None; the body has nothing"),
    ({"query": "4"}, "/get_reward", 400, "query: expected a list"),
    ({"query": []}, "/get_reward", 400, "query: expected a list"),
    ({"query": [4]}, "/get_reward", 400, "query[0]: expected a text, got int"),
    ({"query": ["\ud800"]}, "/get_reward", 400, "query[0]: holds half of a surrogate pair"),
    ({"query": ["4"] * 9}, "/get_reward", 413, "query: 9 texts are more than 8 (--max_texts)"),
    ({"query": ["4", "5"], "prompts": ["4"]}, "/get_reward", 400, "prompts: 1 entries for 2 queries"),
    ({"query": ["4"], "messages": [[TURN]]}, "/get_reward", 400, "must begin with its entry of prompts"),
    ({"query": ["45"], "prompts": ["5"]}, "/get_reward", 400,
     "prompts[0]: the query does not begin with it, so its response is unknown. It is '5', and the query begins '45'"),
    ({"query": ["4"], "prompts": [""], "messages": [[TURN]]}, "/get_reward", 400, "reads text only"),
    ({"query": ["4"], "prompts": [""], "messages": [7]}, "/get_reward", 400, "expected a list of turns"),
    ({"query": ["4"], "prompts": [""], "messages": [[{"role": "user", "content": "\ud800"}]]}, "/get_reward", 400,
     "messages[0]: holds half of a surrogate pair"),
    ({"queries": ["4"], "images": [["aGk="]]}, "/get_reward", 400, "images: a reward model behind a server reads text"),
    ({"input": [[5, 6]]}, "/classify", 400, "input[0]: expected a text, got list"),
    ({"query": ["4"]}, "/reward", 404, "/reward: there are GET /health and POST /get_reward"),
]  # yapf: disable


def test_bad_requests_are_refused_with_the_reason(url):
    for body, path, status, said in BAD:
        answer = post(url, body, path)
        assert (answer.status_code, said in answer.json()["error"]) == (status, True), (body, answer.text)
    assert requests.get(f"{url}/get_reward", timeout=20).status_code == 405
    assert requests.get(f"{url}/", timeout=20).status_code == 404
    assert post(url, {"query": ["4"]}).status_code == 200, "and it goes on"


# -- a server of any scores, in this process --------------------------------------------------------------------------
def lengths(items):
    return [Score(float(len(item.response)), {"length": len(item.response)}) for item in items]


@pytest.fixture
def served():
    """``served(score, options) -> (server, thread that ends with it)``; ``server.stop`` ends it."""
    made = []

    def start(score=lengths, **given):
        server = RewardServer(ServerConfig(port=0, **given), score)
        server.stop = threading.Event()
        thread = threading.Thread(target=server.run, args=(server.stop.is_set, ), daemon=True)
        thread.start()
        made.append((server, thread))
        return server, thread

    yield start
    for server, thread in made:
        server.stop.set()
        thread.join(20)
        assert not thread.is_alive()


def test_requests_that_come_together_are_scored_together(served):
    """While one is scored others wait; one that cannot be scored does not spoil them, nor does one that nobody awaits.
    """
    begun, go, sizes = threading.Event(), threading.Event(), []

    def score(items):
        begun.set()
        go.wait(20)
        sizes.append(len(items))
        if any(item.response == "bad" for item in items):
            raise ValueError("a secret of the server")
        return lengths(items)

    server, _ = served(score)
    with ThreadPoolExecutor(12) as pool:
        first = pool.submit(post, server.url, {"query": ["x"]})
        assert begun.wait(20)
        waiting = [pool.submit(post, server.url, {"query": ["y" * i, "z"]}) for i in range(1, 10)]
        bad = pool.submit(post, server.url, {"query": ["bad"]})
        while len(server.queue) < 19:
            time.sleep(0.01)
        go.set()
        assert first.result().json()["rewards"] == [1.0]
        assert [one.result().json()["rewards"] for one in waiting] == [[float(i), 1.0] for i in range(1, 10)]
        assert bad.result().status_code == 500 and "ValueError" in bad.result().json()["error"]
    assert "secret" not in bad.result().text and sizes[:2] == [1, 19] and sorted(sizes[2:]) == [1] + [2] * 9


def test_the_time_limit_of_futures_is_that_of_sockets(monkeypatch):
    """Before Python 3.11 they are two classes."""
    late = type("Late", (Exception, ), {})
    monkeypatch.setattr(server_module, "FutureTimeout", late)
    monkeypatch.setattr(server_module.Future, "result", Mock(side_effect=late))
    with pytest.raises(TimeoutError):
        server_module.RequestQueue(lengths).ask([], 0.0)


def test_what_takes_too_long_is_refused(served):
    """A score that is late, a body that does not come, and one that is too large, of which the client hears."""
    go = threading.Event()
    server, _ = served(lambda items: lengths(items) if go.wait(20) else [], request_timeout_s=0.5, max_body_mib=1)
    late = post(server.url, {"query": ["x"]})
    assert late.status_code == 503 and "not scored within 0.5 s" in late.json()["error"]
    assert late.headers["Retry-After"] == "1"
    go.set()
    large = post(server.url, {"query": ["x" * 3_000_000]})
    assert large.status_code == 413 and "more than 1048576 (--max_body_mib)" in large.json()["error"]
    twice, length = b"Content-Length: 2\r\n", b'Content-Length: 16\r\n\r\n{"query": ["x"]}'
    for sent, said in ((b"Content-Length: 9\r\n\r\n{", b" 408 "), (b"\r\n", b" 411 "), (length, b" 200 "),
                       (twice + length, b" 411 "), (b"Transfer-Encoding: chunked\r\n" + length, b" 411 "),
                       (b"Content-Length: -1\r\n\r\n", b" 411 ")):  # yapf: disable
        with socket.create_connection(("127.0.0.1", server.server_port)) as bare:
            bare.sendall(b"POST /get_reward HTTP/1.1\r\nHost: x\r\n" + sent)
            assert said in bare.makefile("rb").readline()
    with socket.create_connection(("127.0.0.1", server.server_port)) as bare:
        body = b"GET /health HTTP/1.1\r\n\r\n"
        bare.sendall(b"GET /health HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        assert bare.makefile("rb").read().count(b"HTTP/1.1 200") == 1, "a body is no request"
    with socket.create_connection(("127.0.0.1", server.server_port)) as left:
        left.sendall(b"POST /get_reward HTTP/1.1\r\nContent-Length: 99\r\n\r\n")
    assert post(server.url, {"query": ["x"]}).json()["rewards"] == [1.0], "and it goes on"


def test_a_request_under_way_is_answered_when_the_server_ends(served):
    begun, go = threading.Event(), threading.Event()
    server, thread = served(lambda items: lengths(items) if begun.set() or go.wait(20) else [])
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, server.url, {"query": ["xx"]})
        assert begun.wait(20)
        second = pool.submit(post, server.url, {"query": ["xxx"]})
        while len(server.queue) < 1:
            time.sleep(0.01)
        server.stop.set()
        go.set()
        assert first.result().json()["rewards"] == [2.0] and second.result().json()["rewards"] == [3.0]
    thread.join(20)
    with pytest.raises(requests.ConnectionError):
        post(server.url, {"query": ["x"]})


def test_options_that_do_not_fit_are_refused(scorers, served, capsys):
    taken, _ = served()
    for given, said in (
        ({}, "--reward_pretrain is missing"),
        ({"reward_pretrain": "/nowhere"}, "--reward_pretrain /nowhere: no such folder"),
        ({"reward_pretrain": scorers[0], "reward": "rm2=1"}, "--reward rm2=1: a server scores only with its models"),
        ({"reward_pretrain": scorers[0], "value_head_prefix": "v"}, "has no v.weight; its heads: score"),
        ({"reward_pretrain": scorers[0], "reward": "rm=x"}, "the weight after = must be a number"),
        ({"reward_pretrain": scorers[0], "port": taken.server_port}, "cannot listen there"),
        ({"reward_pretrain": scorers[0], "port": taken.server_port, "batch_size": 16}, "--batch_size has no effect"),
    ):  # yapf: disable
        with pytest.raises(SystemExit) as done:
            main(launch.flags(given))
        assert done.value.code == 2 and said in capsys.readouterr().err, said


def test_every_option_is_shown_here_or_by_its_part():
    """Of those not flipped above, a pass bounds its tokens in test_neural, as it computes in bfloat16."""
    shown = {"reward_pretrain", "reward", "normalize_reward", "value_head_prefix", "max_len", "port", "max_texts",
             "max_body_mib", "request_timeout_s"}  # yapf: disable
    assert set(options(ServeConfig)) - shown == {"max_tokens_per_micro_batch", "bf16", "host"}
