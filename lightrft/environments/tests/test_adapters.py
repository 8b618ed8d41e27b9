"""Environments that were written for other trainers, played as their users wrote them."""
import asyncio
import re
import sqlite3
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from inspect import isawaitable
from itertools import count
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

from lightrft.environments import tools
from lightrft.environments.adapters import adapter_of
from lightrft.environments.base import EnvironmentSpec, Step, Task, ToolCall, Turn
from lightrft.environments.loading import load
from lightrft.environments.worker import plain, Session
from lightrft.tests.support import foreign_environments as foreign
from lightrft.utils.errors import UserError

ROOT = Path(__file__).parents[3]

TASK = Task("u", "<|im_start|>user\nsum", [{"role": "user", "content": "sum"}], reference="3",
            columns={"difficulty": 2})


def play(cls, *turns, columns=None):
    """What a class says to turns."""
    adapter, task = adapter_of(cls), TASK if columns is None else replace(TASK, columns=columns)

    async def played():
        environment = adapter.factory()

        async def call(method, *arguments):
            answer = getattr(environment, method)(*arguments)
            return await answer if isawaitable(answer) else answer

        answers = [await call("reset", task, 1), *[await call("step", turn) for turn in turns]]
        if hasattr(environment, "close"):
            await call("close")
        return answers

    return adapter.info, *asyncio.run(played())


def test_a_class_whose_methods_are_tools():
    info, opened, first, last = play(foreign.Counter, Turn("", (ToolCall("increment", {"step": 4}), )), Turn("done"))
    assert info.kind == "environment_factory" and [each["function"]["name"] for each in info.tools] == ["increment"]
    assert opened == "difficulty 2" and first.messages[0]["content"] == "4" and first.reward is None
    assert last.done and last.reward == 4.0


def test_inherited_methods_are_tools_too():
    more = type("More", (foreign.Counter, ), {"__doc__": "Adds a tool.", "look": look})
    assert [tool["function"]["name"] for tool in adapter_of(more).info.tools] == ["increment", "look"]
    assert adapter_of(type("Same", (foreign.Counter, ), {})).info.tools == adapter_of(foreign.Counter).info.tools


def look(self) -> str:
    """Look."""


class Database:
    """A class of TRL whose state belongs to the thread that made it."""

    def __init__(self):
        self.rows = sqlite3.connect(":memory:")

    def reset(self, **row):
        self.rows.execute("create table numbers(number)")
        return [{"type": "text", "text": " begin"}]

    def put(self, number: int) -> int:
        """Put a number.

        Args:
            number: What to put.
        """
        if number < 0:
            raise ValueError("Game over.")
        time.sleep(0.1 / (number + 1))
        self.rows.execute("insert into numbers values (?)", (number, ))
        return self.rows.execute("select count(*) from numbers").fetchone()[0]

    def get_reward(self):
        return np.float32(self.rows.execute("select sum(number) from numbers").fetchone()[0])

    def close(self):
        Database.last = self.rows.execute("select * from numbers").fetchall()


def test_methods_of_an_object_run_one_after_another_in_its_thread_and_their_errors_are_told(caplog, monkeypatch):
    """As TRL runs them."""
    monkeypatch.setattr(tools, "_ERRORS", count())
    opened, first, last = in_session(Database,
                                     Turn("", tuple(ToolCall("put", {"number": number}) for number in (0, 1, -1, 5))),
                                     Turn("done"))
    assert opened["messages"] == [{"role": "user", "content": " begin"}]
    assert [message["content"] for message in first["messages"]] == ["1", "2", '{"error": "Game over."}', "3"]
    assert first["metrics"] == {"wrong_calls": 1} and (last["done"], last["reward"]) == (True, 6.0)
    assert Database.last == [(0, ), (1, ), (5, )], "close() at the end"
    assert caplog.text.count("a tool raised an error, which the policy reads") == 1


def in_session(cls, *turns, columns={}):
    """What a session of a worker says to turns, until it is closed."""

    async def played():
        session = Session(adapter_of(cls).factory)
        try:
            answers = [await session.reset(replace(TASK, columns=columns), 1)]
            answers += [await session.step(turn) for turn in turns]
            await session.close()
            return answers
        finally:
            session.forget()

    return asyncio.run(played())


MADE: list[threading.Thread] = []


class SlowText(foreign.Text):

    def __init__(self):
        MADE.append(threading.current_thread())


class SlowSwift(foreign.SwiftEnv):

    def __init__(self, env_config):
        MADE.append(threading.current_thread())
        super().__init__(env_config)


