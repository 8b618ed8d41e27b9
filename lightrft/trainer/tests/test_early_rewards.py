"""Rewards that start as soon as their response is finished: when they are called, and that it changes nothing."""
import json
import re
import threading
import time
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from lightrft.tests.support import runs, tiny_task
from lightrft.tests.support.processes import POLL_S
from lightrft.trainer.fast_exp_maker import NaiveExperienceMaker

no_picture = runs.no_picture
SIZE = 4
OPTIONS = {
    "n_samples_per_prompt": SIZE, "train_batch_size": 4 * SIZE, "generate_max_len": 24, "save_trajectories": True
}
VOLATILE = re.compile("time/|perf/|.*tokens_per_s$")

ONE = """
import json

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open({log!r}, "a") as log:
        log.write(json.dumps([solution_str]) + chr(10))
    number = sum((i + 1) * ord(letter) for i, letter in enumerate(solution_str)) % 11
    if number == 3:
        raise ValueError("three")
    return None if number == 4 else {{"score": number / 11, "size": len(solution_str)}}
"""

LISTS = """
import json

def judge(prompts, completions, **columns):
    with open({log!r}, "a") as log:
        log.write(json.dumps(completions) + chr(10))
    groups = [[other for p, other in zip(prompts, completions) if p == prompt] for prompt in prompts]
    return [sum(text < other for other in group) for text, group in zip(completions, groups)]
"""  # the rank of a response in its group


