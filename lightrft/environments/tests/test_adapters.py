"""Environments that were written for other trainers, played as their users wrote them."""
import asyncio

from lightrft.environments.adapters import adapter_of
from lightrft.environments.base import Task, ToolCall, Turn

TASK = Task("u", "<|im_start|>user\nsum", [{"role": "user", "content": "sum"}], reference="3",
            columns={"difficulty": 2})


class Counter:
    """A class of TRL's environment_factory: its public methods are tools."""

    def reset(self, difficulty: int = 0, **row) -> str:
        """Begin."""
        self.count, self.difficulty = 0, difficulty
        return f"difficulty {difficulty}"

    def increment(self, step: int) -> int:
        """Count.

        Args:
            step: How far.
        """
        self.count += step
        return self.count

    def get_reward(self) -> float:
        """Say how far it came."""
        return float(self.count)


class AgentInstance:
    """An agent of OpenRLHF."""

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        done = states["label"] in states["action_text"]
        return {"rewards": 1.0 if done else 0.0, "environment_feedback": "" if done else "\nagain\n", "done": done,
                "extra_logs": {"tries": 1}}  # yapf: disable


class Text:
    """An environment of SkyRL-Gym."""

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "begin"}], {}

    def step(self, text):
        return {"observations": [{"role": "user", "content": f"not {text}"}], "reward": 0.5, "done": text == "3",
                "metadata": {"n": 1, "word": "x"}}  # yapf: disable


def play(cls, *turns):
    """What a class says to turns."""
    adapter = adapter_of(cls)

    async def played():
        environment = adapter.factory()
        opened = environment.reset(TASK, 1)
        return [
            await opened if asyncio.iscoroutine(opened) else opened, *[await environment.step(turn) for turn in turns]
        ]

    return adapter.info, *asyncio.run(played())


def test_a_class_whose_methods_are_tools():
    info, opened, first, last = play(Counter, Turn("", (ToolCall("increment", {"step": 4}), )), Turn("done"))
    assert info.kind == "environment_factory" and [each["function"]["name"] for each in info.tools] == ["increment"]
    assert opened == "difficulty 2" and first.messages[0]["content"] == "4" and first.reward is None
    assert last.done and last.reward == 4.0


def test_inherited_methods_are_tools_too():
    more = type("More", (Counter, ), {"__doc__": "Adds a tool.", "look": look})
    assert [tool["function"]["name"] for tool in adapter_of(more).info.tools] == ["increment", "look"]
    assert adapter_of(type("Same", (Counter, ), {})).info.tools == adapter_of(Counter).info.tools


def look(self) -> str:
    """Look."""


def test_an_agent_that_writes_text():
    info, _, first, last = play(AgentInstance, Turn("1"), Turn("3"))
    assert info.writes_marks and (first.text, first.reward, first.done) == ("\nagain\n", 0.0, False)
    assert (last.text, last.reward, last.done, last.metrics) == (None, 1.0, True, {"tries": 1.0})


def test_a_text_environment():
    info, opened, first, last = play(Text, Turn("1"), Turn("3"))
    assert opened == [{"role": "user", "content": "begin"}] and first.messages[0]["content"] == "not 1"
    assert (first.reward, first.done, last.done, first.metrics) == (0.5, False, True, {"n": 1.0})


def test_what_has_no_known_interface():
    assert adapter_of(dict) is None and adapter_of(type("Bare", (), {})) is None
