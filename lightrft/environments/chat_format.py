"""Turns as tokens: what the policy drew is read and never encoded again; what it reads next is encoded behind it."""
import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from lightrft.config.schema import DataConfig
from lightrft.datasets.control_tokens import ControlTokens, special_ids
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.rows import DataError
from lightrft.environments.base import Message, ToolCall
from lightrft.environments.call_forms import CallForm, forms_of, hermes, MarkMemory, package
from lightrft.environments.python_calls import PythonCalls
from lightrft.environments.turn_template import ASK, call_of, PROBE, result_of, TurnTemplate
from lightrft.utils.errors import CaptureException, first_line, UserError
from lightrft.utils.logging import get_logger

if TYPE_CHECKING:
    from renderers import ParsedToolCall
    from renderers import Renderer as FamilyRenderer

# model type -> configuration of its renderer in the package renderers. A family has its own tokens: a model of the type
# without them, or with another template, is rendered by its template.
FAMILIES = {
    "deepseek_v3": "DeepSeekV3RendererConfig", "gemma4": "Gemma4RendererConfig", "glm4_moe": "GLM45RendererConfig",
    "kimi_k2": "KimiK2RendererConfig", "minimax_m2": "MiniMaxM2RendererConfig", "qwen3": "Qwen3RendererConfig",
    "qwen3_moe": "Qwen3RendererConfig", "qwen3_5": "Qwen35RendererConfig", "qwen3_5_moe": "Qwen35RendererConfig",
    "qwen3_vl": "Qwen3VLRendererConfig", "qwen3_vl_moe": "Qwen3VLRendererConfig"
}  # yapf: disable
_OBSERVATIONS: tuple[list[Message], ...] = ([{"role": "user", "content": "2"}], [result_of("f")])
_HALF = re.compile("[\ud800-\udfff]")  # of a character: a lone surrogate
_MOST_BITS, _MOST_DEPTH = 10_000, 100  # of whole numbers, which Python writes up to 4,300 digits; of brackets
_ERRORS = {
    "invalid_json": "the call is no valid JSON: {}", "unclosed_block": "the call has no end: {}", "missing_name":
    "the call names no tool: {}", "malformed_structure": "the call is malformed: {}", "unknown_tool":
    "the call names an unknown tool: {}"
}