class SlowRllm(foreign.RllmEnv):

    @staticmethod
    def from_dict(info):
        MADE.append(threading.current_thread())
        return foreign.RllmEnv(info["reference"])


def test_constructors_hold_up_nobody_else():
    """They run in the thread of their session, as methods do, and not in the loop of the worker."""
    for cls in (SlowText, SlowSwift, SlowRllm):
        in_session(cls, Turn("3"), columns={"extra_info": {"env_config": {"start": "3"}}})
    assert len(MADE) == 3 and threading.main_thread() not in MADE


def test_an_agent_that_writes_text():
    info, _, first, last = play(foreign.AgentInstance, Turn("1"), Turn("3"))
    assert info.writes_marks and (first.text, first.reward, first.done) == ("\nagain\n", 0.0, False)
    assert (last.text, last.reward, last.done, last.metrics) == (None, 1.0, True, {"tries": 1.0})
    as_its_base = type("Other", (foreign.AgentInstance, ), {"step": lambda self, state_dict, **kwargs: None})
    assert adapter_of(as_its_base).info == info


def test_an_agent_that_shows_pictures():

    async def step(self, states, **kwargs):
        return {"rewards": 0.0, "environment_feedback": "<image>", "environment_images": ["a.png"], "done": False}

    *_, first = play(type("Painter", (foreign.AgentInstance, ), {"step": step}), Turn("1"))
    assert (first.text, first.images, first.done) == ("<image>", ["a.png"], False)


def test_a_text_environment():
    info, opened, first, last = play(foreign.Text, Turn("1"), Turn("3"))
    assert opened == [{"role": "user", "content": "begin"}] and first.messages[0]["content"] == "not 1"
    assert (first.reward, first.done, last.done, first.metrics) == (0.5, False, True, {"n": 1.0})


@dataclass
class Level:
    """An environment whose objects need a number."""
    number: int

    def reset(self, prompt, seed):
        return f"level {self.number}"

    def step(self, turn):
        return Step(done=True)


class Far:
    """A class of TRL that needs an address."""

    def __init__(self, url):
        self.url = url

    def reset(self, **row):
        return self.url

    def look(self) -> str:
        """Look."""
        return self.url


def _level():
    return Level(5)


def _broken():
    raise ValueError("no level")


@pytest.mark.parametrize("made, opened", [
    (partial(Level, 3), "level 3"), (lambda: Level(4), "level 4"), (_level, "level 5"), (partial(Far, "a"), "a"),
    (partial(Far, url="b"), "b")])  # yapf: disable
def test_what_makes_an_environment_is_one(made, opened):
    """A partial or a function, as TRL's ``environment_factory`` may be; a function with a docstring is a tool."""
    factory, info = load(EnvironmentSpec(name="x", pickled=cloudpickle.dumps(made)))
    first, second = factory(), factory()
    task = TASK if info.kind == "environment_factory" else replace(TASK, columns={})
    answer = first.reset(task, 1)
    assert first is not second and (asyncio.run(answer) if isawaitable(answer) else answer) == opened


def test_a_broken_factory_is_told_and_a_function_for_no_environment_is_a_tool():
    with pytest.raises(UserError, match="makes environments, and raises:(\n.*)*ValueError: no level"):
        load(EnvironmentSpec(name="x", pickled=cloudpickle.dumps(_broken)))
    with pytest.raises(UserError, match="the tool '_nothing'.*has no docstring"):
        load(EnvironmentSpec(name="x", pickled=cloudpickle.dumps(_nothing)))


def _nothing():
    return "nothing"


@pytest.mark.parametrize("listed, names", [((), []), ([foreign.double], ["double"]), (
    [{"type": "function", "function": {"name": "f"}}, foreign.double], ["f", "double"])])  # yapf: disable
def test_tools_of_a_class_are_schemas_or_functions(listed, names):
    info = adapter_of(type("Game", (Level, ), {"tools": listed, "__init__": lambda self: None})).info
    assert [schema["function"]["name"] for schema in info.tools] == names


@pytest.mark.parametrize("wrong", [[{"name": "f"}], {"f": 1}, ["f"], property(lambda self: [])])
def test_tools_that_are_none_are_refused_at_the_start(wrong):
    with pytest.raises(UserError, match="the tools of the environment Game are .*expected a list of functions"):
        adapter_of(type("Game", (Level, ), {"tools": wrong, "__init__": lambda self: None}))


def test_what_has_no_known_interface():
    assert adapter_of(dict) is None and adapter_of(type("Bare", (), {})) is None


