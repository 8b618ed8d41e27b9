"""Reward servers, real ones on the loopback: work is shared, failures are unscored with a cause."""
import json
import threading
import time

import pytest

from lightrft.rewards.base import RewardInput
from lightrft.rewards.remote import MAX_CHUNK, RemoteReward, RequestFailed, Size
from lightrft.rewards.validation import RewardProbeError, probe

ITEMS = [RewardInput("p:", "x" * i, reference=i) for i in range(24)]


def lengths(body, seconds=0.0):
    time.sleep(seconds)
    return 200, json.dumps({"rewards": [len(query) - 2 for query in body["query"]]}).encode()


def score(manager, items=ITEMS):
    return manager.collect(manager.submit(items))


def test_rewards_come_back_in_order_with_logs(serve, make_manager):
    url, bodies = serve(lambda body: (200,
                                      json.dumps({
                                          "rewards": body["references"], "scores": body["labels"], "extra_logs":
                                          {"n": [len(q) for q in body["queries"]]}
                                      }).encode()))
    scores = score(make_manager(remote_rm_url=[url]))
    assert [s.total for s in scores] == [float(i) for i in range(24)], scores
    assert scores[3].parts == {"remote": 3.0, "remote/scores": 3.0, "remote/n": 5.0}, scores[3]
    assert bodies[0]["query"] == bodies[0]["queries"] and bodies[0]["prompts"][0] == "p:", "the fields of both dialects"


def test_it_adds_to_the_parts_of_reward(serve, make_manager):
    url, _ = serve(lengths)
    manager = make_manager("exact=2", remote_rm_url=[url])
    assert score(manager, [RewardInput("p:", r"\boxed{5}", reference="5")])[0].total == 2.0 + 9.0, "2 * exact + remote"


def test_a_function_that_is_named_like_the_servers_is_a_part_of_its_own(serve, make_manager, tmp_path):
    url, _ = serve(lengths)
    (tmp_path / "own.py").write_text("def remote(data_source, solution_str, ground_truth):\n    return 10.0\n")
    (found, ) = score(make_manager(f"{tmp_path / 'own.py'}=2", remote_rm_url=[url]), ITEMS[3:4])
    assert (found.parts, found.total) == ({"own.remote": 10.0, "remote": 3.0}, 23.0)


def test_the_faster_server_gets_more_and_both_work(serve, make_manager):
    slow, slow_bodies = serve(lambda body: lengths(body, 0.3))
    fast, fast_bodies = serve(lambda body: lengths(body, 0.02))
    manager = make_manager(remote_rm_url=[slow, fast])
    first = score(manager)
    assert slow_bodies and fast_bodies, "both were asked"
    for _ in range(3):
        manager.submit(ITEMS)
    scores = score(manager)
    assert [s.total for s in scores] == [s.total for s in first] == [float(i)
                                                                     for i in range(24)], "the answers are in order"
    assert len(fast_bodies) > 1.5 * len(slow_bodies) > 0, (len(fast_bodies), len(slow_bodies))


def test_a_dead_server_is_bypassed(serve, make_manager):
    url, bodies = serve(lengths)
    manager = make_manager(remote_rm_url=["http://127.0.0.1:9/rm", url])
    assert [s.total for s in score(manager)] == [float(i) for i in range(24)], "the other one took all"


def test_a_passing_fault_is_retried(serve, make_manager):
    calls = []
    url, _ = serve(lambda body: (503, b"busy") if calls.append(1) or len(calls) < 3 else lengths(body))
    assert [s.total for s in score(make_manager(remote_rm_url=[url]), ITEMS[:1])] == [0.0] and len(calls) == 3, calls


@pytest.mark.parametrize("reply, error", [
    (lambda body: (200, b"<html>"), "wrong_json"),
    (lambda body: (200, b"[1, 2]"), "wrong_json"),
    (lambda body: (200, b'{"reward": 1}'), "wrong_json"),
    (lambda body: (200, b'{"rewards": [1, 2]}'), "wrong_length"),
    (lambda body: (200, b'{"rewards": null}'), "none"),
    (lambda body: (200, b'{"rewards": [NaN]}'), "not_finite"),
    (lambda body: (500, b"traceback of the server"), "http_status"),
    (lambda body: lengths(body, 1.0), "timeout"),
])
def test_a_bad_answer_is_unscored_with_its_cause(serve, make_manager, reply, error):
    url, bodies = serve(reply)
    manager = make_manager(remote_rm_url=[url], reward_timeout_s=0.3)
    assert [(s.total, s.error) for s in score(manager, ITEMS[:1])] == [(None, error)], error
    assert len(bodies) <= 3, "bounded tries"


