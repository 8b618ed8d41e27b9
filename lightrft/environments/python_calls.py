"""Calls of tools that are written as Python, ``[add(a=1, b=2)]``. They are parsed, and nothing of them is run."""
import ast
import re
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from lightrft.environments.turn_texts import TurnTexts

if TYPE_CHECKING:
    from renderers import ParsedResponse, ParsedToolCall

START = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")  # of a list of calls


class PythonCalls:
    """Calls between the marks of LFM2, or as the whole turn, as in models of the Llama family whose template says so.

    Args:
        marks: before and behind calls; empty: a turn that begins with a list of calls has nothing else.
    """
    MARKS = ("<|tool_call_start|>", "<|tool_call_end|>")

    def __init__(self, tokenizer: PreTrainedTokenizerBase, marks: tuple[str, str] | tuple[()] = ()) -> None:
        self.turns, self.marks = TurnTexts(tokenizer), marks

    @classmethod
    def of_lfm2(cls, tokenizer: PreTrainedTokenizerBase) -> "PythonCalls":
        """Return the form with the marks of LFM2."""
        return cls(tokenizer, cls.MARKS)

    def parse_response(self, token_ids: list[int], *, tools: Any = None,
                       prompt_ids: list[int] | None = None) -> "ParsedResponse":
        """Parse a turn, as a :class:`~lightrft.environments.call_forms.CallForm` does."""
        from renderers import ParsedResponse
        thoughts, text = self.turns.parted(token_ids)
        content, blocks = self._blocks(text, bool(tools))
        return ParsedResponse(content.strip(), thoughts, [call for block in blocks for call in _calls(*block)])

    def _blocks(self, text: str, has_tools: bool) -> tuple[str, list[tuple[str, bool]]]:
        """Return the text outside of calls, and each text of calls with whether it has an end."""
        if not self.marks:
            return ("", [(text, True)]) if has_tools and START.match(text) else (text, [])
        content, *parts = text.split(self.marks[0])
        blocks = [part.partition(self.marks[1]) for part in parts]
        return content + "".join(rest for _, _, rest in blocks), [(body, bool(end)) for body, end, _ in blocks]


def _calls(text: str, ends: bool) -> Iterator["ParsedToolCall"]:
    """Yield the calls in a text of Python."""
    from renderers import ParsedToolCall, ToolCallParseStatus
    tree = _tree(text)
    if tree is None or not ends:
        status = ToolCallParseStatus.MALFORMED_STRUCTURE if ends else ToolCallParseStatus.UNCLOSED_BLOCK
        yield ParsedToolCall(text, status=status)
        return
    for node in tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]:
        raw = ast.get_source_segment(text.strip(), node) or text
        try:
            yield ParsedToolCall(raw, *_call(node))
        except ValueError:
            yield ParsedToolCall(raw, status=ToolCallParseStatus.MALFORMED_STRUCTURE)


def _tree(text: str) -> ast.expr | None:
    """Return a text as an expression; None if it is none, or one that is too deep or too long for Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in what the policy wrote
        try:
            return ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a call.

    Raises:
        ValueError: it is no call, an argument has no name, or a value is none of JSON.
    """
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, (ast.Name, ast.Attribute)):
        raise ValueError("no call with named arguments")
    return ast.unparse(node.func), {_name(keyword): _value(keyword.value) for keyword in node.keywords}


def _name(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise ValueError("** has no name")
    return keyword.arg


_JSON_NAMES = {"true": True, "false": False, "null": None}


def _value(node: ast.expr | None) -> Any:
    """Return a value as JSON has it, where constants may have its names too.

    Raises:
        ValueError: it is none.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {str(_value(key)): _value(value) for key, value in zip(node.keys, node.values)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value(node.operand)
        if isinstance(number, (int, float)):
            return -number
    raise ValueError("no value of JSON")
