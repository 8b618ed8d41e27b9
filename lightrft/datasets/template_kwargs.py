"""Keyword arguments with which a row is rendered by a chat template: its tools, and its ``chat_template_kwargs``."""
import json
from functools import cache
from inspect import signature
from typing import Any

from lightrft.datasets.rows import DataError, Row

TemplateKwargs = dict[str, Any]


def template_kwargs(row: Row, chat: bool, where: str) -> TemplateKwargs:
    """Return the keyword arguments of a row: its tools as ``tools``, the object in its column ``chat_template_kwargs``,
    and verl's column ``enable_thinking``.

    Args:
        chat: the row is rendered by a chat template.

    Raises:
        DataError: a column holds something else, or the row has some of them and is not rendered as a chat.
    """
    kwargs = _mapping(row.get("chat_template_kwargs"), f"{where}: the column 'chat_template_kwargs'")
    if isinstance(row.get("enable_thinking"), bool):
        kwargs = {"enable_thinking": row["enable_thinking"]} | kwargs
    check_kwargs(kwargs, f"{where}: the column 'chat_template_kwargs'")
    if tools := _tools(row, where):
        kwargs["tools"] = tools
    if kwargs and not chat:
        raise DataError(f"{where}: the row has {', '.join(kwargs)} for a chat template, and its prompt is a text that "
                        "is not rendered by one. Write it as messages, use --apply_chat_template, or remove the "
                        "column")
    return kwargs


def check_kwargs(kwargs: TemplateKwargs, name: str) -> None:
    """Refuse keyword arguments that the rendering itself sets.

    Raises:
        DataError: there is one; ``name`` says where.
    """
    if taken := sorted(given_by_rendering() & kwargs.keys()) if kwargs else []:
        raise DataError(f"{name} sets {', '.join(taken)}, which is not a variable of templates, or is set by the "
                        "rendering. Remove it; schemas of tools belong in the column 'tools'")


@cache
def given_by_rendering() -> set[str]:
    """Return the names that no template gets from a row or an option: tools and messages, and arguments of the call."""
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase  # slow to import, and rarely needed
    return {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"} - {"documents", "kwargs"}


def without_nulls(value: Any) -> Any:
    """Remove keys whose value is null from the objects in ``value``, at every depth; items of lists stay.

    Parquet and arrow give each object of a column the keys of all others, null where it has none.
    """
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def parsed(value: Any, name: str) -> Any:
    """Return the value of a JSON text, and any other value as it is.

    Raises:
        DataError: a text is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except json.JSONDecodeError as error:
        raise DataError(f"{name} is {value[:80]!r}, which is not JSON ({error.msg}). Correct or remove it") from error


def _mapping(value: Any, name: str) -> TemplateKwargs:
    kwargs = parsed(without_nulls(value), name)
    if not isinstance(kwargs, dict | None):
        raise DataError(f"{name} is {str(value)[:80]}: expected an object such as {{\"enable_thinking\": false}}. "
                        "Correct or remove it")
    return dict(kwargs or {})


def _tools(row: Row, where: str) -> list[dict[str, Any]]:
    """Return the schemas in the column ``tools``, or in OpenAI's older ``functions``, each as an object of the type
    "function"; a column and a schema may be JSON text."""
    name = f"{where}: the column 'tools'"
    schemas = parsed(without_nulls(row.get("tools")), name)
    if not schemas and _are_functions(row.get("functions")):
        schemas, name = without_nulls(row["functions"]), f"{where}: the column 'functions'"
    schemas = schemas or []
    return [_tool(parsed(schema, name), name) for schema in (schemas if isinstance(schemas, list) else [schemas])]


def _are_functions(value: Any) -> bool:
    """Return True for schemas of functions; another column ``functions`` is one for rewards."""
    return isinstance(value, list) and all(isinstance(one, dict) and {"name", "parameters"} <= one.keys()
                                           for one in value)  # yapf: disable


def _tool(schema: Any, name: str) -> dict[str, Any]:
    function = schema.get("function", schema) if isinstance(schema, dict) else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return schema if "function" in schema else {"type": "function", "function": schema}
    raise DataError(f"{name} holds {str(schema)[:80]}: expected schemas of functions, {{\"type\": \"function\", "
                    "\"function\": {\"name\": ..., \"parameters\": {...}}}, or their JSON text. Correct it, or rename "
                    "the column if it holds something else")
