"""Forms in which model families write thoughts and calls of tools, read from the tokens that the policy drew."""
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from transformers import PreTrainedTokenizerBase

from lightrft.environments.python_calls import PythonCalls, START as PYTHON_START
from lightrft.environments.turn_texts import TurnTexts
from lightrft.utils.errors import install_command, UserError

if TYPE_CHECKING:
    from renderers import ParsedResponse, ParsedToolCall

_SHORT, _KEPT = 64, 256  # characters of texts that are remembered, and their number


class CallForm(Protocol):
    """Reader of turns: a renderer of the package ``renderers``, or a form of this module."""

    def parse_response(self, token_ids: list[int], *, tools: Any = None,
                       prompt_ids: list[int] | None = None) -> "ParsedResponse":
        """Return the text, the thoughts and the calls of a turn, wrong ones too."""


class MarkMemory:
    """A tokenizer for renderers, which ask for the same few marks of their family in every turn: it remembers them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._encoded = lru_cache(_KEPT)(tokenizer.encode)
        self.convert_tokens_to_ids = lru_cache(_KEPT)(tokenizer.convert_tokens_to_ids)

    def encode(self, text: str, **options: Any) -> list[int]:
        """Encode a text, a mark from memory."""
        return [*self._encoded(text, **options)] if len(text) <= _SHORT else self._tokenizer.encode(text, **options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._tokenizer(*args, **options)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._tokenizer, name)
        setattr(self, name, value)
        return value


class HarmonyCalls:
    """Channels of gpt-oss: thoughts in ``analysis``, calls in ``commentary to=functions.NAME``, the text in ``final``.

    The parser is that of ``renderers``. Its renderer is not used: it takes a prompt to end in the channel
    ``analysis``, whereas templates leave the choice of the channel to the policy.
    """
    MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.turns = TurnTexts(tokenizer)
        self.ids = {mark.strip("<|>"): _id(tokenizer, mark) for mark in self.MARKS}

    def parse_response(self, token_ids: list[int], *, tools: Any = None,
                       prompt_ids: list[int] | None = None) -> "ParsedResponse":
        """Parse a turn as :class:`CallForm` says. One that ends as a call without being one has a malformed call."""
        from renderers import ParsedToolCall, ToolCallParseStatus
        from renderers.parsing import parse_gpt_oss
        parsed = parse_gpt_oss(self.turns.tokenizer, self._opening(token_ids, prompt_ids or []) + token_ids,
                               **{f"{name}_id": number for name, number in self.ids.items()})  # yapf: disable
        raw = self.turns.text(token_ids)
        if token_ids[-1:] == [self.ids["call"]] and not parsed.tool_calls:
            parsed.tool_calls.append(ParsedToolCall(raw, status=ToolCallParseStatus.MALFORMED_STRUCTURE))
        elif not (parsed.tool_calls or parsed.content or parsed.reasoning_content):
            parsed.content = raw  # outside of all channels
        return parsed

    def _opening(self, drawn: list[int], before: list[int]) -> list[int]:
        """Return the start of the message that the turn continues."""
        start = self.ids["start"]
        if drawn[:1] == [start] or start not in before:
            return []
        return before[len(before) - 1 - before[::-1].index(start):]


class LlamaCalls:
    """Calls of Llama 3: objects with ``name`` and ``parameters``, as the whole turn or behind ``<|python_tag|>``,
    several of them with ``;`` between them. Thoughts stand before, between ``<think>`` and ``</think>``.

    The parser of ``renderers`` is not used: it reads one call without the tag, and takes a malformed one for a text.
    A call that is written as Python is malformed where the template asks for objects.
    """
    MARKS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    _TAG = "<|python_tag|>"
    _START = re.compile(r'\[?\s*\{\s*"(type|name|function|parameters)"')

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.turns = TurnTexts(tokenizer)

    def parse_response(self, token_ids: list[int], *, tools: Any = None,
                       prompt_ids: list[int] | None = None) -> "ParsedResponse":
        """Parse a turn as :class:`CallForm` says. Without tools, an object is a text."""
        from renderers import ParsedResponse
        thoughts, text = self.turns.parted(token_ids)
        content, tag, body = text.partition(self._TAG)
        if not tag and tools and (self._START.match(text) or PYTHON_START.match(text)):
            content, body = "", text
        return ParsedResponse(content.strip(), thoughts, [*_calls(body)])


def _calls(text: str) -> Iterator["ParsedToolCall"]:
    """Yield the calls in a text of JSON; what is no JSON ends it, as a malformed call."""
    from renderers import ParsedToolCall, ToolCallParseStatus
    rest = text.strip()
    while rest:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):  # a number with too many digits, or brackets too deep
            yield ParsedToolCall(rest, status=ToolCallParseStatus.INVALID_JSON)
            return
        for one in value if isinstance(value, list) else [value]:
            yield _call(one, rest[:end])
        rest = rest[end:].lstrip("; \n")


def _call(value: Any, raw: str) -> "ParsedToolCall":
    from renderers import ParsedToolCall, ToolCallParseStatus
    name = value.get("name") if isinstance(value, dict) else None
    if not name:
        return ParsedToolCall(raw, status=ToolCallParseStatus.MISSING_NAME)
    return ParsedToolCall(raw, name, value.get("parameters", value.get("arguments", {})))


def forms_of(tokenizer: PreTrainedTokenizerBase, model_type: str) -> list[CallForm]:
    """Return the forms whose tokens a tokenizer has; that of the model type is the first."""
    package()
    names = sorted(_FORMS, key=lambda name: name != model_type)
    return [form(tokenizer) for form, marks in map(_FORMS.__getitem__, names) if _has(tokenizer, marks)]


def hermes(tokenizer: PreTrainedTokenizerBase) -> CallForm:
    """Return what reads calls in the Hermes form, and texts alone where the tokenizer lacks its tokens."""
    renderers = package()
    config = renderers.DefaultRendererConfig(tool_parser="qwen3")
    form: CallForm = renderers.create_renderer(MarkMemory(tokenizer), config)
    return form


_FORMS: dict[str, tuple[Callable[[PreTrainedTokenizerBase], CallForm], Sequence[str]]] = {
    "": (hermes, ("<tool_call>", "</tool_call>")),
    "gpt_oss": (HarmonyCalls, HarmonyCalls.MARKS),
    "llama": (LlamaCalls, LlamaCalls.MARKS),
    "lfm2": (PythonCalls.of_lfm2, PythonCalls.MARKS),
}  # yapf: disable
"""Model type -> form of its calls, and the tokens of that."""


def package() -> Any:
    """Return the package ``renderers``.

    Raises:
        UserError: it is not installed.
    """
    try:
        import renderers
    except ImportError as error:
        raise UserError(f"--environment needs the package renderers to read turns and calls ({error}); run: "
                        f"{install_command('agents')}") from error
    return renderers


def _has(tokenizer: PreTrainedTokenizerBase, marks: Sequence[str]) -> bool:
    return all(_id(tokenizer, mark) not in (None, tokenizer.unk_token_id) for mark in marks)


def _id(tokenizer: PreTrainedTokenizerBase, mark: str) -> Any:
    return tokenizer.convert_tokens_to_ids(mark)