@pytest.fixture
def server(tmp_path):
    """A reward server that logs the responses of every request; it refuses those with some letter."""
    log, lock = tmp_path / "server.log", threading.Lock()

    class Handler(BaseHTTPRequestHandler):

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            texts = [query[len(prompt):] for query, prompt in zip(asked["query"], asked["prompts"])]
            with lock, log.open("a") as file:
                file.write(json.dumps(texts) + "\n")
            spoilt = any(len(text) % 5 == 3 for text in texts)
            answer = json.dumps({"rewards": [len(text) / 7 for text in texts]}).encode()
            self.send_response(500 if spoilt else 200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            return None

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    threading.Thread(target=made.serve_forever, args=(POLL_S, ), daemon=True).start()
    yield {"remote_rm_url": [f"http://127.0.0.1:{made.server_port}"]}, log
    made.shutdown()
    made.server_close()


@pytest.fixture(params=["compute_score", "lists", "server", "compute_score and lists"])
def reward(request, tmp_path, server):
    """Options of a reward, and the log of what it was asked: a list of responses per line."""
    if request.param == "server":
        return server
    log, files = tmp_path / "reward.log", []
    for name, code in (("compute_score", ONE), ("lists", LISTS)):
        if name in request.param:
            files.append(tmp_path / f"{name}.py")
            files[-1].write_text(code.format(log=str(log)), encoding="utf-8")
    return {"reward": [str(file) for file in files]}, log


def asked(log):
    return runs.read_lines(log) if log.exists() else []


def trainer(home, folder, **options):
    return runs.ready(home, folder, **OPTIONS | options)


def rollout(made, maker=None):
    made.engine.wake()
    return (maker or made.maker).make([made.loader.dataset[i] for i in range(4)], 0, 0.1)


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("reward", ["compute_score", "server", "compute_score and lists"], indirect=True)
def test_a_response_is_scored_before_the_last_one_of_its_group_has_ended(home, tmp_path, reward):
    """The engine is held up after every response, until the reward has been asked for it."""
    options, log = reward
    made, events, heard = trainer(home, tmp_path / "run", **options), [], Hearing()
    made.maker.listeners.append(heard)

    def patient(samples):
        events.extend(("ended", sample.group_id, sample.index) for sample in samples)
        for sample in samples:
            assert wait_for(lambda: any(sample.text in texts for texts in asked(log))), f"nobody saw {sample.text!r}"
            events.append(("scored", sample.group_id, sample.index))

    heard.arrived = patient
    done = rollout(made)
    made.maker.rewards.shutdown()
    assert len(done.episodes) == 4 * SIZE and sorted(events) == sorted(
        (what, i, j) for what in ("ended", "scored") for i in range(4) for j in range(SIZE))
    early = 0
    for i in range(4):
        first = next(at for at, (what, group, _) in enumerate(events) if (what, group) == ("scored", i))
        last = max(at for at, (what, group, _) in enumerate(events) if (what, group) == ("ended", i))
        early += first < last
    assert early >= 2, events


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("reward", ["lists"], indirect=True)
def test_a_function_of_lists_gets_whole_groups(workers, home, tmp_path, reward):
    options, log = reward
    made = trainer(home, tmp_path / "run", **options, reward_workers=workers)
    rows = rollout(made).episodes
    groups = [[row.text for row in rows[i:i + SIZE]] for i in range(0, 4 * SIZE, SIZE)]
    assert sorted(asked(log)) == sorted(groups), "in the order of the samples, a call for each group"
    ranks = [sum(text < other for other in group) for group in groups for text in group]
    assert [row.reward for row in rows] == ranks
    made.maker.rewards.shutdown()


def test_the_same_as_scoring_everything_at_the_end(home, tmp_path, reward):
    """Values, numbers for the metrics, and what is left unscored, with its cause."""
    options, _ = reward
    made = trainer(home, tmp_path / "run", **options, reward_workers=2)
    m = made.maker
    naive = NaiveExperienceMaker(m.config, m.strategy, m.engine, m.rewards, m.tokenizer, logprobs=m.logprobs,
                                 calculator=m.calculator, timer=m.timer)
    fast, slow = rollout(made), rollout(made, naive)
    m.rewards.shutdown()
    assert fast.episodes == slow.episodes and torch.equal(fast.exp.advantages, slow.exp.advantages)
    assert len({row.reward for row in fast.episodes} - {None}) > 2
    if "lists" not in str(options):
        assert {row.score.error for row in fast.episodes} > {None}, "nothing is left unscored here"


class Hearing:
    """A listener, whose ``arrived`` a test sets."""

    def during(self, groups):
        return nullcontext()

    def wants_each(self, prompts):
        return False

    def arrived(self, samples):
        """Do nothing."""

    def finished(self, group):
        """Do nothing: no test waits for whole groups."""


def steady(done):
    return [{key: value for key, value in line.items() if not VOLATILE.match(key)} for line in done.lines]


RUN = {"rollout_batch_size": 4, "max_steps": 4, "actor_learning_rate": 1e-2}


@pytest.mark.parametrize("reward", ["compute_score"], indirect=True)
@pytest.mark.parametrize("more", [{"dynamic_sampling": True}, {"oversample": 1.5}])
def test_whole_runs_are_the_same_as_with_the_rewards_of_groups(more, home, tmp_path, reward, monkeypatch):
    tiny_task.write_rows(home / "many.jsonl", tiny_task.rows(22))
    options, found = OPTIONS | RUN | reward[0] | more | {"prompt_data": [str(home / "many.jsonl")]}, {}
    for early in (True, False):
        found[early] = runs.run(home, tmp_path / str(early), **options)
        monkeypatch.setattr(type(found[early].trainer.maker), "reports_each", lambda *args: False)
    assert steady(found[True]) == steady(found[False]) and len(found[True].lines) == 4
    assert [found[True].rollout(step) for step in range(1, 5)] == [found[False].rollout(step) for step in range(1, 5)]
    assert all(torch.equal(value, found[False].weights[name]) for name, value in found[True].weights.items())


@pytest.mark.parametrize("reward", ["compute_score"], indirect=True)
def test_what_is_scored_of_an_unfinished_group_survives_and_is_not_asked_again(home, tmp_path, reward):
    tiny_task.write_rows(home / "many.jsonl", tiny_task.rows(22))
    options, log = OPTIONS | RUN | reward[0] | {"oversample": 2.0, "max_staleness": 2, "max_steps": 5}, reward[1]
    options |= {"prompt_data": [str(home / "many.jsonl")], "disable_ckpt": False}
    straight = runs.run(home, tmp_path / "a", **options)
    assert len(asked(log)) == 5 * 4 * SIZE, "every response is scored once"
    log.unlink()
    cut = runs.build(home, tmp_path / "b", **options)
    cut.strategy.any_rank = lambda value: cut.step == 3 or value
    cut.fit()
    carried = [
        sum(response.score is not None for response in group) for group in cut.source.groups.values()
        if any(response.open for response in group)
    ]
    assert any(carried), "no unfinished group has rewards"
    done = runs.run(home, tmp_path / "b", **options, load_checkpoint=True)
    assert steady(done) == steady(straight) and done.rollout(5) == straight.rollout(5)
    assert len(asked(log)) == 5 * 4 * SIZE, "a reward was asked again, or lost"
