"""A judge behind a real HTTP server on the loopback: what it is asked, how its answer is read, and what is unscored."""
import json
import threading
import time

import pytest

from lightrft.rewards.base import RewardInput
from lightrft.rewards.validation import RewardProbeError, probe
from lightrft.utils.errors import UserError

ITEM = RewardInput("2+2?", "It is 4.", reference="4", columns={"level": "easy"})


def said(text, *headers):
    """The answer of a server whose model says ``text``."""
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode(), *headers


@pytest.fixture
def judged(serve, make_manager, monkeypatch):
    """``judged(reply, items, **options)`` -> (scores, bodies, headers of the requests)."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def run(reply, items=(ITEM, ), entry="judge=0.1", **options):
        seen = []
        url, bodies = serve(reply, seen)
        manager = make_manager(entry, judge_url=[url.replace("/rm", "/v1/")], judge_model="big", **options)
        return manager.collect(manager.submit(list(items))), bodies, seen

    return run


def test_the_judge_is_asked_and_its_last_score_counts(judged, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    (score, ), (body, ), (headers, ) = judged(lambda body: said("Not Score: 3, better.\n**Score:** 8"))
    assert score.total == pytest.approx(0.8) and score.parts == {"judge": 8.0} and score.weights == {"judge": 0.1}
    assert headers["Authorization"] == "Bearer secret" and body["model"] == "big"
    assert body["temperature"] == 0 and body["max_tokens"] == 1024
    (message, ) = body["messages"]
    assert message["role"] == "user" and all(text in message["content"] for text in ("2+2?", "It is 4.", "Score: N"))


def test_template_score_key_and_arguments_are_the_users(judged, tmp_path, monkeypatch):
    (tmp_path / "ask.txt").write_text('{"q": "{prompt}", "a": "{response}", "level": "{level}", "other": {none}}')
    monkeypatch.setenv("MY_KEY", "mine")
    chat = [{"role": "user", "content": "2+2?"}]
    item = RewardInput("<|user|>2+2?", "4 {prompt}", chat, columns=ITEM.columns)
    (score, ), (body, ), (headers, ) = judged(lambda body: said("grade -2.5 of 5"), [item],
                                              judge_template=str(tmp_path / "ask.txt"), judge_key_env="MY_KEY",
                                              judge_score=r"grade (\S+)",
                                              judge_args=["max_tokens=null", "temperature=0.5", "stop=[a]"])
    assert score.parts == {"judge": -2.5} and headers["Authorization"] == "Bearer mine"
    assert body["messages"][0]["content"] == (
        '{"q": "user: 2+2?", "a": "4 {prompt}", "level": "easy", "other": {none}}')
    assert "max_tokens" not in body and body["temperature"] == 0.5 and body["stop"] == ["a"]


def test_no_key_is_sent_where_there_is_none(judged, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert "Authorization" not in judged(lambda body: said("Score: 1"))[2][0]


@pytest.mark.parametrize("reply,error", [
    ((401, b"wrong key"), "http_status"),
    ((200, b"no json"), "wrong_json"),
    ((200, b'{"choices": []}'), "wrong_json"),
    (said("I will not judge this."), "no_score"),
    (said(None), "no_score"),
])
def test_a_failure_is_unscored_and_never_0(judged, reply, error):
    (score, ), *_ = judged(lambda body: reply)
    assert (score.total, score.parts, score.error) == (None, {"judge": None}, error)


def test_a_busy_judge_is_asked_again_when_it_says(judged):
    """A rate limit is no failure: the pause that the server asks for is kept."""
    replies = iter([(429, b"slow down", ("Retry-After", "1")), (503, b"soon"), said("Score: 7")])
    times = []

    def reply(body):
        times.append(time.monotonic())
        return next(replies)

    (score, ), bodies, _ = judged(reply)
    assert score.parts == {"judge": 7.0} and len(bodies) == 3 and times[1] - times[0] >= 0.95, score


def test_as_many_requests_as_allowed_are_in_flight(judged):
    """Each waits for three others, and there is never a fifth."""
    together, lock, now = threading.Barrier(4), threading.Lock(), [0, 0]

    def reply(body):
        with lock:
            now[0] += 1
            now[1] = max(now)
        together.wait(20)
        with lock:
            now[0] -= 1
        return said("Score: 5")

    scores, bodies, _ = judged(reply, [ITEM] * 12, judge_concurrency=4, judge_timeout_s=30.0)
    assert [score.parts["judge"] for score in scores] == [5.0] * 12 and len(bodies) == 12 and now[1] == 4


def test_its_time_limit_is_its_own(judged):

    def slow(body):
        time.sleep(1.0)
        return said("Score: 5")

    assert judged(slow, judge_timeout_s=0.2)[0][0].error == "timeout"
    assert judged(slow, reward_timeout_s=0.2)[0][0].total == 0.5, "--reward_timeout_s is that of the other rewards"


def test_the_probe_stops_a_run_whose_judge_does_not_work(serve, make_manager):
    url, _ = serve(lambda body: (404, b"no such model"))
    manager = make_manager("judge", judge_url=[url], judge_model="bgi")
    with pytest.raises(RewardProbeError, match="no answer .* could be scored: http_status"):
        probe(manager, [ITEM])


def test_a_template_without_the_response_is_refused(make_manager, tmp_path):
    (tmp_path / "ask.txt").write_text("Is {prompt} good?")
    with pytest.raises(UserError, match="ask.txt: does not show the response; write {response}"):
        make_manager("judge", judge_url=["http://127.0.0.1:9"], judge_model="m",
                     judge_template=str(tmp_path / "ask.txt"))
    with pytest.raises(UserError, match="--reward judge: needs --judge_url"):
        make_manager("judge")
