"""Workers of environments: sessions stay in theirs, and a call that hangs, raises, dies or floods costs its response
alone."""
import asyncio
import contextvars
import gc
import os
import resource
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch

from lightrft.environments import interop, pool as pool_module
from lightrft.environments.base import EnvironmentSpec, Failure, Step, Task, Turn
from lightrft.environments.loading import load
from lightrft.environments.opening import spec_of
from lightrft.environments.pool import EnvironmentPool
from lightrft.environments.worker import answered, Session
from lightrft.tests.support import environments
from lightrft.tests.support.processes import alive, wait_until
from lightrft.utils.errors import UserError

FILE, LIMIT_S = environments.__file__, 1.0
TRAINER = """
import sys, time
from lightrft.environments.base import EnvironmentSpec, Task, Turn
from lightrft.environments.pool import EnvironmentPool
pool = EnvironmentPool(EnvironmentSpec(sys.argv[1], "Faulty"), 2, 60.0)
opened = [pool.reset(Task("u", "text"), seed) for seed in (0, 1)]
sessions = [session for session, answer in opened if answer.result(60)]
pool.step(sessions[1], Turn("print")).result(60)
started = [pool.step(session, Turn("start")).result(60).messages[0]["content"] for session in sessions]
pool.step(sessions[0], Turn("hang"))
print(*pool.pids, *started, flush=True)
time.sleep(60)
"""


@pytest.fixture(name="pool", scope="module")
def fixture_pool():
    pool = EnvironmentPool(EnvironmentSpec(FILE, "Faulty"), 2, LIMIT_S)
    yield pool
    pool.shutdown()
    assert not pool.pids, "a worker outlives its pool"


def opened(pool, seeds):
    sessions = [pool.reset(Task("u", "text"), seed) for seed in seeds]
    for (_, future), seed in zip(sessions, seeds):
        assert future.result(20).messages == [{"role": "user", "content": f"seed {seed}"}]
    return [session for session, _ in sessions]


def step(pool, session, text, limit_s=20):
    return pool.step(session, Turn(text)).result(limit_s)


def test_sessions_have_their_own_state(pool):
    sessions = opened(pool, range(6))
    assert len(pool.pids) == 2, "--env_workers"
    for number in (1, 2):
        futures = [pool.step(session, Turn("a")) for session in sessions]
        for seed, future in enumerate(futures):
            answer = future.result(20)
            assert answer == Step([{"role": "user", "content": f"a {seed} {number}"}], 0.5)
    for session in sessions:
        pool.close(session)


@pytest.mark.parametrize("value", ["good", [], [[1]], {}, torch.ones(2)])
def test_a_reward_that_is_no_number_is_named(value):
    with pytest.raises(TypeError, match="a reward or metric of an environment is .*, and must be a number"):
        interop.number(value)


def test_a_fault_costs_its_response_alone_and_no_other_waits(pool):
    sessions, start = opened(pool, range(6)), time.monotonic()
    futures = [pool.step(session, Turn(text))
               for session, text in zip(sessions, ("hang", "raise", "flood", "wrong", "a", "b"))]  # yapf: disable
    answers = [future.result(20) for future in futures[1:]]
    assert time.monotonic() - start < LIMIT_S, "the one that hangs held up others"
    assert [answer.cause for answer in answers[:3]] == ["exception"] * 3 and all(
        word in answer.detail for word, answer in zip(("KeyError", "bytes", "must return a Step"), answers))
    assert "asyncio" not in answers[0].detail and "environments.py" in answers[0].detail, "frames of the library"
    assert answers[3].messages[0]["content"] == "a 4 1" and answers[4].reward == 0.5
    late = futures[0].result(20)
    assert late.cause == "timeout" and "--env_timeout_s" in late.detail
    assert LIMIT_S <= time.monotonic() - start < LIMIT_S + 3
    assert step(pool, sessions[4], "a").messages[0]["content"] == "a 4 2", "its worker lives on for it"
    for session in sessions:
        pool.close(session)


def test_what_a_tool_raises_is_its_own(pool):
    """Not the end of its worker, of the loop in it, or of the time of a call; half a character is replaced."""
    sessions, pids = opened(pool, range(2)), pool.pids
    raised = {"quit": "SystemExit", "quit in a task": "SystemExit", "interrupt": "KeyboardInterrupt",
              "next": "StopIteration", "late": "TimeoutError", "role": "the role 'narrator'"}  # yapf: disable
    for text, word in raised.items():
        answer = step(pool, sessions[0], text, LIMIT_S)
        assert answer.cause == "exception" and word in answer.detail
    assert step(pool, sessions[0], "half").messages[0]["content"] == "a\ufffd b\U0001f600"
    assert step(pool, sessions[1], "a").messages and pool.pids == pids
    for session in sessions:
        pool.close(session)


