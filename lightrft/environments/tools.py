"""Tools as an environment: functions that the policy calls. A wrong call is answered, and never an error."""
import asyncio
import inspect
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import count, repeat
from typing import Any, NamedTuple

from lightrft.environments.base import Message, Step, Task, ToolCall, Turn
from lightrft.environments.interop import called_at_once
from lightrft.environments.observations import parts_of
from lightrft.utils.errors import CaptureException, first_line, UserError

logger = logging.getLogger(__name__)

Tool = Callable[..., Any]


def schema_of(tool: Tool) -> dict[str, Any]:
    """Return the schema of a function, read from its hints and its docstring in Google style.

    Raises:
        UserError: they do not tell all that a schema needs, or no call by names of arguments reaches the function.
    """
    from transformers.utils import get_json_schema
    title = f"the tool {getattr(tool, '__name__', tool)!r}"
    with CaptureException() as captured:
        schema = get_json_schema(tool)
    if captured.cause is not None:
        raise UserError(f"{title}: {first_line(captured.cause)}. "
                        "Remedy: a type hint for each argument, and a docstring whose section Args describes each")
    unnamed = [str(each) for each in inspect.signature(tool).parameters.values() if each.kind in _UNNAMED]
    if unnamed:
        raise UserError(f"{title} takes {', '.join(unnamed)}, and calls name every argument. Remedy: arguments with "
                        "names of their own, such as a list or a dict")
    if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
        raise UserError(f"{title} yields its results, and a call has one. Remedy: return a list or a text")
    return schema


_UNNAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Answered(NamedTuple):
    """Result of a call: a text or parts with pictures, whether the call was right, and the reward and metrics of tools
    that have some."""
    content: str | list[dict[str, Any]]
    right: bool
    reward: float | None = None
    metrics: Mapping[str, float] = {}


_ERRORS = count()  # that tools of this process have raised


def told(error: BaseException | None, text: str) -> Answered:
    """Return ``text`` as the answer to a call whose tool raised ``error``; the first one of this process is logged.

    Raises:
        BaseException: what is none of a tool, such as the end of a call that took too long.
    """
    if error is not None and not isinstance(error, Exception):
        raise error
    if next(_ERRORS) == 0:
        logger.warning(
            "a tool raised an error, which the policy reads; further ones are only counted, as "
            "env/wrong_calls", exc_info=error)
    return Answered(text, False)


class ToolBox:
    """Functions by name, with their schemas; these are read from the functions unless they are given.

    ``call`` makes a call: at the same time as others, unless the functions share a state.
    """

    def __init__(self, tools: Sequence[Tool], schemas: "list[dict[str, Any]] | None" = None,
                 call: Callable[..., Awaitable[Any]] = called_at_once) -> None:
        self.call = call
        self.schemas = [schema_of(tool) for tool in tools] if schemas is None else schemas
        self.tools = {schema["function"]["name"]: tool for schema, tool in zip(self.schemas, tools)}
        if len(self.tools) < len(tools):
            raise UserError(f"two tools have the same name: {', '.join(s['function']['name'] for s in self.schemas)}")

    async def answer(self, call: ToolCall) -> Answered:
        """Make a call; a wrong one is told what is wrong."""
        if problem := self.problem(call):
            return Answered(f"Error: {problem}", False)
        value = await self.call(self.tools[call.name], **call.arguments)
        return Answered(parts_of(value) or _text(value), True)

    def problem(self, call: ToolCall) -> str:
        """Say what is wrong with a call: no call, an unknown name, or arguments that the function does not take."""
        if call.error:
            return call.error
        if call.name not in self.tools:
            return f"there is no tool {call.name!r}; the tools are {', '.join(self.tools)}"
        schema = next(one["function"] for one in self.schemas if one["function"]["name"] == call.name)["parameters"]
        missing = [name for name in schema.get("required", ()) if name not in call.arguments]
        if missing:
            return f"{call.name} lacks the argument {', '.join(missing)}"
        known: Mapping[str, Any] = schema.get("properties", {})
        for name, value in call.arguments.items():
            if name not in known:
                return f"{call.name} has no argument {name!r}; it takes {', '.join(known) or 'none'}"
            if not fits(value, known[name]):
                return f"the argument {name} of {call.name} is {_text(value)}, and must be {_kind(known[name])}"
        return ""


_KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int, ), "number": (int, float), "string": (str, ), "boolean": (bool, ), "array": (list, ),
    "object": (dict, ), "null": (type(None), )
}  # yapf: disable


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return True if a value, and all that is in it, has a type of its schema, and is one of its choices; of a schema
    without a type, always."""
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema and not any(fits(value, each) for each in schema["anyOf"]):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    kinds = [kind for kind in _listed(schema.get("type")) if kind in _KINDS]
    known = not kinds or any(isinstance(value, _KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))
                             for kind in kinds)  # yapf: disable
    return known and _parts_fit(value, schema)


def _parts_fit(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return True if the items of a list, or the members of an object, fit their schemas."""
    if isinstance(value, list):
        places = schema.get("prefixItems")
        if places is not None and len(value) != len(places):
            return False
        return all(map(fits, value, places or repeat(_known(schema.get("items")))))
    if isinstance(value, dict):
        named, others = _known(schema.get("properties")), _known(schema.get("additionalProperties"))
        return all(name in value for name in schema.get("required", ())) and all(
            fits(each, named.get(name, others)) for name, each in value.items())
    return True


def _known(schema: Any) -> Mapping[str, Any]:
    """Return a schema; one that says nothing where there is none, or only whether there may be others."""
    return schema if isinstance(schema, Mapping) else {}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _kind(schema: Mapping[str, Any]) -> str:
    rules = {name: rule for name, rule in schema.items() if name != "description"}
    if rules.keys() - {"type", "enum", "nullable"}:
        return f"of the schema {_text(rules)}"
    return f"one of {', '.join(map(str, schema['enum']))}" if "enum" in schema else " or ".join(
        map(str, _listed(schema.get("type"))))


def _text(value: Any) -> str:
    """Write a result of a tool: a text as it is, anything else as JSON, or else as Python writes it.

    A whole number may have more digits than Python writes, as the product of two that the policy wrote: it is told.
    """
    if isinstance(value, str):
        return value
    for write in (partial(json.dumps, ensure_ascii=False), str):
        with CaptureException() as captured:
            return str(write(value))
    return f"Error: {captured.cause}"


class ToolEnvironment:
    """Environment of a response that calls tools; it ends with the first turn without a call."""

    def __init__(self, box: ToolBox) -> None:
        self.box = box

    async def reset(self, prompt: Task, seed: int) -> None:
        """Begin: tools have no state."""

    async def step(self, turn: Turn) -> Step:
        """Answer the calls of a turn at once, in their order."""
        if not turn.calls or turn.cut:
            return Step(done=True)
        answers = await asyncio.gather(*map(self.answer, turn.calls))
        messages: list[Message] = [{"role": "tool", "name": call.name, "content": answer.content}
                                   for call, answer in zip(turn.calls, answers)]  # yapf: disable
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        metrics = Counter[str]({"wrong_calls": sum(not answer.right for answer in answers)})
        for answer in answers:
            metrics.update(answer.metrics)
        return Step(messages, sum(rewards) if rewards else None, metrics=dict(metrics))

    async def answer(self, call: ToolCall) -> Answered:
        """Answer one call."""
        return await self.box.answer(call)
