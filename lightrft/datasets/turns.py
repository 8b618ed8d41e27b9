"""Turns of a chat in one form: calls of tools and their results, and marks that say how much an answer is learnt."""
from difflib import get_close_matches
from math import inf
from typing import Any

from lightrft.config.options import finite
from lightrft.datasets.rows import DataError
from lightrft.datasets.template_kwargs import parsed, without_nulls

Turn = dict[str, Any]

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
ROLES = ("system", "user", "assistant", "tool", "developer")  # that chat templates know; some know more
CALL_ROLES = ("function_call", "tool_call")  # of ShareGPT and ms-swift: the text is the JSON of a call, or a list
RESULT_ROLES = ("observation", "tool_response", "function")  # and of OpenAI's older chats
MARKS = ("loss", "train", "trainable", "weight", "loss_weight")


def meant_role(role: str) -> str:
    """Return the role that is meant by ``gpt`` or ``usr``, say, which chat templates do not know; empty for others."""
    near = [] if role in ROLES else get_close_matches(role.lower(), ROLES, n=1, cutoff=0.8)
    return SHAREGPT_ROLES.get(role, near[0] if near else "")


def normalised(turn: Turn, where: str) -> Turn:
    """Return a turn with ``role`` and ``content``, its calls in ``tool_calls``, and its marks as one ``weight``, which
    is absent where it is 1. A null in an object is an absent key; the JSON text of a call keeps its nulls.

    Raises:
        DataError: calls or marks are not valid.
    """
    turn = without_nulls(turn) | {name: None for name in ("content", "value") if turn.get(name, "") is None}
    if "from" in turn and "value" in turn:
        turn = {"role": SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} | turn
        turn = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if turn.get("role") in CALL_ROLES:
        turn = turn | {"role": "assistant", "content": "", "tool_calls": turn.get("content")}
    elif turn.get("role") in RESULT_ROLES:
        turn = turn | {"role": "tool"}
    given = turn.get("tool_calls") or turn.get("function_call")
    others = {name: value for name, value in turn.items() if name not in (*MARKS, "tool_calls", "function_call")}
    if given:
        others |= {"content": turn.get("content") or "", "tool_calls": _calls(given, where)}
    weight = _weight({name: turn[name] for name in MARKS if turn.get(name) is not None}, where)
    if weight is not None and weight > 0 and turn.get("role") != "assistant":
        raise DataError(f"{where}: a chat message of {turn.get('role')!r} is marked to be learnt, and only turns of "
                        "'assistant' are. Remove the mark")
    return others if weight in (None, 1) else others | {"weight": weight}


def joined_calls(turns: list[Any], messages: list[Turn], where: str) -> list[Turn]:
    """Return ``messages``, of which one whose turn is a call alone joins the answer before it: several calls at once.

    Raises:
        DataError: both have different marks.
    """
    joined: list[Turn] = []
    for turn, message in zip(turns, messages):
        call = isinstance(turn, dict) and turn.get("role", turn.get("from")) in CALL_ROLES
        if not call or not joined or joined[-1]["role"] != "assistant":
            joined.append(message)
            continue
        if joined[-1].get("weight", 1) != message.get("weight", 1):
            raise DataError(f"{where}: a call and the answer before it, which are one turn, have different marks")
        joined[-1] = joined[-1] | {"tool_calls": [*joined[-1].get("tool_calls", []), *message["tool_calls"]]}
    return joined


def _calls(value: Any, where: str) -> list[Turn]:
    """Return calls as objects of the type "function"; ``arguments`` stay an object or the JSON text of one."""
    calls = parsed(value, f"{where}: the call of a tool")
    return [_call(parsed(call, f"{where}: the call of a tool"), where)
            for call in (calls if isinstance(calls, list) else [calls])]  # yapf: disable


def _call(call: Any, where: str) -> Turn:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: the call of a tool is {str(call)[:80]}: expected {{\"name\": ..., \"arguments\": "
                        "{...}}. Correct or remove it")
    function = function | {"arguments": function.get("arguments", {})}
    name = f"{where}: the arguments of the call of {function['name']!r}"
    if not isinstance(parsed(function["arguments"], name), dict):
        raise DataError(f"{name} are {str(function['arguments'])[:80]}: expected an object, or its JSON text. Correct "
                        "or remove the call")
    return {"type": "function"} | call | {"function": function} if "function" in call else {
        "type": "function", "function": function}  # yapf: disable


def _weight(marks: dict[str, Any], where: str) -> float | None:
    """Return the weight of a turn in the loss; None without a mark.

    Raises:
        DataError: a mark is neither true, false nor a number from 0 on, or two contradict each other.
    """
    values = {name: float(value) if isinstance(value, bool) else finite(value) for name, value in marks.items()}
    shown = ", ".join(f"{name}: {marks[name]!r}" for name in marks)
    if any(value is None or isinstance(marks[name], str) or not 0 <= value < inf for name, value in values.items()):
        raise DataError(f"{where}: a chat message has the mark {shown}: expected true or false, or a number from 0 on. "
                        "Correct or remove it")
    switches = {bool(value) for value in values.values()}
    numbers = {value for name, value in values.items() if not isinstance(marks[name], bool) and
               not (name in MARKS[:3] and value in (0, 1))}  # yapf: disable
    if len(switches) > 1 or len(numbers) > 1:
        raise DataError(f"{where}: the marks of a chat message contradict each other ({shown}). Keep one")
    return next(iter(numbers), float(switches.pop())) if values else None