def test_an_environment_of_skyrl_gym_may_write_its_own_prompt_and_change_what_was_said():
    """RLMEnv does: it shows its instruction for the next turn alone."""
    pytest.importorskip("skyrl_gym")
    code = "```repl\nprint(7 * 6)\n```"
    opened, first, last = in_session(foreign.Repl, Turn(code), Turn(f"{code}\nFINAL(42)"), columns={"max_turns": 4})
    system, context, asked = opened["history"]
    assert (system["role"], asked["role"]) == ("system", "user") and "REPL" in system["content"]
    assert [message["role"] for message in first["history"]] == ["system", "user", "assistant", "user", "user"]
    assert first["history"][:3] == [system, context, {"role": "assistant", "content": code}]
    assert "42" in first["history"][3]["content"] and first["history"][4] != asked and not first["done"]
    assert last["done"] and last["reward"] == 1.0 and last["metrics"]["turns_used"] == 2


def test_an_environment_of_skyrl_gym_gets_its_row():
    pytest.importorskip("skyrl_gym")
    info, opened, wrong, right = play(foreign.Problem, Turn("#### 4"), Turn("#### 3"))
    assert info.kind == "skyrl" and opened == [] and (wrong.reward, right.reward, right.done) == (0.0, 1.0, True)


def test_a_constructor_of_skyrl_gym_gets_the_defaults_of_its_configuration_and_the_turns_of_the_run():
    pytest.importorskip("skyrl_gym")
    environment = adapter_of(foreign.Search).factory()
    asyncio.run(environment.reset(replace(TASK, max_turns=7), 1))
    assert (environment.inner.max_turns, environment.inner.tool_group.topk) == (7, 3)


@pytest.mark.parametrize("columns", [{"env_config": {"start": "go"}}, {"extra_info": {"env_config": {"start": "go"}}}])
def test_a_gym_of_ms_swift(columns):
    _, opened, first, last = play(foreign.SwiftEnv, Turn("4"), Turn("go"), columns=columns)
    assert [message["content"] for message in opened.history] == ["Play.", "1 message, 3"], "in place of the prompt"
    assert first.messages == '{"messages": 3}' and (first.reward, last.done, first.metrics) == (0.5, True, {"n": 2.0})


def test_an_environment_of_rllm_is_made_of_the_row():
    _, opened, first, last = play(foreign.RllmEnv, Turn("4"), Turn("3"))
    assert opened == "" and (first.messages, first.reward, last.reward, last.done) == ("again", 0.0, 1.0, True)


def test_a_game_of_gymnasium():
    pytest.importorskip("gymnasium")
    way = ["down", "fly", "down", "right", "right", "down", "right"]
    info, opened, first, no_action, *_, last = play(foreign.Lake, *map(Turn, way))
    assert info.kind == "gymnasium" and opened.splitlines()[0] == "SFFF" and "\x1b" not in first.messages
    assert "(Down)" in first.messages and no_action.metrics == {"wrong_actions": 1.0} and not no_action.done
    assert (last.reward, last.done, last.metrics) == (1.0, True, {"wrong_actions": 0.0})


def test_the_game_of_the_docs(tmp_path):
    pytest.importorskip("gymnasium")
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    (code, ) = [block for block in re.findall("```python\n(.*?)```", page, re.DOTALL) if "gymnasium" in block]
    found: dict[str, type] = {}
    exec(compile(code, "environments.md", "exec"), found)
    _, opened, first = play(found["Lake"], Turn("down"))
    assert (opened, first.messages) == ("row 0 column 0", "row 1 column 0")


def test_numbers_of_arrays_are_numbers_and_a_text_has_no_messages_beside_it():
    """Games give rewards as arrays with one value."""
    step = plain(Step("x", np.array([0.5], np.float32), metrics={"n": np.array([2]), "of": np.bool_(True)}))
    assert (step["reward"], step["metrics"]) == (0.5, {"n": 2.0, "of": 1.0})
    with pytest.raises(ValueError, match="a step has a text and messages: 'a' and 'b'"):
        plain(Step("b", text="a"))


def test_a_game_of_textarena():
    pytest.importorskip("textarena")
    info, opened, *steps = play(foreign.Guess, *[Turn(f"[{number}]") for number in range(1, 21)])
    assert info.kind == "textarena" and "guess" in opened.lower()
    assert opened not in steps[0].messages and "[1]" not in steps[1].messages
    assert steps[-1].done and all(step.reward is None for step in steps if not step.done)
