"""Text of a chat template behind an answer, found by what it renders around a probe."""
import re
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from os.path import commonprefix

from lightrft.datasets.control_tokens import special_texts
from lightrft.datasets.rendering import Renderer
from lightrft.datasets.rows import DataError
from lightrft.environments.base import Message
from lightrft.utils.errors import UserError

_TOOLS = 64  # names of tools whose calls are kept as the template writes them
PROBE, THOUGHT = "lightrft-answer", "lightrft-thought"
ASK: Message = {"role": "user", "content": "1"}
ANSWER: Message = {"role": "assistant", "content": PROBE}


def call_of(name: str) -> Message:
    """Return an answer that calls a tool, with the probe as an argument."""
    function = {"name": name, "arguments": {"x": PROBE}}
    return {"role": "assistant", "content": "",
            "tool_calls": [{"id": "callabcde", "type": "function", "function": function}]}  # yapf: disable


def result_of(name: str, content: str = "2") -> Message:
    """Return the result of a call of :func:`call_of`."""
    return {"role": "tool", "name": name, "tool_call_id": "callabcde", "content": content}


class TurnTemplate:
    """Chat template of a model, as far as it writes what follows a turn of the policy.

    Args:
        title: of the model, for errors.
    """

    def __init__(self, encoder: Renderer, title: str) -> None:
        self.encoder, self.title = encoder, title
        texts = sorted(special_texts(encoder.tokenizer), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts)))
        self._answered = lru_cache(_TOOLS)(self._render_answer)

    def behind(self, messages: Sequence[Message]) -> tuple[str, str]:
        """Return the special token that ends an answer, if there is one, and the text between it and the next turn.

        Raises:
            UserError: an answer is rendered in another way when a message follows, or the messages are refused.
        """
        runs = [*self._runs(messages)]
        found = [self._behind(run, last=run is runs[-1]) for run in runs]
        return found[0][0], found[0][1] + "".join(rest.removeprefix(gap) for _, rest, gap in found[1:])

    def _behind(self, run: list[Message], last: bool) -> tuple[str, str, str]:
        """Return the end of an answer, what follows until the messages of a run are over, and how that begins."""
        answer, known = self._answer_before(run)
        text = self.text([ASK, answer, *run], opens=last)
        (head, _, tail), (later_head, kept, later) = known.rpartition(PROBE), text.partition(PROBE)
        start, end = self._end(tail, later)
        if PROBE not in known or not kept or _bare(head) != _bare(later_head) or later[:start] != tail[:start]:
            raise UserError(f"--environment: the chat template of {self.title} is not prefix-stable: with a later "
                            f"message it renders {known[-60:]!r} as {text[:len(known)][-60:]!r}, so later turns "
                            "would not follow what was drawn. Give another one with --chat_template")
        return later[start:end], later[end:], tail[end:]

    def _end(self, tail: str, later: str) -> tuple[int, int]:
        """Return where, behind an answer, the special token is that ends it; (n, n): behind n characters, without one.

        Args:
            tail: behind the last answer of a chat, where the end may be another token (``<|return|>`` in gpt-oss), or
                one that ends the whole chat may follow.
            later: the same, when a message follows.
        """
        common = [match.span() for match in self._special.finditer(commonprefix([tail, later]))]
        last, first = self._special.search(tail), self._special.search(later)
        if common:
            return common[-1]
        if last is not None and first is not None and last.start() == first.start():
            return first.span()
        return len(tail), len(tail)

    def _runs(self, messages: Sequence[Message]) -> Iterator[list[Message]]:
        """Yield the messages that are rendered together: all, unless the template takes the name of a tool from the
        call before, which stands for the results of one tool alone."""
        if not self._named_by_call:
            yield [*messages]
            return
        for _, run in groupby(messages, lambda message: message.get("name") if message["role"] == "tool" else None):
            yield [*run]

    @cached_property
    def _named_by_call(self) -> bool:
        try:
            first, second = (self.text([ASK, call_of(name), result_of("f")]).rpartition(PROBE)[2] for name in "fg")
        except DataError:  # it refuses calls or results; the check at the start says so where there are tools
            return False
        return first != second

    def _answer_before(self, run: list[Message]) -> tuple[Message, str]:
        """Return a call if results follow, where the template has calls, else a text; and the chat that ends with
        it."""
        tools = [message for message in run if message["role"] == "tool"]
        name = (tools[0].get("name") or "").replace(PROBE, "") if tools else ""  # the policy may write any name
        return self._answered(name or "unknown" if tools and self.shows_calls else None)

    def _render_answer(self, tool: str | None) -> tuple[Message, str]:
        answer = ANSWER if tool is None else call_of(tool)
        return answer, self.text([ASK, answer])

    @cached_property
    def shows_calls(self) -> bool:
        """True if the template writes calls of tools."""
        try:
            return PROBE in self.text([ASK, call_of("f")])
        except DataError:
            return False

    @cached_property
    def drops_thoughts(self) -> bool:
        """True if it shows the thoughts of the last answer, and leaves them out once a user answers."""
        thinks = ANSWER | {"reasoning_content": THOUGHT, "thinking": THOUGHT}
        try:
            return THOUGHT in self.text([ASK, thinks]) and THOUGHT not in self.text([ASK, thinks, ASK], opens=True)
        except DataError:
            return False

    def text(self, messages: Sequence[Message], opens: bool = False) -> str:
        """Render messages; ``opens``: with the start of the next answer."""
        return self.encoder.chat_text([list(messages)], generation_prompt=opens)[0]


def _bare(text: str) -> str:
    """Remove the empty thoughts that some templates write before the last answer alone."""
    return re.sub(r"<think>\s*</think>\s*", "", text)