def test_a_worker_that_dies_takes_its_sessions_and_is_replaced(pool):
    """So do the processes that the environment has started."""
    sessions = opened(pool, range(2))
    child = int(step(pool, sessions[0], "start").messages[0]["content"])
    assert step(pool, sessions[0], "exit") == Failure("worker_died", "the worker process ended with exit code 3")
    assert wait_until(lambda: not alive(child)), "what the environment has started"
    assert step(pool, sessions[0], "a").cause == "worker_died", "a dead session answers at once"
    assert step(pool, sessions[1], "a").messages, "it is in the other worker"
    sessions += opened(pool, range(2, 4))
    for session in sessions:
        pool.close(session)


def test_nothing_outlives_a_killed_trainer():
    """Neither its workers, one of which hangs, nor what their tools have started. What a tool prints is labelled, and
    not in the standard output of the trainer."""
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, FILE], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)  # yapf: disable
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 4 and all(map(alive, pids))
    groups = {os.getpgid(pid) for pid in pids}
    trainer.kill()
    trainer.wait()
    assert wait_until(lambda: not any(map(alive, pids))), "a process outlived the trainer"
    assert wait_until(lambda: not any(map(has_members, groups))), "a guard outlived its worker"
    assert f"[env worker {pids[1]}] one\n[env worker {pids[1]}] two\n" in trainer.stderr.read()


def has_members(group):
    """True if a process of a group is alive."""
    members = subprocess.run(["ps", "-eo", "pgid=,stat="], stdout=subprocess.PIPE, text=True, check=True).stdout
    return any(line.split()[0] == str(group) and "Z" not in line.split()[1] for line in members.splitlines())


