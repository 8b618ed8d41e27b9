"""Renders prompts to text and token ids, in batches, exactly as the model will see them."""
import json
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lightrft.config.schema import DataConfig
from lightrft.datasets.prompt_rows import joined, Message, prefill_of
from lightrft.datasets.rows import DataError
from lightrft.datasets.template_kwargs import check_kwargs, TemplateKwargs
from lightrft.datasets.template_variables import check_read, variables_of
from lightrft.datasets.tool_templates import ToolTemplate
from lightrft.utils.logging import warn_of_all

if TYPE_CHECKING:  # a mistake in a row is found without torch
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_ASK: Message = {"role": "user", "content": "?"}
_PROBE = "lightrft"  # a text to find in what a template writes
_MARKS = ("\n", "0", ".", "|")  # characters, of which one merges with no given text
CHUNK = 2048  # rows a worker process tokenizes at a time


class Renderer:
    """Applies the prompt options and the tokenizer's chat template.

    Message lists always go through the template; text does so with ``--apply_chat_template``, else it stays unchanged.
    The keyword arguments of a template are those of ``--chat_template_kwargs``, and over them those of the row.
    The tokenizer is called with ``verbose=False``, because the data sets report overlong rows.

    Args:
        suffix: text at the end of every prompt, after the start of the answer that a chat template writes.

    Raises:
        DataError: an ``--input_template`` without exactly one ``{}``, or a variable of ``--chat_template_kwargs`` that
            the template does not read.
    """

    def __init__(self, cfg: DataConfig, tokenizer: "PreTrainedTokenizerBase", suffix: str = "") -> None:
        if cfg.input_template is not None and cfg.input_template.count("{}") != 1:
            raise DataError(f"--input_template {cfg.input_template!r} must hold {{}} once, where the prompt goes")
        check_kwargs(cfg.chat_template_kwargs, "--chat_template_kwargs")
        self.cfg, self.tokenizer, self.suffix = cfg, tokenizer, suffix
        if tokenizer is not None:
            check_read(cfg.chat_template_kwargs, [tokenizer])
        self._chats = False  # a prompt was one
        self._dropped: dict[str, bool] = {}
        self._warned: set[str] = set()
        self._tools = ToolTemplate(tokenizer)

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """End token of the tokenizer, and what its template writes behind an answer, if it writes something."""
        found = {str(self.tokenizer.eos_token or "")}
        if self.tokenizer.chat_template:
            with suppress(DataError):  # the template may refuse the roles
                chat = self.chat_text([[_ASK, {"role": "assistant", "content": _PROBE}]], generation_prompt=False)[0]
                found.add(chat.rpartition(_PROBE)[2].strip())
        return tuple(sorted(found - {""}))

    @cached_property
    def opening(self) -> str:
        """Text that the chat template writes before an answer."""
        asked, opened = (self.chat_text([[_ASK]], generation_prompt=each)[0] for each in (False, True))
        return opened[len(commonprefix([asked, opened])):]

    def messages(self, prompt: str | list[Message]) -> list[Message] | None:
        """Return the chat to render, or None for a text that stays unchanged."""
        if isinstance(prompt, str) and not self.cfg.apply_chat_template:
            return None
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        self._chats = True
        return self._with_system(self._wrap_last_user(chat))

    def check_used(self) -> None:
        """Raise a :class:`DataError` for ``--chat_template_kwargs`` if no prompt so far was a chat."""
        if self.cfg.chat_template_kwargs and not self._chats:
            raise DataError(f"--chat_template_kwargs {json.dumps(self.cfg.chat_template_kwargs)}: has no effect, since "
                            "all prompts are texts, which no template renders. Use --apply_chat_template, or drop it")

    def reads(self, kwargs: TemplateKwargs) -> TemplateKwargs:
        """Return those of the keyword arguments of a row that the chat template looks up."""
        return {name: value for name, value in kwargs.items() if name in self._variables}

    @cached_property
    def _variables(self) -> set[str]:
        return variables_of(self.tokenizer)

    def _wrap(self, text: str) -> str:
        return self.cfg.input_template.replace("{}", text) if self.cfg.input_template else text

    def _wrap_last_user(self, chat: list[Message]) -> list[Message]:
        last = max((i for i, turn in enumerate(chat) if turn["role"] == "user"), default=-1)
        if last < 0 or not self.cfg.input_template:
            return chat
        return [*chat[:last], {**chat[last], "content": self._wrap_content(chat[last]["content"])}, *chat[last + 1:]]

    def _wrap_content(self, content: Any) -> Any:
        """Wrap a text, or the last text of a content list: pictures stay where they are."""
        content = joined(content)
        if isinstance(content, str):
            return self._wrap(content)
        texts = [i for i, part in enumerate(content or []) if part.get("type") == "text"]
        if not texts:
            return content
        at = texts[-1]
        return [*content[:at], {**content[at], "text": self._wrap(content[at]["text"])}, *content[at + 1:]]

    def _with_system(self, chat: list[Message]) -> list[Message]:
        """Put ``--system_prompt`` first; it replaces a system message of the row."""
        if self.cfg.system_prompt is None:
            return chat
        rest = chat[1:] if chat and chat[0]["role"] == "system" else chat
        return [{"role": "system", "content": self.cfg.system_prompt}, *rest]

    def text(self, prompt: str) -> str:
        """Wrap a text prompt without a chat template, after the system prompt and an empty line."""
        system = f"{self.cfg.system_prompt}\n\n" if self.cfg.system_prompt is not None else ""
        return system + self._wrap(prompt) + self.suffix

    def chat_text(self, chats: list[list[Message]], generation_prompt: bool,
                  kwargs: Sequence[TemplateKwargs] = ()) -> list[str]:
        """Render chats, with the keyword arguments of each.

        Raises:
            DataError: there is no template, or it refuses the messages.
        """
        rendered = self.apply(chats, kwargs, tokenize=False, add_generation_prompt=generation_prompt)
        return [text for texts in rendered for text in texts]

    def apply(self, chats: list[list[Message]], kwargs: Sequence[TemplateKwargs] = (), **options: Any) -> Iterator[Any]:
        """Call ``tokenizer.apply_chat_template`` for each run of chats with the same ``kwargs``, and yield the results.

        Args:
            kwargs: of each chat, for the template; empty: all have none.
            options: of the call.

        Raises:
            DataError: as :meth:`chat_text`.
        """
        of_chats = kwargs or [{}] * len(chats)
        for values, run in groupby(zip(of_chats, chats, strict=True), key=lambda one: one[0]):
            yield self._applied([chat for _, chat in run], self.cfg.chat_template_kwargs | values | options)

    def _applied(self, chats: list[list[Message]], options: dict[str, Any]) -> Any:
        """Call ``tokenizer.apply_chat_template``; convert its errors to :class:`DataError`."""
        if not self.tokenizer.chat_template:
            raise DataError(
                f"the tokenizer {self.tokenizer.name_or_path!r} has no chat template, and the data holds "
                "chat messages. Give one with --chat_template (a Jinja file or a built-in name, e.g. chatml)")
        self._tools.check(options.get("tools"))
        taken = [self._tools.prepared(self._in_parts(chat)) for chat in chats]
        try:
            return self.tokenizer.apply_chat_template(taken, **options)
        except (TemplateError, TypeError) as error:
            raise DataError(f"the chat template of {self.tokenizer.name_or_path!r} cannot render the messages: "
                            f"{error}. Change the rows, or give another template with --chat_template") from error

    def _in_parts(self, chat: list[Message]) -> list[Message]:
        """Join texts in lists of parts to one text, which every template takes, or one part for those roles whose texts
        the template would drop."""
        chat = [turn | {"content": joined(turn["content"])} if "content" in turn else turn for turn in chat]
        return [{**turn, "content": [{"type": "text", "text": turn["content"]}]}
                if isinstance(turn.get("content"), str) and self._drops(turn["role"]) else turn
                for turn in chat]  # yapf: disable

    def _drops(self, role: str) -> bool:
        """True if the template reads parts alone of this role's messages, and leaves out a text (LLaVA's).

        One that refuses the probe, perhaps for the order of its roles, gets texts.
        """
        if role not in self._dropped:
            probe = {"role": role, "content": _PROBE}
            before, after = {"system": ([], [_ASK]), "user": ([], [])}.get(role, ([_ASK], []))
            try:
                found = self.tokenizer.apply_chat_template([*before, probe, *after], tokenize=False)
            except (TemplateError, TypeError):
                found = _PROBE
            self._dropped[role] = _PROBE not in found
        return self._dropped[role]

    def opened(self, chats: list[list[Message]], kwargs: Sequence[TemplateKwargs] = ()) -> list[str]:
        """Render chats up to the first token that is drawn: the generation prompt, the suffix, and the start of the
        answer that a chat may end with (a prefill), as it is."""
        asked = [chat if prefill_of(chat) is None else chat[:-1] for chat in chats]
        texts = self.chat_text(asked, generation_prompt=True, kwargs=kwargs)
        return [self._begun(chat, text, values)
                for chat, text, values in zip(chats, texts, kwargs or [{}] * len(chats))]  # yapf: disable

    def _begun(self, chat: list[Message], opened: str, kwargs: TemplateKwargs) -> str:
        """Write the suffix and a prefill behind ``opened``, the generation prompt: that with a blank which the template
        writes before every answer, or without the start of a thought which the prefill repeats."""
        prefill = prefill_of(chat)
        if prefill is None:
            return opened + self.suffix
        probe = [*chat[:-1], {**chat[-1], "content": _PROBE}]
        written = self.chat_text([probe], generation_prompt=False, kwargs=[kwargs])[0]
        written = written[:max(written.rfind(_PROBE), 0)]
        blank = written.startswith(opened) and written[len(opened):].isspace()
        repeated = opened.removeprefix(written).strip() if opened.startswith(written) else ""
        before = written if blank or repeated and prefill.startswith(repeated) else opened
        return before + self.suffix + prefill

    def encode_after(self, contexts: list[str], texts: list[str]) -> list[tuple[list[int], list[int]]]:
        """Tokenize texts behind ``contexts``, whose own tokens stay as they are.

        A tokenizer that puts a blank before every text (Metaspace) puts none before these.

        Returns:
            Of each text its tokens, and the characters at which they start (none for slow tokenizers).
        """
        if not self._adds_blank:
            return self._tokens(texts)
        heads, wholes = self._tokens(contexts), self._tokens([a + b for a, b in zip(contexts, texts)])
        behind = [_behind(head, whole, len(context)) for head, whole, context in zip(heads, wholes, contexts)]
        return [self._unblanked(text) if found is None else found for found, text in zip(behind, texts)]

    def encode_inside(self, texts: list[str]) -> list[list[int]]:
        """Tokenize texts that stand somewhere in another one: none begins with a blank that it does not have."""
        if not self._adds_blank:
            return [ids for ids, _ in self._tokens(texts)]
        return [self._unblanked(text)[0] for text in texts]

    def _unblanked(self, text: str) -> tuple[list[int], list[int]]:
        mark = self.mark_before(text)
        head, whole = self._tokens([mark, mark + text])
        return _behind(head, whole, len(mark)) or whole

    def mark_before(self, *texts: str) -> str:
        """Return a character with which the start of no text merges; empty where no blank is put before a text."""
        for mark in _MARKS if self._adds_blank else ():
            head, *wholes = self._tokens([mark, *(mark + text for text in texts)])
            if all(_behind(head, whole, len(mark)) is not None for whole in wholes):
                return mark
        return ""

    @cached_property
    def start(self) -> str:
        """Text of the token (bos) that the tokenizer writes before a text by itself; empty if it writes none."""
        bos, token = self.tokenizer.bos_token, self.tokenizer.bos_token_id
        return str(bos) if bos and self._whole([""])[0][:1] == [token] else ""

    def _whole(self, texts: list[str]) -> list[list[int]]:
        """Tokenize texts with the special tokens that the tokenizer writes around them."""
        return self.tokenizer(texts, add_special_tokens=True, return_attention_mask=False, verbose=False).input_ids

    @cached_property
    def _adds_blank(self) -> bool:
        head, tail, both = (ids for ids, _ in self._tokens(["=", "2", "=2"]))
        return head + tail != both

    def _tokens(self, texts: list[str]) -> list[tuple[list[int], list[int]]]:
        """Tokenize texts without special tokens around them; see :meth:`encode_after`."""
        if not texts:
            return []
        out = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False,
                             return_offsets_mapping=self.tokenizer.is_fast)
        offsets = out.get("offset_mapping") or [[]] * len(texts)
        return [(ids, [start for start, _ in spans]) for ids, spans in zip(out["input_ids"], offsets)]

    def warn_once(self, kind: str, text: str) -> None:
        """Log a warning about the template, the first one of its kind alone."""
        if kind not in self._warned:
            warn_of_all(text)
        self._warned.add(kind)

    def encode_text(self, texts: list[str]) -> list[list[int]]:
        """Tokenize plain prompts: the tokenizer's first token (bos) is added once, its last (eos) never."""
        if not texts:
            return []
        stripped, eos = [text.removeprefix(self.start) for text in texts], self.tokenizer.eos_token_id
        ids = self._whole(stripped)
        bare = self.tokenizer(stripped[:1], add_special_tokens=False, verbose=False).input_ids
        appends_eos = ids[0][-1:] == [eos] and bare[0][-1:] != [eos]
        return [row[:-1] for row in ids] if appends_eos else ids

    def encode_chats(self, chats: list[list[Message]],
                     kwargs: Sequence[TemplateKwargs] = ()) -> tuple[list[str], list[list[int]]]:  # yapf: disable
        """Return text and tokens of chats up to the start of the answer; the template writes all special tokens."""
        texts = self.opened(chats, kwargs)
        if not texts:
            return [], []
        out = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return texts, out.input_ids

    def encode(self, prompts: Sequence[str | list[Message]],
               kwargs: Sequence[TemplateKwargs] = ()) -> list[tuple[str, list[int]]]:  # yapf: disable
        """Return text and token ids of prompts of any kind, in order; ``kwargs``: of each, for the chat template."""
        chats = [self.messages(prompt) for prompt in prompts]
        plain = [self.text(prompt) for prompt in prompts if self.messages(prompt) is None]  # type: ignore[arg-type]
        of_chats = [values for values, chat in zip(kwargs, chats) if chat is not None]
        rendered = iter(zip(*self.encode_chats([chat for chat in chats if chat is not None], of_chats)))
        written = iter(zip(plain, self.encode_text(plain)))
        return [next(written) if chat is None else next(rendered) for chat in chats]


