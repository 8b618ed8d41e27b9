"""Requests to a reward server and its answers, in the forms of OpenRLHF, LightRFT and verl. Texts only, never code."""
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightrft.datasets.rendering import without_end
from lightrft.datasets.rows import DataError, lone_surrogate
from lightrft.datasets.template_kwargs import template_kwargs
from lightrft.rewards.base import RewardInput, Score
from lightrft.utils.play import Play

Body = dict[str, Any]
MEDIA = ("images", "videos", "audios")  # fields of other clients
_OF_TURNS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


class BadRequest(ValueError):
    """A request that is refused; ``status`` is the HTTP status of the answer, the message says why."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Reader:
    """Reads the texts of a request.

    Attributes:
        ends: end and padding tokens of the models. Behind a text they are dropped, because its end token is added.
        max_texts: of a request.
        starts: tokens that the tokenizers of the models write before a text by themselves (bos). At the start of a
            text without a prompt they are dropped; a prompt loses its own where it is tokenized.
    """
    ends: tuple[str, ...]
    max_texts: int
    starts: tuple[str, ...] = ()

    def queries(self, body: Body) -> list[RewardInput]:
        """Read ``{"query" or "queries": [...], "prompts": [...], "messages": [...], "turns": [...]}``; all but the
        first may be missing.

        A query is prompt + response. ``messages`` has the prompts as chats (lists of turns, or null), which a model
        renders by its own template, with ``tools`` and ``chat_template_kwargs`` of each; texts are read as they are.
        ``turns`` has the responses as messages, where an environment took part in them.
        """
        for name in MEDIA:
            if _holds(body.get(name)):
                raise BadRequest(f"{name}: a reward model behind a server reads text only. Leave it out, or score with "
                                 "--reward_pretrain of the run")
        queries = self._texts(body, "query" if "query" in body else "queries")
        prompts: list[Any] = [None] * len(queries)
        if body.get("prompts"):
            prompts = self._texts(body, "prompts", len(queries))
        chats = _column(body, "messages", len(queries)) if body.get("messages") else [None] * len(queries)
        inputs = [self._input(i, *row) for i, row in enumerate(zip(queries, prompts, chats))]
        if body.get("turns"):
            inputs = [
                replace(one, play=_play(turns, i))
                for i, (one, turns) in enumerate(zip(inputs, _column(body, "turns", len(queries))))
            ]
        return [replace(one, template_kwargs=kwargs) for one, kwargs in zip(inputs, _kwargs(body, len(inputs)))]

    def inputs(self, body: Body) -> list[RewardInput]:
        """Read ``{"input": "..." or [...]}``: whole texts, as verl sends them."""
        given = body.get("input")
        texts = self._texts({"input": [given] if isinstance(given, str) else given}, "input")
        return [RewardInput("", without_end(self._without_start(text), self.ends)) for text in texts]

    def _without_start(self, text: str) -> str:
        """Remove one of :attr:`starts`, which would otherwise be there twice."""
        start = next((start for start in self.starts if text.startswith(start)), "")
        return text[len(start):]

    def _texts(self, body: Body, name: str, size: int | None = None) -> list[str]:
        found = _column(body, name, size)
        if len(found) > self.max_texts:
            raise BadRequest(
                f"{name}: {len(found)} texts are more than {self.max_texts} (--max_texts); send several "
                "requests", 413)
        for i, text in enumerate(found):
            if not isinstance(text, str):
                raise BadRequest(f"{name}[{i}]: expected a text, got {type(text).__name__}")
            _check_whole(text, f"{name}[{i}]")
        return found

    def _input(self, index: int, query: str, prompt: str | None, chat: Any) -> RewardInput:
        if chat and prompt is None:
            raise BadRequest(
                f"messages[{index}]: the query must begin with its entry of prompts, since the rest is the "
                "response; send both, or no messages")
        if prompt and not query.startswith(prompt):
            raise BadRequest(
                f"prompts[{index}]: the query does not begin with it, so its response is unknown. It is "
                f"{prompt[:60]!r}, and the query begins {query[:60]!r}. Decode both alike (with or without "
                "special tokens), or send no prompts")
        response = without_end(query[len(prompt or ""):], self.ends)
        return RewardInput(prompt or "", response if prompt or chat else self._without_start(response),
                           _turns(chat, index, "messages"))


def read_json(raw: bytes) -> Body:
    """Parse the body of a request; raise :class:`BadRequest` if it is no JSON object."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"the body is a JSON {type(body).__name__}; expected an object such as {{\"query\": [...]}}")
    return body


def _column(body: Body, name: str, size: int | None = None) -> list[Any]:
    found = body.get(name)
    if not isinstance(found, list) or not found:
        raise BadRequest(f"{name}: expected a list with one entry per text, got {str(found):.100}; the body has "
                         f"{', '.join(body) or 'nothing'}")
    if size is not None and len(found) != size:
        raise BadRequest(f"{name}: {len(found)} entries for {size} queries")
    return found


def _holds(value: Any) -> bool:
    """Return True if a field has more than nulls and empty lists."""
    return any(map(_holds, value)) if isinstance(value, list) else value not in (None, "")


def _play(chat: Any, index: int) -> Play | None:
    turns = _turns(chat, index, "turns")
    return Play(turns) if turns else None


def _turns(chat: Any, index: int, name: str) -> list[dict[str, Any]]:
    """Check that a chat is a list of turns with texts."""
    if not isinstance(chat or [], list):
        raise BadRequest(f"{name}[{index}]: expected a list of turns, or null, got {str(chat):.100}")
    for turn in chat or []:
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str) or not _is_text(turn.get("content")):
            raise BadRequest(f"{name}[{index}]: expected turns {{\"role\": TEXT, \"content\": TEXT}}, got "
                             f"{str(turn):.100}; a reward model behind a server reads text only")
    _check_whole(chat, f"{name}[{index}]")
    return [{name: turn[name] for name in _OF_TURNS if turn.get(name) is not None} for turn in chat or []]


