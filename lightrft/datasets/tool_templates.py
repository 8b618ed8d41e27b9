"""Tools in chat templates: which of them a template shows, and in which form it takes calls."""
import json
from functools import cached_property
from typing import Any, TYPE_CHECKING

from jinja2 import TemplateError

from lightrft.datasets.rows import DataError

if TYPE_CHECKING:  # a mistake in a row is found without torch
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_ASK = {"role": "user", "content": "?"}
_NAME, _KEY, _SAID = "lightrft_probe", "lightrft_key", "lightrft said"  # texts to find in what a template writes
_SCHEMA = {"description": "?", "parameters": {"type": "object", "properties": {}}}
_REMEDY = "Give the model's own template, or another one that does, with --chat_template"


class ToolTemplate:
    """Chat template of ``tokenizer`` with tools: it is probed once for each question, by what it writes."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        self._forms: dict[bool, tuple[bool, Any]] = {}

    def check(self, tools: Any) -> None:
        """Raise a :class:`DataError` if there are tools and the template shows none."""
        if tools and not self.shows_tools:
            raise self._error("shows no tools, and a row has some in its column 'tools'")

    @cached_property
    def shows_tools(self) -> bool:
        """True if a schema is in the text."""
        return _NAME in self._text([_ASK], _NAME)

    @cached_property
    def drops_results(self) -> bool:
        """True if the result of a tool is not in the text; one that refuses the probe refuses rows by itself."""
        asked = [_ASK, _call({_KEY: "x"}, ""), {"role": "tool", "tool_call_id": "callabcde", "name": _NAME}]
        contents: list[Any] = [_SAID, [{"type": "text", "text": _SAID}]]
        texts = [self._text([*asked[:2], asked[2] | {"content": content}]) for content in contents]
        return any(texts) and not any(_SAID in text for text in texts)

    def prepared(self, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Write the calls of a chat in the form that the template takes.

        Raises:
            DataError: it shows no calls, or no results of tools.
        """
        if self.drops_results if any(turn["role"] == "tool" for turn in chat) else False:
            raise self._error("leaves out the turns of 'tool'")
        return [self._prepared(turn) if turn.get("tool_calls") else turn for turn in chat]

    def _prepared(self, turn: dict[str, Any]) -> dict[str, Any]:
        said = bool(turn.get("content"))
        as_text, content = self._form(said)
        calls = [call | {"function": call["function"] | {"arguments": _arguments(call, as_text)}}
                 for call in turn["tool_calls"]]  # yapf: disable
        return turn | {"tool_calls": calls} | ({} if said else {"content": content})

    def _form(self, said: bool) -> tuple[bool, Any]:
        """Return whether arguments are JSON text, and the content of a turn without text; ``said``: it has one."""
        if said not in self._forms:
            forms = [(as_text, content) for as_text in (False, True) for content in ([_SAID] if said else ["", None])]
            shown = [form for form in forms if self._shows(*form)]
            if not shown:
                raise self._error("leaves out calls of tools (tool_calls)" + " beside a text" * said)
            self._forms[said] = shown[0]
        return self._forms[said]

    def _shows(self, as_text: bool, content: Any) -> bool:
        text = self._text([_ASK, _call(json.dumps({_KEY: "x"}) if as_text else {_KEY: "x"}, content)])
        return all(part in text for part in (_NAME, _KEY, content or "")) and f"{{'{_KEY}'" not in text

    def _text(self, chat: list[dict[str, Any]], name: str = "other_tool") -> str:
        """Return the rendered chat; empty if the template refuses it."""
        tools: list[Any] = [{"type": "function", "function": {"name": name, **_SCHEMA}}]
        try:
            return str(self.tokenizer.apply_chat_template(chat, tools=tools, tokenize=False))
        except (TemplateError, TypeError):
            return ""

    def _error(self, problem: str) -> DataError:
        return DataError(f"the chat template of {self.tokenizer.name_or_path!r} {problem}. {_REMEDY}")


def _call(arguments: Any, content: Any) -> dict[str, Any]:
    function = {"name": _NAME, "arguments": arguments}
    return {"role": "assistant", "content": content,
            "tool_calls": [{"id": "callabcde", "type": "function", "function": function}]}  # yapf: disable


def _arguments(call: dict[str, Any], as_text: bool) -> Any:
    given = call["function"]["arguments"]
    if isinstance(given, str) != as_text:
        return json.dumps(given, ensure_ascii=False) if as_text else json.loads(given)
    return given