def test_no_server_at_all(make_manager):
    manager = make_manager(remote_rm_url=["http://127.0.0.1:9/rm"], reward_timeout_s=0.5)
    assert {s.error for s in score(manager, ITEMS[:3])} == {"unreachable"}, "nobody there"
    with pytest.raises(RewardProbeError, match="unreachable.*Remedy.*server"):
        probe(manager, [RewardInput("q", "", reference="5")])


def test_pauses_between_tries_grow_and_are_as_long_as_the_server_asks_for():
    pause = RemoteReward(["http://127.0.0.1:9"], limit_s=5.0)._pause_s
    assert [pause(tried, RequestFailed("http_status", "busy")) for tried in range(3)] == [0.0, 0.01, 0.02]
    assert [pause(1, RequestFailed("http_status", "busy", wait_s)) for wait_s in (3.0, 60.0)] == [3.0, 5.0]


def slow_for(body, seconds):
    time.sleep(seconds * len(body["query"]))
    return lengths(body)


@pytest.mark.parametrize("spoil, error", [
    (lambda body: (500, b"") if "p:xx" in body["query"] else lengths(body), "http_status"),
    (lambda body: (200, b"<html>") if "p:xx" in body["query"] else lengths(body), "wrong_json"),
    (lambda body: (200, b'{"rewards": [1, 2]}') if "p:xx" in body["query"] else lengths(body), "wrong_length"),
    (lambda body: lengths(body, 3.0 if "p:xx" in body["query"] else 0.0), "timeout"),
])
def test_a_response_that_spoils_its_request_is_left_out_alone(serve, make_manager, spoil, error):
    url, _ = serve(spoil)
    scores = score(make_manager(remote_rm_url=[url], reward_timeout_s=1.0))
    assert [s.total for s in scores] == [None if i == 2 else float(i) for i in range(24)]
    assert scores[2].error == error


def test_a_server_that_needs_time_for_each_response_gets_fewer(serve, make_manager):
    url, bodies = serve(lambda body: slow_for(body, 0.1))
    manager = make_manager(remote_rm_url=[url], reward_timeout_s=1.0)
    assert [s.total for s in score(manager)] == [float(i) for i in range(24)], "too many at once is our mistake"
    assert manager.remote.size.most < 12 == max(len(body["query"]) for body in bodies)


def test_requests_grow_again_after_a_slow_moment(serve, make_manager):
    slow = [0.1]
    url, bodies = serve(lambda body: slow_for(body, slow[0]))
    manager = make_manager(remote_rm_url=[url], reward_timeout_s=1.0)
    score(manager)
    assert manager.remote.size.most < 12
    slow[0] = 0.0
    for _ in range(3):
        assert None not in [s.total for s in score(manager, ITEMS * 8)]
    assert manager.remote.size.most == max(len(body["query"]) for body in bodies) == MAX_CHUNK


def test_the_size_of_requests_does_not_depend_on_who_tells_first():
    size = Size(32)
    size.late(8)
    size.late(32)
    assert size.most == 4, "a late request of 32 says less than one of 8"
    size.soon(3)
    assert size.most == 4, "nor does a prompt one of 3 say that 8 are few"
    sizes = [size.soon(size.most) or size.most for _ in range(4)]
    assert sizes == [8, 16, 32, 32]
    size.late(1)
    assert size.most == 1


def test_a_server_that_hangs_is_given_up_for_all_groups_and_asked_again_in_the_next_step(serve, make_manager):
    answers = threading.Event()
    url, bodies = serve(lambda body: lengths(body) if answers.wait(60) else None)
    manager = make_manager(remote_rm_url=[url], reward_timeout_s=0.3)
    handles = [manager.submit(ITEMS[:2]) for _ in range(64)]
    assert {s.error for handle in handles for s in manager.collect(handle)} == {"timeout"}
    assert len(bodies) <= 20, "8 limits of two requests at once, for 128 responses"
    answers.set()
    assert [s.total for s in score(manager, ITEMS[:2])] == [0.0, 1.0]


def test_a_server_that_never_answers_is_given_up(serve, make_manager):
    url, bodies = serve(lambda body: lengths(body, 2.0))
    scores = score(make_manager(remote_rm_url=[url], reward_timeout_s=0.1))
    assert {s.error for s in scores} == {"timeout"} and len(bodies) < 24, "it was asked for every response"


def test_only_the_nan_of_a_batch_is_unscored(serve, make_manager):
    url, _ = serve(lambda body: (
        200, json.dumps({"rewards": [1.0 if q != "p:xx" else float("nan") for q in body["query"]]}).encode()))
    scores = score(make_manager(remote_rm_url=[url]))
    assert [i for i, s in enumerate(scores) if s.total is None] == [2], scores