def _kwargs(body: Body, size: int) -> list[dict[str, Any]]:
    """Read the keyword arguments of the chat template: ``tools`` and ``chat_template_kwargs``, an entry per text."""
    names = [name for name in ("tools", "chat_template_kwargs") if body.get(name)]
    columns = {name: _column(body, name, size) for name in names}
    try:
        return [template_kwargs({name: columns[name][i] for name in names}, True, f"text {i}") for i in range(size)]
    except DataError as error:
        raise BadRequest(str(error)) from error


def _check_whole(value: Any, name: str) -> None:
    if lone_surrogate(value):
        raise BadRequest(f"{name}: holds half of a surrogate pair, which no tokenizer reads")


def _is_text(content: Any) -> bool:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return isinstance(parts, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts)


def rewards_answer(scores: Sequence[Score]) -> Body:
    """Answer OpenRLHF and LightRFT: null for a text that is not scored, with its cause in ``errors``."""
    totals, names = [score.total for score in scores], list(scores[0].parts)
    logs = {name: [score.parts[name] for score in scores] for name in names} if len(names) > 1 else {}
    answer: Body = {"rewards": totals, "scores": totals, "extra_logs": logs}
    return answer | ({"errors": [score.error for score in scores]} if None in totals else {})


def _scored(scores: Sequence[Score]) -> list[float]:
    for i, score in enumerate(scores):
        if score.total is None:
            raise BadRequest(f"input[{i}]: not scored: {score.error}")
    return [score.total for score in scores if score.total is not None]


def classify_answer(scores: Sequence[Score]) -> Body:
    """Answer a client of vLLM's ``/classify``; raise :class:`BadRequest` for a text that is not scored."""
    rows = [{"index": i, "label": "reward", "probs": [value], "num_classes": 1}
            for i, value in enumerate(_scored(scores))]  # yapf: disable
    return {"object": "list", "data": rows}


def embeddings_answer(scores: Sequence[Score]) -> Body:
    """Answer a client of SGLang's ``/v1/embeddings``; raise :class:`BadRequest` for a text that is not scored."""
    rows = [{"index": i, "object": "embedding", "embedding": [value]} for i, value in enumerate(_scored(scores))]
    return {"object": "list", "data": rows}


Form = tuple[Callable[[Reader, Body], list[RewardInput]], Callable[[Sequence[Score]], Body]]
FORMS: dict[str, Form] = {
    "/get_reward": (Reader.queries, rewards_answer),
    "/classify": (Reader.inputs, classify_answer),
    "/v1/embeddings": (Reader.inputs, embeddings_answer),
}
"""Path -> how its requests are read and answered: that of OpenRLHF and LightRFT, and those that verl asks."""
