"""Pairs the media of a row with their positions in its messages, whichever way the row writes both."""
import re
from collections.abc import Iterator
from typing import Any

from lightrft.config.media_schema import MediaConfig
from lightrft.datasets.media import find_medium, KINDS, Medium, MediaError, MediaRules, shorten
from lightrft.datasets.records import Message
from lightrft.datasets.rows import DataError, Row, Rows
from lightrft.utils.logging import get_logger

Part = tuple[str, Any]  # ("text", text), (kind, the medium inside of the part) or (kind, None)
Chat = tuple[list[Message], list[Medium]]

COLUMNS = {"image": ("images", "image"), "video": ("videos", "video"), "audio": ("audios", "audio", "audio_path")}
_PLACEHOLDER = re.compile(f"<({'|'.join(KINDS)})>")
_TYPES = {f"{prefix}{kind}{suffix}": kind for kind in KINDS
          for prefix, suffix in (("", ""), ("", "_url"), ("input_", ""))}  # yapf: disable
_PAYLOADS = ("url", "path", "bytes", "base64", "data")  # other names of what a part of a content list holds


def find_row_media(row: Row, cfg: MediaConfig, messages: list[Message], rules: MediaRules, where: str) -> Chat:
    """Return the messages with a part ``{"type": "image"}`` at the position of each medium, and the media in order.

    Positions are ``<image>``, ``<video>`` and ``<audio>`` in texts, and parts of content lists. Media are in the
    columns of ``--images_key`` and its siblings, or inside of parts. Without a position, the media of a column come
    first in the first user turn. In a row that has no column for a kind, ``<image>`` and its like are plain words.
    Messages of a row without media and placeholders are returned unchanged.

    Args:
        where: file and row, for messages.

    Raises:
        MediaError: more or fewer media than positions, more than the limits, parts of unknown types, or a medium that
            :func:`find_medium` refuses.
    """
    marks = [kind for kind in KINDS if any(name in row for name in _columns(kind, cfg))]
    turns = [list(_parts(message.get("content"), marks, where)) for message in messages]
    listed = {kind: _listed(row, kind, cfg) for kind in KINDS}
    if not any(listed.values()) and all(kind == "text" for turn in turns for kind, _ in turn):
        return messages, []
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    for kind in reversed(KINDS):  # those put at the start end up in the order of KINDS
        turns = _fill(turns, kind, listed[kind], first, rules, where)
    media = [find_medium(value, kind, rules, where) for turn in turns for kind, value in turn if kind != "text"]
    _check_limits(media, cfg, where)
    return [{**message, "content": _content(message, turn)} for message, turn in zip(messages, turns)], media


def find_media(rows: Rows, chats: list[list[Message]], cfg: MediaConfig) -> list[Chat | None]:
    """Apply :func:`find_row_media` to all rows of one spec; ``chats`` holds their messages.

    Relative paths start at ``--media_root``, else at the folder of the row's file. A row whose media cannot be used is
    None under ``--media_policy skip``, and the number of such rows is logged.

    Raises:
        MediaError: as there, under ``--media_policy error``.
        DataError: no row is left.
    """
    rules, errors = MediaRules.of(cfg), []
    found: list[Chat | None] = []
    for i, (row, chat) in enumerate(zip(rows.rows, chats, strict=True)):
        try:
            found.append(find_row_media(row, cfg, chat, rules.for_rows_of(rows.origin(i)[0]), rows.where(i)))
        except MediaError as error:
            if rules.policy == "error":
                raise
            found.append(None)
            errors.append(error)
    if errors:
        text = f"{len(errors)} of {len(found)} rows have media that cannot be used (the first: {errors[0]})"
        if len(errors) == len(found):
            raise DataError(f"{text}: nothing is left")
        get_logger().warning("%s: left out", text)
    return found


def media_columns(cfg: MediaConfig) -> set[str]:
    """Names of the columns that may hold media."""
    return {cfg.images_key, cfg.videos_key, cfg.audios_key, *(name for names in COLUMNS.values() for name in names)}


