"""Tools: a wrong call is an answer that says what is wrong; right ones are made, also several at once."""
import asyncio
from typing import Any, Literal, Optional

import pytest

from lightrft.environments.base import ToolCall, Turn
from lightrft.environments.tools import fits, schema_of, ToolBox, ToolEnvironment
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


def book(sizes: list[int], place: tuple[int, str], days: dict[str, list[float]], who: list[str] | str,
         note: Optional[str] = None, more: Any = None) -> str:
    """Book rooms.

    Args:
        sizes: Of the rooms.
        place: Floor and house.
        days: Prices by day.
        who: Guests.
        note: A wish.
        more: Anything.
    """
    return f"{sum(sizes)} {place} {days} {who} {note} {more}"


def run(function: str, arguments: int) -> int:
    """Run something.

    Args:
        function: Its name.
        arguments: Their number.
    """
    return 10**arguments if function == "power" else arguments


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


BOOKED = {"sizes": [1, 2], "place": [3, "a"], "days": {"x": [1, 2.5]}, "who": ["b"], "note": None, "more": [None]}


@pytest.mark.parametrize("name, value", [
    ("sizes", ["a"]), ("sizes", [1, None]), ("sizes", [True]), ("place", [3]), ("place", ["a", 3]),
    ("days", {"x": ["a"]}), ("days", {"x": 1}), ("who", 3), ("who", ["b", 3]), ("note", 3)])  # yapf: disable
def test_what_is_in_an_argument_has_a_type_too(name, value):
    """The function would raise an error because of what the policy wrote, which would leave the response unscored."""
    box = ToolBox([book])
    assert box.problem(ToolCall("book", BOOKED)) == "" == box.problem(ToolCall("book", BOOKED | {"who": "b"}))
    assert box.problem(ToolCall("book", BOOKED | {name: value})).startswith(f"the argument {name} of book is ")


def test_schemas_of_others_say_what_members_objects_have():
    """Those of verl."""
    schema = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
    assert fits({"id": 1, "more": "x"}, schema) and not fits({"id": "1"}, schema) and not fits({}, schema)
    assert fits({"x": 1}, {"type": "object", "additionalProperties": True}) and fits([1, "a"], {"type": "array"})


def test_an_argument_has_any_name_and_a_result_any_size():
    (message, ) = asyncio.run(ToolEnvironment(ToolBox([run])).step(Turn("", (ToolCall(
        "run", {"function": "power", "arguments": 5000}), )))).messages  # yapf: disable
    assert message["content"].startswith("Error: Exceeds the limit (4300 digits)")


@pytest.mark.parametrize("signature, words", [
    ("*numbers: int", "takes \\*numbers: int, and calls name every argument"),
    ("numbers: int, /", "takes numbers: int, and calls"), ("**numbers: int", "takes \\*\\*numbers: int, and"),
    ("numbers: int", "yields its results")])  # yapf: disable
def test_a_function_that_no_call_reaches_is_refused(signature, words):
    found: dict[str, Any] = {}
    body = "yield" if words.startswith("yields") else "return"
    exec(f'def odd({signature}):\n    """Odd.\n\n    Args:\n        numbers: Some.\n    """\n    {body} 1', found)
    with pytest.raises(UserError, match=f"the tool 'odd' {words}"):
        schema_of(found["odd"])


def test_a_function_without_a_description_is_refused():
    with pytest.raises(UserError, match="the tool 'bare'.*a docstring whose section Args describes each"):
        schema_of(_bare())


def _bare():

    def bare(x):
        return x

    return bare