def test_a_worker_that_the_system_does_not_start(caplog):
    """The first one is an error with a remedy; further ones are done without."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = EnvironmentPool(EnvironmentSpec(FILE, "Faulty"), 2, LIMIT_S)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot be started: Too many open files. .*ulimit -n.*--env_workers"):
            EnvironmentPool(EnvironmentSpec(FILE, "Faulty"), 1, LIMIT_S)
        sessions = opened(spare, range(3))
        answers = [step(spare, session, "a") for session in sessions]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    pids = spare.pids
    del spare
    gc.collect()
    assert pids and wait_until(lambda: not any(map(alive, pids))), "workers outlive a pool that nobody has"
    assert [answer.messages[0]["content"] for answer in answers] == ["a 0 1", "a 1 1", "a 2 1"]
    assert caplog.text.count("The run goes on with the workers that it has") == 1


def test_a_further_worker_that_hangs_and_environments_that_are_open_at_the_end(tmp_path, monkeypatch, caplog):
    """The first costs its responses, with the reason; the others are closed, and a close() that raises is told once.
    One whose method hangs is closed before its response is."""
    file = tmp_path / "mine.py"
    file.write_text("from lightrft.tests.support.environments import Locked\n\n\nclass Mine(Locked):\n    pass\n")
    monkeypatch.setenv("LOCKED", str(tmp_path))
    mine = EnvironmentPool(EnvironmentSpec(str(file)), 2, LIMIT_S)
    monkeypatch.setattr(pool_module, "LOAD_LIMIT_S", 1.0)
    (first, answer), (second, lost) = [mine.reset(Task("u", "text"), seed) for seed in (0, 2)]
    assert answer.result(20).messages == []
    assert lost.result(20) == Failure("worker_died", "the environment was not loaded within 1 s")
    monkeypatch.setattr(mine, "count", 1)
    others = [mine.reset(Task("u", "text"), seed) for seed in (1, 3, 4, 5)]
    assert all(answer.result(20).messages == [] for _, answer in others)
    assert step(mine, others[-1][0], "hang").cause == "timeout"
    assert wait_until((tmp_path / "closed").exists)
    for session in (first, second, others[0][0], others[-1][0]):
        mine.close(session)
    mine.shutdown()
    assert sorted((tmp_path / "closed").read_text().split()) == ["0", "3", "4", "5"]
    assert caplog.text.count("close() of an environment failed (exception)") == 1 and "stuck" in caplog.text


@pytest.mark.parametrize("patience_s, order", [(30.0, ["step", "close"]), (0.0, ["close", "step"])])
def test_close_comes_behind_a_method_that_ends_and_beside_one_that_hangs(patience_s, order):
    happened, entered, left = [], threading.Event(), threading.Event()

    class Slow:

        def reset(self, prompt, seed):
            """Begin."""

        def step(self, turn):
            entered.set()
            left.wait()
            happened.append("step")

        def close(self):
            happened.append("close")
            left.set()

    async def played():
        session = Session(Slow)
        await session.reset(Task("u", "text"), 1)
        call = asyncio.create_task(session.step(Turn("a")))
        await asyncio.to_thread(entered.wait)
        call.cancel()
        session.late = True
        closing = asyncio.create_task(session.close(patience_s))
        await asyncio.sleep(0.05)
        if patience_s:
            left.set()
        await closing
        session.forget()

    asyncio.run(played())
    assert wait_until(lambda: happened == order)


NUMBER: contextvars.ContextVar[int] = contextvars.ContextVar("NUMBER")


class Connected:
    """Has a connection, as to a server of tools (MCP): only the task that opens it may close it. It may be lost."""

    async def reset(self, prompt, seed):
        self.task = asyncio.current_task()
        NUMBER.set(seed)

    async def step(self, turn):
        assert asyncio.current_task() is self.task
        if turn.text == "lost":
            asyncio.get_running_loop().call_later(0.01, self.task.cancel)
        await asyncio.sleep(60 if turn.text == "hang" else 0)
        return Step(f"{turn.text} {NUMBER.get()}")

    async def close(self):
        assert asyncio.current_task() is self.task
        Connected.closed = True


def test_async_methods_of_an_object_share_a_task_and_its_context():
    """Also behind one that took too long, and where the task is cancelled between two of them."""

    async def played():
        session = Session(Connected)
        call = partial(session.lane.within, 5.0)
        await call(session.reset(Task("u", "text"), 7))
        answers = [await call(session.step(Turn(text))) for text in ("a", "lost")]
        await asyncio.sleep(0.1)
        answers.append(await call(session.step(Turn("b"))))
        late = await session.lane.within(0.1, answered(session.step, [Turn("hang")]))
        session.late = True
        await session.renew()
        await call(session.close())
        session.forget()
        return [answer["messages"][0]["content"] for answer in answers], late

    assert asyncio.run(played()) == (["a 7", "lost 7", "b 7"], None) and Connected.closed


DECK = "class Deck:\n    def reset(self): pass\n    def draw(self, n): pass\n"
GAME = "class Game:\n    def reset(self, prompt, seed): pass\n    def step(self, turn): pass\n"
OF_URL = GAME.replace("    def r", "    def __init__(self, url): pass\n    def r")


def test_a_class_that_helps_is_no_environment(tmp_path):
    """It may have a method reset, and others without hints."""
    file = tmp_path / "mine.py"
    file.write_text(DECK + GAME)
    assert type(load(EnvironmentSpec(str(file)))[0]()).__name__ == "Game"
    for text, name, words in ((f"{DECK}tools = [len]", "", r"1 of its classes .*\(Deck\), beside the list tools. Give"),
                              (DECK, "", "the tool 'draw'"), (f"{DECK}tools = [len]", "tools", "the tool 'len'"),
                              (OF_URL, "", "Game needs url, and an object of it is made for each response")):
        file.write_text(text)
        with pytest.raises(UserError, match=words):
            load(EnvironmentSpec(str(file), name))
    with pytest.raises(UserError, match="environment tools cannot be loaded .*'gone'.* behind a decorator"):
        load(EnvironmentSpec(name="tools", pickled=b"cbuiltins\ngone\n."))


def test_what_is_no_environment_is_told_at_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    other = "class A:\n    def restart(self, prompt, seed): pass"
    two = "class A:\n    def turn(self, p, r): pass\nclass B(A):\n    pass"
    for text, word in (("import no_such_name", "raises while it is imported"), ("x = 1", "0 of its classes are"),
                       (other, r"\(none; A has restart\(self, prompt, seed\)\). Give"),
                       (two, "FILE:NAME")):  # yapf: disable
        file.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=word):
            EnvironmentPool(EnvironmentSpec(str(file)), 1, LIMIT_S)
    with pytest.raises(UserError, match=r"unknown environment 'mine' \(did you mean mine.py\?\); give a file path.py"):
        spec_of("mine", {})
