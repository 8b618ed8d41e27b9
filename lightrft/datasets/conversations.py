"""Tokens of conversations, by one rule: before an answer are the tokens of the generation prompt, the rest is learnt,
the end token included.

An answer is tokenized apart from what is before it, as generation does, so its first character never merges with the
last one that the chat template writes before it.
"""
import re
from dataclasses import dataclass, field, replace
from itertools import pairwise
from os.path import commonprefix
from typing import TYPE_CHECKING

from lightrft.datasets.prompt_rows import joined, Message, text_of
from lightrft.datasets.rendering import CHUNK, Renderer
from lightrft.datasets.rows import DataError
from lightrft.datasets.template_kwargs import TemplateKwargs

if TYPE_CHECKING:  # a mistake in a row is found without torch
    from lightrft.datasets.media_store import MediaStore, Replaced

Span = tuple[int, int]
Encoded = tuple[list[int], list[bool]]
_MARK = "lightrftanswer"  # a text to find in what a template writes
_TAG = re.compile(r"[<\[]/?\w+[>\]]")  # of a thought, say


@dataclass
class Conversation:
    """Messages, keys of their media, and the index of the first turn that may be in the loss; ``pair`` is prompt and
    answer without chat, ``whole``: all turns are learnt, whoever speaks; ``prefill``: the start of the first answer,
    which belongs to the prompt; ``template_kwargs`` of the chat template; ``only``: this turn alone is in the loss."""
    messages: list[Message] | None
    first: int = 0
    pair: tuple[str, str] = ("", "")
    media: tuple[str, ...] = ()
    whole: bool = False
    prefill: str = ""
    template_kwargs: TemplateKwargs = field(default_factory=dict)
    only: int | None = None


