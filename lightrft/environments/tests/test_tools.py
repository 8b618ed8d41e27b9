"""Tools: a wrong call is an answer that says what is wrong; right ones are made, also several at once."""
import asyncio
from typing import Literal

import pytest

from lightrft.environments.base import ToolCall, Turn
from lightrft.environments.tools import schema_of, ToolBox, ToolEnvironment
from lightrft.utils.errors import UserError


def add(a: int, b: int, sign: Literal["+", "-"] = "+") -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
        sign: What to do.
    """
    return a + b if sign == "+" else a - b


async def look(key: str) -> dict[str, str]:
    """Look something up.

    Args:
        key: Its name.
    """
    return {"found": key}


BOX = ToolBox([add, look])


def answers(*calls: ToolCall):
    return asyncio.run(ToolEnvironment(BOX).step(Turn("", calls)))


def test_calls_are_answered_in_their_order():
    step = answers(ToolCall("look", {"key": "é"}), ToolCall("add", {"a": 3, "b": 4}))
    assert step.messages == [{"role": "tool", "name": "look", "content": '{"found": "é"}'},
                             {"role": "tool", "name": "add", "content": "7"}]  # yapf: disable
    assert step.metrics == {"wrong_calls": 0} and not step.done
    assert answers().done, "a turn without a call is the last one"


@pytest.mark.parametrize("call, words", [
    (ToolCall("sub", {}), "there is no tool 'sub'; the tools are add, look"),
    (ToolCall("add", {"a": 1}), "add lacks the argument b"),
    (ToolCall("add", {"a": 1, "b": 2, "c": 3}), "add has no argument 'c'; it takes a, b, sign"),
    (ToolCall("add", {"a": "1", "b": 2}), "the argument a of add is 1, and must be integer"),
    (ToolCall("add", {"a": True, "b": 2}), "the argument a of add is true, and must be integer"),
    (ToolCall("add", {"a": 1, "b": 2, "sign": "x"}), "must be one of +, -"),
    (ToolCall("", error="the call is no valid JSON: {"), "the call is no valid JSON: {"),
])  # yapf: disable
def test_a_wrong_call_is_an_observation(call, words):
    step = answers(call)
    assert words in step.messages[0]["content"] and step.messages[0]["role"] == "tool"
    assert step.metrics == {"wrong_calls": 1}


def test_a_function_without_a_description_is_refused():
    with pytest.raises(UserError, match="the tool 'bare'.*a docstring whose section Args describes each"):
        schema_of(_bare())


def _bare():

    def bare(x):
        return x

    return bare
