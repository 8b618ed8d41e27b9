"""Tools of a row and calls of them as text, for requests that are no chats. Workers of rewards import it: no numpy."""
import json
from typing import Any


def calls_of(turn: dict[str, Any]) -> str:
    """Return the calls of a turn as JSON, each on a line after its text; empty without any."""
    return "".join(f"\n{json.dumps(call['function'], ensure_ascii=False)}" for call in turn.get("tool_calls") or [])


def shown_tools(kwargs: dict[str, Any]) -> str:
    """Return the ``tools`` among the keyword arguments of a chat template, on a line with an empty one behind it; empty
    without any."""
    return f"tools: {json.dumps(kwargs['tools'], ensure_ascii=False)}\n\n" if kwargs.get("tools") else ""