class ChatMasker:
    """Tokenizes rendered chats and finds the assistant's tokens.

    An answer is what its turn adds to the generation prompt of the turns before it. The last answer of a chat follows
    that prompt also where the template writes both otherwise in a whole chat; earlier ones are what later turns follow.
    White space that the template writes after the end token is not in the loss. Nor is what stands for media, with the
    tokens around it, which no policy of texts may write.
    """

    def __init__(self, renderer: Renderer, store: "MediaStore | None" = None) -> None:
        self.renderer, self.tokenizer, self.store = renderer, renderer.tokenizer, store
        self.of_media = {self.tokenizer.convert_tokens_to_ids(token) for token in (store.tokens if store else ())}
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        self.special = re.compile("|".join(map(re.escape, {*self.tokenizer.all_special_tokens, *added})) or r"(?!)")
        if not self.tokenizer.is_fast:
            raise DataError(f"the tokenizer {self.tokenizer.name_or_path!r} is a slow one without character offsets, "
                            "which chat data needs. Use its fast version")

    def encode(self, chats: list[Conversation]) -> list[Encoded]:
        """Return token ids and loss mask of each chat."""
        if not chats:
            return []
        texts = self.renderer.chat_text([chat.messages or [] for chat in chats], False,
                                        [chat.template_kwargs for chat in chats])
        laid = [self._laid_out(chat, self._as_generated(chat, text)) for chat, text in zip(chats, texts)]
        ids_of = self._tokens([(text, cuts) for text, cuts, _ in laid])
        return [(ids, [token not in self.of_media and any(a <= start < b for a, b in learnt)
                       for token, start in zip(ids, starts)])
                for (ids, starts), (*_, learnt) in zip(ids_of, laid)]  # yapf: disable

    def _laid_out(self, chat: Conversation, text: str) -> tuple[str, list[int], list[Span]]:
        """Return the text with its media expanded, the starts of answers, and the ranges to learn."""
        answers = self.answers(chat, text)
        starts = [start for start, _ in answers.values()]
        learnt = [span for turn, span in answers.items() if chat.only in (None, turn)]
        learnt = [(0, len(text))] if chat.whole and chat.only is None else learnt
        if self.store is None or not chat.media:
            return text, starts, learnt
        text, replaced = self.store.expand(text, chat.media)
        cuts = [_moved((start, start), replaced)[0][0] for start in starts]
        return text, cuts, [span for each in learnt for span in _moved(each, replaced)]

    def _tokens(self, texts: list[tuple[str, list[int]]]) -> list[tuple[list[int], list[int]]]:
        """Tokenize texts, each with the characters that begin a token; return ids and the characters at which they
        start."""
        bounds = [[*pairwise([0, *cuts, len(text)])] for text, cuts in texts]
        pieces = [[text[a:b] for a, b in spans] for (text, _), spans in zip(texts, bounds)]
        contexts = [context for each in pieces for context in ["", *each[:-1]]]
        encoded = iter(self.renderer.encode_after(contexts, [piece for each in pieces for piece in each]))
        found = [[(next(encoded), a) for a, _ in spans] for spans in bounds]
        return [([token for (ids, _), _ in each for token in ids],
                 [start + at for (_, starts), at in each for start in starts]) for each in found]  # yapf: disable

    def answers(self, chat: Conversation, text: str) -> dict[int, Span]:
        """Return the character ranges of ``text`` that hold the answers of the turns that may be learnt, by turn."""
        turns = [i for i, turn in enumerate(chat.messages or []) if i >= chat.first and turn["role"] == "assistant"]
        spans = {turn: self._answer(chat, turn, text) for turn in turns}
        return {turn: span for turn, span in spans.items() if span is not None}

    def _answer(self, chat: Conversation, turn: int, text: str) -> Span | None:
        """Return the range of one answer; None: the template leaves it out."""
        messages = chat.messages or []
        until = text if turn == len(messages) - 1 else self._rendered(chat, messages[:turn + 1])
        before = self._before(chat, turn, until)
        said = commonprefix([until, text])[len(before):]
        if until != before + said:  # what follows the end token may depend on the turns that follow
            said = said[:max((match.end() for match in self.special.finditer(said)), default=0)]
        rest = self.special.sub("", until[len(before) + len(said):])
        stable = until.startswith(before) and text.startswith(before) and said and not rest.strip()
        if not stable or not _holds(until[len(before.removesuffix(_prefill(chat, turn))):], messages[turn]):
            self.renderer.warn_once(
                "turns", f"the chat template of {self.tokenizer.name_or_path!r} writes turn {turn + 1} of a chat of "
                f"{len(messages)} differently when more turns follow or when it is being answered (it leaves out "
                "thoughts, say): such answers are learnt as the whole chat shows them, and not as they are generated. "
                "For other tokens give another template with --chat_template")
        if stable:
            return len(before), len(before) + len(self._without_tail(said))
        return self._rewritten(chat, turn, text)

    def _as_generated(self, chat: Conversation, text: str) -> str:
        """Return the text of a chat whose last answer follows its generation prompt.

        It is ``text`` where that holds already, and where it cannot: the generation prompt has a thought, and the
        answer begins with another one, say.
        """
        messages = chat.messages or []
        turn = len(messages) - 1
        if chat.whole or turn < chat.first or messages[turn]["role"] != "assistant":
            return text
        before, prefill = self._before(chat, turn, text), _prefill(chat, turn)
        opened = before.removesuffix(prefill)
        if text.startswith(before) and _holds(text[len(opened):], messages[turn]):
            return text
        probe = [*messages[:turn], {"role": "assistant", "content": _MARK}]
        header, mark, tail = self._rendered(chat, probe).rpartition(_MARK)
        if not mark or not opened.startswith(header) or not text.startswith(header):
            return text
        said = _said(text[len(header):], messages[turn], tail)
        rest = said[len(prefill):] * said.startswith(prefill) if prefill else _behind(opened[len(header):], said)
        if rest:
            self._check_thought(opened[len(header):], prefill + rest)
        return before + rest if rest else text

    def _check_thought(self, opened: str, answer: str) -> None:
        """Warn of an answer in a thought that the generation prompt opens, and nothing closes."""
        tag = _TAG.match(opened.strip())
        end = f"{tag[0][0]}/{tag[0][1:]}" if tag else ""
        if end and end not in opened + answer:
            self.renderer.warn_once(
                "thoughts", f"the chat template of {self.tokenizer.name_or_path!r} writes {opened!r} before an answer, "
                f"and an answer has no {end}: it is learnt as a thought. Write {end} into the answers, after their "
                "thoughts if they have some, or give another template with --chat_template")

    def _before(self, chat: Conversation, turn: int, until: str) -> str:
        """Return the text before an answer: the generation prompt, and at the first answer its prefill."""
        messages = chat.messages or []
        if not turn:  # a template may refuse a chat without turns
            return until.partition(self.renderer.opening or until)[0] + self.renderer.opening
        begun = [{**messages[turn], "content": prefill}] if (prefill := _prefill(chat, turn)) else []
        return self.renderer.opened([messages[:turn] + begun], [chat.template_kwargs])[0]

    def _rewritten(self, chat: Conversation, turn: int, text: str) -> Span | None:
        """Return the range of an answer whose turn is written otherwise on its own: after the last opening of an answer
        before its text, up to the next special token."""
        messages = chat.messages or []
        marked = [*messages[:turn], {**messages[turn], "content": _MARK}, *messages[turn + 1:]]
        shown = self._rendered(chat, marked)
        if turn < len(messages) - 1:
            shown = self._as_generated(replace(chat, messages=marked), shown)
        before, mark, after = shown.partition(_MARK)
        opening = self.renderer.opening
        start = before.rfind(opening) + len(opening) if opening in before else len(before)
        if prefill := _prefill(chat, turn):
            start = max(start, text.find(prefill, start) + len(prefill))
        end = len(text) - len(after)
        if not mark or end <= start or not text.startswith(before[:start]) or not text.endswith(after):
            return None
        match = self.special.search(text, end)
        return start, match.end() if match else end

    def _rendered(self, chat: Conversation, messages: list[Message]) -> str:
        return self.renderer.chat_text([messages], False, [chat.template_kwargs])[0]

    def _without_tail(self, said: str) -> str:
        trimmed = said.rstrip()
        ends = [match.end() for match in self.special.finditer(trimmed)]
        return trimmed if ends[-1:] == [len(trimmed)] else said