# -- one row ----------------------------------------------------------------------------------------------------------
def _parts(content: Any, marks: list[str], where: str) -> Iterator[Part]:
    """Split a content, text or a list of parts, into texts and media; ``marks``: kinds whose placeholders count."""
    if content is None:
        return
    for part in content if isinstance(content, list) else [content]:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        kind, value = _typed(part, where)
        if kind == "text":
            yield from _split(value, marks)
        else:
            yield kind, value


def _typed(part: Any, where: str) -> Part:
    """Return the kind of a part of a content list, and its text or the medium inside (None: it is in a column)."""
    given = {name: value for name, value in part.items() if value is not None} if isinstance(part, dict) else {}
    named = str(given.get("type") or next((name for name in given if name in _TYPES), "text"))
    kind = _TYPES.get(named, named)
    if kind in KINDS:
        names = (*(name for name, its in _TYPES.items() if its == kind), *_PAYLOADS)
        return kind, given if any(name in given for name in names) else None
    if kind != "text" or not isinstance(given.get("text"), str):
        raise MediaError(f"{where}: a message holds {shorten(part)}, which is no text, {', '.join(KINDS)}. Write "
                         "{'type': 'text', 'text': ...} or {'type': 'image'}")
    return "text", given["text"]


def _split(text: str, marks: list[str]) -> Iterator[Part]:
    """Split a text at its placeholders of the kinds ``marks``."""
    at = 0
    for found in (each for each in _PLACEHOLDER.finditer(text) if each[1] in marks):
        yield "text", text[at:found.start()]
        yield found[1], None
        at = found.end()
    yield "text", text[at:]


def _columns(kind: str, cfg: MediaConfig) -> tuple[str, ...]:
    """Names of the columns that may hold media of ``kind``, the one of the option first."""
    key = {"image": cfg.images_key, "video": cfg.videos_key, "audio": cfg.audios_key}[kind]
    return tuple(dict.fromkeys((key, *COLUMNS[kind])))


def _listed(row: Row, kind: str, cfg: MediaConfig) -> list[Any]:
    """Return the media of one kind in the columns of a row: of the named column, else of the first known one."""
    for name in _columns(kind, cfg):
        value = row.get(name)
        if value is not None and not (isinstance(value, (str, list, tuple, dict)) and not value):
            return list(value) if isinstance(value, (list, tuple)) else [value]
    return []


def _fill(turns: list[list[Part]], kind: str, values: list[Any], first: int, rules: MediaRules,
          where: str) -> list[list[Part]]:
    """Put the media of a column at the empty positions of their kind; without any position, first in turn ``first``."""
    parts = [value for turn in turns for its, value in turn if its == kind]
    empty = sum(value is None for value in parts)
    if values and not parts:
        return [[(kind, value) for value in values] + turn if i == first else turn for i, turn in enumerate(turns)]
    if not empty and values and _keys(values, kind, rules, where) == _keys(parts, kind, rules, where):
        return turns  # the column repeats what the messages hold
    if empty != len(values):
        raise MediaError(f"{where}: {len(values)} {kind}s for {empty} placeholders (<{kind}> or {{'type': '{kind}'}}). "
                         "Write one placeholder for each, or none, which puts them first")
    rest = iter(values)
    return [[(its, next(rest) if its == kind and value is None else value) for its, value in turn] for turn in turns]


def _keys(values: list[Any], kind: str, rules: MediaRules, where: str) -> list[str]:
    return [find_medium(value, kind, rules, where).key for value in values]


def _content(message: Message, turn: list[Part]) -> Any:
    """Return the content of a turn; a text without media stays text, which every template takes."""
    content = message.get("content")
    if content is None or isinstance(content, str) and all(kind == "text" for kind, _ in turn):
        return content
    return [{"type": "text", "text": value} if kind == "text" else {"type": kind} for kind, value in turn
            if kind != "text" or value]  # yapf: disable


def _check_limits(media: list[Medium], cfg: MediaConfig, where: str) -> None:
    limits = {
        "image": cfg.limit_mm_image_per_prompt, "video": cfg.limit_mm_video_per_prompt, "audio":
        cfg.limit_mm_audio_per_prompt
    }
    for kind, limit in limits.items():
        count = sum(medium.kind == kind for medium in media)
        if 0 < limit < count:
            raise MediaError(
                f"{where}: {count} {kind}s are more than --limit_mm_{kind}_per_prompt {limit}. Raise it, or "
                "remove the row")
