"""Turns as tokens: what the policy drew is read and never encoded again; what it reads next is encoded behind it."""
import json
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from lightrft.config.schema import DataConfig
from lightrft.datasets.control_tokens import ControlTokens
from lightrft.datasets.rendering import Renderer
from lightrft.environments.base import Message, ToolCall
from lightrft.utils.errors import CaptureException, first_line, install_command, UserError
from lightrft.utils.logging import get_logger

if TYPE_CHECKING:
    from renderers import ParsedToolCall
    from renderers import Renderer as FamilyRenderer

# model type -> configuration of its renderer in the package renderers. A family has its own tokens: a model of the type
# without them, or with another template, is rendered by its template.
FAMILIES = {
    "deepseek_v3": "DeepSeekV3RendererConfig", "gemma4": "Gemma4RendererConfig", "glm4_moe": "GLM45RendererConfig",
    "gpt_oss": "GptOssRendererConfig", "kimi_k2": "KimiK2RendererConfig", "llama": "Llama3RendererConfig",
    "minimax_m2": "MiniMaxM2RendererConfig", "qwen3": "Qwen3RendererConfig", "qwen3_moe": "Qwen3RendererConfig",
    "qwen3_5": "Qwen35RendererConfig", "qwen3_5_moe": "Qwen35RendererConfig", "qwen3_vl": "Qwen3VLRendererConfig",
    "qwen3_vl_moe": "Qwen3VLRendererConfig"
}  # yapf: disable
_CALLS = ("<tool_call>", "</tool_call>")  # around calls in JSON, in the Hermes form
_PROBE = "lightrft-answer"
_ASK: Message = {"role": "user", "content": "1"}
_ANSWERED: list[Message] = [_ASK, {"role": "assistant", "content": _PROBE}]
_OBSERVATIONS: tuple[list[Message], ...] = ([{"role": "user", "content": "2"}],
                                            [{"role": "tool", "name": "f", "content": "2"}])  # yapf: disable
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
            when it renders later ones, or nothing reads calls of tools in this form.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model_type: str, schemas: Sequence[dict[str,
                                                                                                   Any]] = ()) -> None:
        self.tokenizer, self.schemas = tokenizer, list(schemas)
        self._encoder, self._name = Renderer(DataConfig(), tokenizer), f"{tokenizer.name_or_path!r} ({model_type})"
        self._control = ControlTokens(self._encoder)
        if not tokenizer.chat_template:
            raise UserError(f"--environment: the tokenizer {tokenizer.name_or_path!r} has no chat template, which an "
                            "environment that answers with messages needs. Give one with --chat_template")
        self.family = _family(tokenizer, model_type)
        if self.family is not None and not self._is_of_family(self.family):
            self.family = None
        self.reader = self.family or _generic(tokenizer)
        self._check()

    def _is_of_family(self, family: "FamilyRenderer") -> bool:
        """Return True unless the model's template continues a conversation in another way than its family."""
        asked = self._ids(self._applied([_ASK], True))
        drawn = self._ids(_PROBE) + [self.tokenizer.eos_token_id]
        for messages in _OBSERVATIONS:
            with CaptureException() as captured:
                expected = self._by_template(drawn, messages)
            if captured.cause is None and self._by_family(family, asked, drawn, messages) != expected:
                return False
        return True

    def _check(self) -> None:
        if self.schemas and self.family is None and not self._reads_calls:
            raise UserError(f"--environment: nothing reads calls of tools of the model {self._name}: its tokenizer has "
                            f"no tokens {' and '.join(_CALLS)}, and its family is none of {', '.join(FAMILIES)}. Use a "
                            "model that was trained to call tools, or an environment that reads text")
        if self.family is None:
            _, _ = self._answered  # it refuses a template that is not prefix-stable
        elif not self.family.is_prefix_stable:
            get_logger().info("environment: thoughts and earlier turns stay in the context as they were drawn; the "
                              f"chat template of {self._name} may leave them out when a server renders it anew")

    @property
    def _reads_calls(self) -> bool:
        ids = [self.tokenizer.convert_tokens_to_ids(mark) for mark in _CALLS]
        return all(isinstance(one, int) and one != self.tokenizer.unk_token_id for one in ids)

    def read(self, prompt_ids: list[int], drawn: list[int]) -> tuple[Message, tuple[ToolCall, ...]]:
        """Return a turn as a message, and the calls of tools in it, wrong ones too."""
        parsed = self.reader.parse_response(drawn, tools=self.schemas or None, prompt_ids=prompt_ids)
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

    def _by_family(self, family: "FamilyRenderer", before: list[int], drawn: list[int],
                   messages: Sequence[Message]) -> list[int] | None:
        following = family.bridge_to_next_turn(before, drawn, list(messages), tools=self.schemas or None)
        known = before + drawn
        if following is None or following.token_ids[:len(known)] != known:
            return None
        return following.token_ids[len(known):]

    def _by_template(self, drawn: list[int], messages: Sequence[Message]) -> list[int]:
        """Return the tokens that the template writes behind an answer: its rest, the messages, the next start."""
        known, tail = self._answered
        text = self._applied([*_ANSWERED, *messages], True)
        end = self.tokenizer.eos_token
        if drawn and drawn[-1] == self.tokenizer.eos_token_id:
            tail = tail.removeprefix(end if isinstance(end, str) else "")
        return self._ids(tail + text[len(known):])

    @cached_property
    def _answered(self) -> tuple[str, str]:
        """A chat with an answer as the template writes it, and what it writes behind the answer.

        Raises:
            UserError: it renders an answer in another way when a message follows.
        """
        known, text = self._applied(_ANSWERED, False), self._applied([*_ANSWERED, _OBSERVATIONS[0][0]], True)
        if _PROBE not in known or not text.startswith(known):
            raise UserError(f"--environment: the chat template of {self._name} is not prefix-stable: with a later "
                            f"message it renders {known[-60:]!r} as {text[:len(known)][-60:]!r}, so later turns "
                            "would not follow what was drawn. Give another one with --chat_template")
        return known, known.rpartition(_PROBE)[2]

    def _applied(self, messages: Sequence[Message], opens: bool) -> str:
        return self._encoder.chat_text([list(messages)], generation_prompt=opens)[0]

    def _ids(self, text: str) -> list[int]:
        return self._encoder.encode_inside([text])[0]

    def prompt(self, messages: Sequence[Message], template_kwargs: dict[str, Any]) -> tuple[str, list[int]]:
        """Render and tokenize the messages of a prompt, those of :meth:`Environment.reset` among them."""
        (text, ), (ids, ) = self._encoder.encode_chats([list(messages)], [template_kwargs])
        return text, ids

    def safe(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages whose texts are :meth:`neutral`, as the policy reads them."""
        return [message | {"content": self.neutral(message["content"])} for message in messages]

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
    return ToolCall(str(parsed.name or ""), arguments if isinstance(arguments, dict) else {}, error, parsed.raw)


def _family(tokenizer: PreTrainedTokenizerBase, model_type: str) -> "FamilyRenderer | None":
    """Return the renderer of a model's family; None if there is none, or the tokenizer lacks its tokens."""
    renderers = _package()
    name = FAMILIES.get(model_type)
    if name is None:
        return None
    config = getattr(renderers, name)(thinking_retention="all")  # what was drawn stays
    with CaptureException() as captured:
        return renderers.create_renderer(tokenizer, config)
    if not isinstance(captured.cause, AssertionError):
        raise UserError(f"--environment: the renderer {name!r} of the model type {model_type!r} does not take the "
                        f"tokenizer {tokenizer.name_or_path!r}: {first_line(captured.cause or ValueError())}")
    return None


def _generic(tokenizer: PreTrainedTokenizerBase) -> "FamilyRenderer":
    """Return what reads calls in the Hermes form, where the tokenizer has their tokens."""
    renderers = _package()
    return renderers.create_renderer(tokenizer, renderers.DefaultRendererConfig(tool_parser="qwen3"))


def _package() -> Any:
    try:
        import renderers
    except ImportError as error:
        raise UserError("--environment needs the package renderers to read turns and calls; run: "
                        f"{install_command('agents')}") from error
    return renderers