class BareRenderer(Renderer):
    """Applies the prompt options where there is no tokenizer yet: a chat is not rendered, and no end token is known."""
    ends = ()  # type: ignore[assignment]

    def __init__(self, cfg: DataConfig) -> None:
        super().__init__(cfg, None)  # type: ignore[arg-type]


def _behind(head: tuple[list[int], list[int]], whole: tuple[list[int], list[int]],
            length: int) -> tuple[list[int], list[int]] | None:
    """Return the tokens of a whole text that follow ``head``, of ``length`` characters; None: they are no prefix."""
    count = len(head[0])
    same = whole[0][:count] == head[0]
    return (whole[0][count:], [max(0, start - length) for start in whole[1][count:]]) if same else None


def without_end(text: str, ends: tuple[str, ...]) -> str:
    """Drop the tokens ``ends`` behind a text with the white space after them, in linear time: it may be long."""
    cut = at = len(text)
    while True:
        if text.endswith(ends, 0, at):
            cut = at = at - max(len(end) for end in ends if text.endswith(end, 0, at))
        elif text[at - 1:at].isspace():
            at -= 1
        else:
            return text[:cut]


def unended(turns: list[Message], ends: tuple[str, ...]) -> list[Message]:
    """Drop the tokens ``ends`` behind the answers of a chat: the template writes its own."""
    return [{**turn, "content": _content_without(turn["content"], ends)} if turn["role"] == "assistant" else turn
            for turn in turns]  # yapf: disable


def _content_without(content: Any, ends: tuple[str, ...]) -> Any:
    if isinstance(content, str):
        return without_end(content, ends)
    last = content[-1] if isinstance(content, list) and content else None
    if not isinstance(last, dict) or not isinstance(last.get("text"), str):
        return content
    return [*content[:-1], {**last, "text": without_end(last["text"], ends)}]


def encode_all(renderer: Renderer, prompts: list[str | list[Message]], workers: int,
               kwargs: Sequence[TemplateKwargs] = ()) -> list[tuple[str, list[int]]]:
    """Apply ``renderer.encode`` to many prompts, in ``workers`` processes if there is more than one chunk."""
    starts = range(0, len(prompts), CHUNK)
    chunks, of_chunks = [prompts[i:i + CHUNK] for i in starts], [kwargs[i:i + CHUNK] for i in starts]
    if workers <= 0 or len(chunks) < 2:
        parts = [*map(renderer.encode, chunks, of_chunks)]
    else:
        with ProcessPoolExecutor(min(workers, len(chunks)), multiprocessing.get_context("spawn")) as pool:
            parts = list(pool.map(renderer.encode, chunks, of_chunks))
    return [item for part in parts for item in part]