def _prefill(chat: Conversation, turn: int) -> str:
    """Return the start of the answer of ``turn`` that belongs to the prompt."""
    return chat.prefill if turn == chat.first else ""


def _holds(written: str, turn: Message) -> bool:
    """Return True if what a template writes has all words of a turn, in order; tags may be written otherwise."""
    content, at = text_of(turn.get("content")), 0
    if content.strip() in written:
        return True
    for word in _TAG.sub(" ", content).split():
        at = written.find(word, at) + len(word)
        if at < len(word):
            return False
    return True


def _said(written: str, turn: Message, tail: str) -> str:
    """Return an answer with its end: ``written`` by a template, or the text of the turn with the template's ``tail``
    where that leaves out a part of it; empty where the turn is more than a text."""
    content = joined(turn.get("content"))
    if _holds(written, turn):
        return written
    return "" if turn.get("tool_calls") or not isinstance(content, str) else content + tail


def _behind(opened: str, said: str) -> str:
    """Return what follows the text ``opened`` in an answer, which may begin with that text itself; empty: it begins
    with another thought."""
    words, gap = opened.split(), opened[len(opened.rstrip()):]
    repeated = re.match(r"\s*" + r"\s*".join(map(re.escape, words)), said) if words else None
    if repeated:
        rest = said[repeated.end():]
        return rest[len(commonprefix([rest, gap])):]
    tag = _TAG.match(opened.strip())
    return "" if tag and said.lstrip().startswith(tag[0]) else said


def _moved(span: Span, replaced: "list[Replaced]") -> list[Span]:
    """Return the parts of the range of characters ``span`` that are left where ranges of the text were replaced, in the
    new text."""
    found, shift, start = list[Span](), 0, span[0]
    for before, after in replaced:
        if before[0] >= span[1]:
            break
        if before[1] > span[0]:  # inside
            found.append((start + shift, after[0]))
            start = before[1]
        shift = after[1] - before[1]
    return [*found, (start + shift, span[1] + shift)]


def encode_pairs(pairs: list[tuple[str, str]], renderer: Renderer) -> list[Encoded]:
    """Tokenize plain prompts and answers; the answer ends with eos."""
    if not pairs:
        return []
    heads = renderer.encode_text([prompt for prompt, _ in pairs])
    tails = renderer.encode_after([prompt for prompt, _ in pairs], [answer for _, answer in pairs])
    return [(head + tail + [renderer.tokenizer.eos_token_id], [False] * len(head) + [True] * (len(tail) + 1))
            for head, (tail, _) in zip(heads, tails)]


def encode_chats(chats: list[Conversation], renderer: Renderer, store: "MediaStore | None" = None) -> list[Encoded]:
    """Encode chats with :class:`ChatMasker`, a chunk at a time."""
    masker = ChatMasker(renderer, store) if chats else None
    chunks = [chats[i:i + CHUNK] for i in range(0, len(chats), CHUNK)]
    return [item for chunk in chunks if masker for item in masker.encode(chunk)]


def encode_all(chats: list[Conversation], renderer: Renderer, store: "MediaStore | None") -> list[Encoded]:
    """Encode conversations of any kind, in order."""
    pairs = iter(encode_pairs([chat.pair for chat in chats if chat.messages is None], renderer))
    turns = iter(encode_chats([chat for chat in chats if chat.messages is not None], renderer, store))
    return [next(pairs) if chat.messages is None else next(turns) for chat in chats]