class ChatFormat:
    """Form of the turns of a model: its chat template, and the calls of tools in what it draws.

    Args:
        model_type: of the model's configuration; it chooses the family, whatever the folder is called.
        schemas: of the tools; they are in the prompts.

    Raises:
        UserError: the package ``renderers`` is missing, there is no chat template, the template changes earlier turns
            when it renders later ones or refuses results of tools, or nothing reads calls of tools in its form.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model_type: str, schemas: Sequence[dict[str,
                                                                                                   Any]] = ()) -> None:
        self.tokenizer, self.schemas = tokenizer, list(schemas)
        self._encoder, self._name = Renderer(DataConfig(), tokenizer), f"{tokenizer.name_or_path!r} ({model_type})"
        self._control, self._ends = ControlTokens(self._encoder), special_ids(tokenizer)
        if not tokenizer.chat_template:
            raise UserError(f"--environment: the tokenizer {tokenizer.name_or_path!r} has no chat template, which an "
                            "environment that answers with messages needs. Give one with --chat_template")
        self._template = TurnTemplate(self._encoder, self._name)
        self.family = _family(tokenizer, model_type)
        if self.family is not None and not self._is_of_family(self.family):
            self.family = None
        self.reader: CallForm = self.family or self._form(model_type)
        self._check()

    def _is_of_family(self, family: "FamilyRenderer") -> bool:
        """Return True unless the model's template continues a conversation in another way than its family."""
        asked = self._ids(self._template.text([ASK], opens=True))
        drawn = self._ids(PROBE) + [self.tokenizer.eos_token_id]
        for messages in _OBSERVATIONS:
            with suppress(DataError):  # the template has no results of tools
                if self._by_family(family, asked, drawn, messages) != self._by_template(drawn, messages):
                    return False
        return True

    def _form(self, model_type: str) -> CallForm:
        """Return the form of calls: one that reads those of the template, where it writes them; else the first one.

        Raises:
            UserError: no form does, and there are tools.
        """
        forms = forms_of(self.tokenizer, model_type)
        written = self._written_call() if self._template.shows_calls else ""
        if written:
            forms = [form for form in (*forms, PythonCalls(self.tokenizer)) if self._reads(form, written)]
        if forms:
            return forms[0]
        if self.schemas:
            raise UserError(
                f"--environment: nothing reads calls of tools of the model {self._name}: its template writes "
                f"{written[-200:]!r}, which is neither the Hermes form (the tokens <tool_call> and </tool_call>), nor "
                "that of Llama 3, LFM2 or gpt-oss with their tokens, nor a list of Python calls. Use a model that was "
                "trained to call tools, or an environment that reads text")
        return hermes(self.tokenizer)

    def _written_call(self) -> str:
        """Return a call as the template writes it, behind the start of an answer."""
        opened, text = self._template.text([ASK], opens=True), self._template.text([ASK, call_of("f")])
        return text.removeprefix(opened)

    def _reads(self, form: CallForm, text: str) -> bool:
        asked, tools = self._ids(self._template.text([ASK], opens=True)), [{"type": "function", "function": {}}]
        with CaptureException():
            (call, ) = form.parse_response(self._ids(text), tools=tools, prompt_ids=asked).tool_calls
            return (call.name, call.arguments) == ("f", {"x": PROBE})
        return False

    def _check(self) -> None:
        """Refuse a template that cannot continue what was drawn; say where serving differs."""
        if self.family is None:
            self._template.behind(_OBSERVATIONS[0])
            if self.schemas:
                self._check_results()
        if self._template.drops_thoughts:
            get_logger().info("environment: thoughts stay in the context as they were drawn; the chat template of "
                              f"{self._name} leaves them out of earlier turns when a server renders the chat anew")

    def _check_results(self) -> None:
        try:
            self._template.behind(_OBSERVATIONS[1])
        except DataError as error:
            raise UserError(f"--environment: the model {self._name} cannot read results of tools: {error}") from error

    def read(self, prompt_ids: list[int], drawn: list[int]) -> tuple[Message, tuple[ToolCall, ...]]:
        """Return a turn as a message, and the calls of tools in it, wrong ones too."""
        try:
            parsed = self.reader.parse_response(drawn, tools=self.schemas or None, prompt_ids=prompt_ids)
        except (RecursionError, ValueError):  # JSON with brackets too deep, or a number with too many digits
            text = str(self.tokenizer.decode(drawn))
            return {"role": "assistant", "content": text}, (_unreadable(text), )
        calls = tuple(map(_call, parsed.tool_calls))
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        if calls:
            message["tool_calls"] = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                                     for call in calls]  # yapf: disable
        return message, calls

    def continuation(self, prompt_ids: list[int], drawn: list[int], messages: Sequence[Message]) -> list[int] | None:
        """Return the tokens of messages behind a turn, up to the start of the next one; None: there is no way to go on
        without a change of what was drawn.

        Args:
            prompt_ids: all tokens before the turn.
        """
        safe = self.safe(messages)
        if self.family is not None:
            return self._by_family(self.family, prompt_ids, drawn, safe)
        return self._by_template(drawn, safe)

    def continuation_text(self, drawn: list[int], messages: Sequence[Message]) -> str:
        """Return the text of messages behind a turn, which may show pictures."""
        return self._text_behind(drawn, self.safe(messages))

    def _text_behind(self, drawn: list[int], messages: Sequence[Message]) -> str:
        """Return what the template writes behind an answer: its end, unless it was drawn, the messages, and the next
        start."""
        end, rest = self._template.behind(messages)
        if drawn and drawn[-1] in self._ends:  # the start of a message may be what ends the turn before
            return rest if end else rest.removeprefix(str(self.tokenizer.decode(drawn[-1:])))
        return end + rest

    def _by_family(self, family: "FamilyRenderer", before: list[int], drawn: list[int],
                   messages: Sequence[Message]) -> list[int] | None:
        following = family.bridge_to_next_turn(before, drawn, list(messages), tools=self.schemas or None)
        known = before + drawn
        if following is None or following.token_ids[:len(known)] != known:
            return None
        return following.token_ids[len(known):]

    def _by_template(self, drawn: list[int], messages: Sequence[Message]) -> list[int]:
        return self._ids(self._text_behind(drawn, messages))

    def _ids(self, text: str) -> list[int]:
        return self._encoder.encode_inside([text])[0]

    def prompt(self, messages: Sequence[Message], template_kwargs: dict[str, Any]) -> tuple[str, list[int]]:
        """Render and tokenize the messages of a prompt, those of :meth:`Environment.reset` among them."""
        (text, ), (ids, ) = self._encoder.encode_chats([list(messages)], [template_kwargs])
        return text, ids

    def safe(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages whose texts, names too, are :meth:`neutral`, as the policy reads them; a picture is a part
        ``{"type": "image"}``."""
        return [{key: self._safe(key, value) for key, value in message.items()} for message in messages]

    def _safe(self, key: str, value: Any) -> Any:
        if key == "content" and isinstance(value, list):
            return [{"type": "text", "text": self.neutral(part["text"])} if part["type"] == "text" else
                    {"type": part["type"]} for part in value]  # yapf: disable
        if isinstance(value, dict):
            return {self.neutral(name): self._safe("", inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._safe("", inner) for inner in value]
        return self.neutral(value) if isinstance(value, str) else value

    def neutral(self, text: str) -> str:
        """Return a text that has no token of the chat template or of calls: a blank parts the marks of these."""
        return self._control.neutral(text)


def _call(parsed: "ParsedToolCall") -> ToolCall:
    """Convert a call; arguments may be an object, or a JSON text of one."""
    arguments, error = parsed.arguments, _ERRORS.get(str(parsed.status), "").format(parsed.raw[:200])
    if isinstance(arguments, str):
        with CaptureException():
            arguments = json.loads(arguments)
    if not error and not isinstance(arguments or {}, dict):
        error = f"the arguments are no object: {parsed.raw[:200]}"
    name = str(parsed.name or "")
    if not _is_json([name, arguments]):
        name, arguments = name.encode("utf-8", "replace").decode(), {}
        error = error or ("the call has NaN, an infinite or a huge number, half a character, or brackets too deep: "
                          f"{parsed.raw[:200]}")
    return ToolCall(name, arguments if isinstance(arguments, dict) else {}, error, parsed.raw)


def _is_json(value: Any, depth: int = 0) -> bool:
    """Return True if all that reads JSON can read a value: tools, workers, and who loads the trajectories."""
    if isinstance(value, str):
        return not _HALF.search(value)
    if isinstance(value, (int, float)):
        return abs(value) < math.inf and (isinstance(value, float) or value.bit_length() <= _MOST_BITS)
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value or ()
    return depth < _MOST_DEPTH and all(_is_json(each, depth + 1) for each in inner)


def _unreadable(text: str) -> ToolCall:
    return ToolCall("", error=_ERRORS["invalid_json"].format(text[:200]), raw=text)


def _family(tokenizer: PreTrainedTokenizerBase, model_type: str) -> "FamilyRenderer | None":
    """Return the renderer of a model's family; None if there is none, or the tokenizer lacks its tokens."""
    renderers = package()
    name = FAMILIES.get(model_type)
    if name is None:
        return None
    config = getattr(renderers, name)(thinking_retention="all")  # what was drawn stays
    with CaptureException() as captured:
        return renderers.create_renderer(MarkMemory(tokenizer), config)
    if not isinstance(captured.cause, AssertionError):
        raise UserError(f"--environment: the renderer {name!r} of the model type {model_type!r} does not take the "
                        f"tokenizer {tokenizer.name_or_path!r}: {first_line(captured.cause or ValueError())}")
    return None
