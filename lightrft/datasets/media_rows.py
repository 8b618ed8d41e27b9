"""Pairs the media of a row with their positions in its messages, in all supported forms."""
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from lightrft.config.prompt_schema import MediaConfig
from lightrft.datasets.media import find_medium, KINDS, Medium, MediaError, MediaRules, shorten
from lightrft.datasets.prompt_rows import Message
from lightrft.datasets.rows import DataError, Row, Rows
from lightrft.utils.logging import warn_of_all

Part = tuple[str, Any]  # ("text", text), (kind, the medium inside of the part) or (kind, None)
Chat = tuple[list[Message], list[Medium]]

COLUMNS = {"image": ("images", "image"), "video": ("videos", "video"), "audio": ("audios", "audio", "audio_path")}
_PLACEHOLDER = re.compile(f"<({'|'.join(KINDS)})>")
_TYPES = {f"{prefix}{kind}{suffix}": kind for kind in KINDS
          for prefix, suffix in (("", ""), ("", "_url"), ("input_", ""))}  # yapf: disable
_OBJECTS = ("<ref-object>", "<bbox>")  # of ms-swift
_PAYLOADS = ("url", "path", "bytes", "base64", "data", "array")  # other names of what a part of a content list holds


def find_row_media(row: Row, cfg: MediaConfig, messages: list[Message], rules: MediaRules, where: str,
                   takes: Sequence[str] = KINDS) -> Chat:
    """Return the messages with a part ``{"type": "image"}`` at the position of each medium, and the media in order.

    Positions are parts of content lists, or else ``<image>``, ``<video>`` and ``<audio>`` in texts (:func:`_marks`).
    Media are in the columns of ``--images_key`` and its siblings, or inside of parts. Without a position, the media of
    a column come first in the first user turn. Messages of a row without media and placeholders are returned unchanged.

    Args:
        where: file and row, for messages.
        takes: kinds of media that the model takes.

    Raises:
        MediaError: a kind that the model does not take, more or fewer media than positions, more than the limits, parts
            of unknown types, or a medium that :func:`find_medium` refuses.
    """
    turns, listed = _taken(row, cfg, messages, where, takes)
    if not any(listed.values()) and all(kind == "text" for turn in turns for kind, _ in turn):
        return messages, []
    for kind in KINDS:
        _check_columns(row, kind, cfg, rules, where)
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    for kind in reversed(KINDS):  # those put at the start end up in the order of KINDS
        turns = _fill(turns, kind, listed[kind], first, rules, where)
    media = [find_medium(value, kind, rules, where) for turn in turns for kind, value in turn if kind != "text"]
    _check_limits(media, cfg, where)
    return [{**message, "content": _content(message, turn)} for message, turn in zip(messages, turns)], media


def count_media(row: Row, cfg: MediaConfig, messages: list[Message], where: str, takes: Sequence[str]) -> Counter[str]:
    """Count the media of a row by kind, all of kinds that the model ``takes``; none of them is opened.

    Raises:
        MediaError: it has another kind, or parts of unknown types.
    """
    turns, listed = _taken(row, cfg, messages, where, takes)
    parts = Counter(kind for turn in turns for kind, _ in turn if kind != "text")
    return parts | Counter({kind: len(values) for kind, values in listed.items() if values})


def find_media(rows: Rows, chats: list[list[Message]], cfg: MediaConfig, takes: Sequence[str] = KINDS,
               new_system: bool = False) -> list[Chat | None]:
    """Apply :func:`find_row_media` to all rows of one spec; ``chats`` holds their messages, and with ``new_system``
    loses the system turns of the rows.

    Relative paths start at ``--media_root``, else at the folder of the row's file. A row whose media cannot be used is
    None under ``--media_policy skip``, and the number of such rows is logged.

    Raises:
        MediaError: as there, under ``--media_policy error``.
        DataError: no row is left.
    """
    for notice in (*other_kinds(cfg), *plain_marks(rows, chats, cfg, takes)):
        warn_of_all(notice)
    rules, errors, columns = MediaRules.of(cfg), [], media_columns(cfg) | {"objects"}
    of_file = lru_cache(rules.for_rows_of)
    found: list[Chat | None] = []
    for i, (row, chat) in enumerate(zip(rows.rows, chats, strict=True)):
        if not new_system and columns.isdisjoint(row) and all(isinstance(turn.get("content"), str) for turn in chat):
            found.append((chat, []))  # most rows of most data: texts without a column that could fill a position
            continue
        try:
            if new_system:
                _check_system(row, cfg, rows.where(i))
            found.append(find_row_media(row, cfg, chat, of_file(rows.media_home(i)), rows.where(i), takes))
        except MediaError as error:
            if rules.policy == "error":
                raise
            found.append(None)
            errors.append(error)
    if errors:
        text = f"{len(errors)} of {len(found)} rows have media that cannot be used (the first: {errors[0]})"
        if len(errors) == len(found):
            raise DataError(f"{text}: nothing is left")
        warn_of_all(f"{text}: left out")
    return found


def _check_system(row: Row, cfg: MediaConfig, where: str) -> None:
    """Refuse a row with media in its own system turn, which ``--system_prompt`` would replace.

    Raises:
        MediaError: it has some.
    """
    chats = [value for value in row.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    marks = _marks(row, cfg, [turn.get("content") for chat in chats for turn in chat if isinstance(turn, dict)])
    for turn in (chat[0] for chat in chats if "system" in (chat[0].get("role"), chat[0].get("from"))):
        content = turn.get("content", turn.get("value"))
        kind = next((kind for kind, _ in _parts(content, marks, where) if kind != "text"), None)
        if kind is not None:
            raise MediaError(
                f"{where}: --system_prompt replaces the system turn of this row, which holds media of kind {kind}. "
                "Write them in a user turn, or drop --system_prompt")


def part_media(row: Row, cfg: MediaConfig, texts: Sequence[Sequence[Any]]) -> dict[str, list[list[Any]]]:
    """Split the columns that hold the media of several texts, in the order of their placeholders.

    Args:
        texts: the contents of the turns of each.

    Returns:
        By column the media of each text. A column with another number of media than placeholders is not in it.
    """
    found: dict[str, list[list[Any]]] = {}
    marks = _marks(row, cfg, [content for contents in texts for content in contents])
    for kind in KINDS:
        counts = [sum(_placeholders(content, kind, marks) for content in contents) for contents in texts]
        ends = list(accumulate(counts))
        for name in _columns(kind, cfg):
            one = row.get(name)
            if isinstance(one, (list, tuple)) and one and len(one) == ends[-1]:
                found[name] = [list(one[end - count:end]) for end, count in zip(ends, counts)]
    return found


def _placeholders(content: Any, kind: str, marks: list[str]) -> int:
    """Count the positions of one kind in a content."""
    parts = content if isinstance(content, list) else [content]
    words = sum(_text(part).count(f"<{kind}>") for part in parts) if kind in marks else 0
    return words + sum(isinstance(part, dict) and _kind(part) == kind for part in parts)


def rejected_media(row: Row, cfg: MediaConfig) -> Row:
    """Return the columns of media as the rejected answer of a row sees them, of the kinds that have ms-swift's column
    ``rejected_images`` or its like: that one alone counts then."""
    found: Row = {}
    for kind in KINDS:
        if _values(own := row.get(f"rejected_{kind}s")):
            first, *others = _columns(kind, cfg)
            found |= {first: own, **dict.fromkeys(others)}
    return found


def media_columns(cfg: MediaConfig) -> set[str]:
    """Names of the columns that may hold media."""
    return {cfg.images_key, cfg.videos_key, cfg.audios_key, *(name for names in COLUMNS.values() for name in names)}


# -- one row ----------------------------------------------------------------------------------------------------------
def _taken(row: Row, cfg: MediaConfig, messages: list[Message], where: str,
           takes: Sequence[str]) -> tuple[list[list[Part]], dict[str, list[Any]]]:
    """Return the parts of each turn, and the media of each kind in columns; refuse kinds that the model does not take.

    A text that goes into no chat has no turns, and no position for media. For a model that takes text only, a content
    that is neither text nor a list (the result of a tool) is left to the template.
    """
    _check_objects(row, messages, where)
    contents = [message.get("content") for message in messages]
    marks = _marks(row, cfg, contents)
    turns = [list(_parts(content, marks, where)) if takes or isinstance(content, (str, list)) else []
             for content in contents]  # yapf: disable
    listed = {kind: _listed(row, kind, cfg) for kind in KINDS}
    for kind in KINDS:
        in_part = any(its == kind and value is not None for turn in turns for its, value in turn)
        if kind not in takes and (listed[kind] or in_part):
            place = "a part of a message" if in_part else f"the column {_column(row, kind, cfg)!r}"
            raise MediaError(
                f"{where}: {place} holds media of kind {kind}, and this model takes {', '.join(takes) or 'text'} only. "
                f"Choose a model that takes {kind}, name the column of what it holds{_flags(takes)}, or leave such "
                "rows out with --media_policy skip")
        if listed[kind] and not messages:
            raise MediaError(f"{where}: the column {_column(row, kind, cfg)!r} holds media of kind {kind}, and a text "
                             "prompt that is not rendered as a chat cannot hold them. Write the row as messages")
    return turns, listed


def _check_objects(row: Row, messages: list[Message], where: str) -> None:
    """Refuse a row whose texts have ms-swift's placeholders of names and coordinates.

    Raises:
        MediaError: it has some.
    """
    mark = next((mark for mark in _OBJECTS for turn in messages if mark in _words(turn)), None)
    if mark is not None and row.get("objects"):
        raise MediaError(f"{where}: {mark} in a text stands for a name or coordinates in the column 'objects', which "
                         "is not read: each model writes coordinates in its own form. Write them in the text")


def _flags(takes: Sequence[str]) -> str:
    return f" ({', '.join(f'--{kind}s_key' for kind in takes)})" if takes else ""


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


def _marks(row: Row, cfg: MediaConfig, contents: Sequence[Any]) -> list[str]:
    """Return the kinds whose ``<image>`` or its like in texts is a placeholder: those that have a column and no part of
    a content list. Beside parts of other kinds the column must have a medium, since tables have all columns."""
    typed = {_kind(part) for content in contents if isinstance(content, list) for part in content
             if isinstance(part, dict)}.intersection(KINDS)  # yapf: disable
    return [kind for kind in KINDS if kind not in typed and any(
        name in row and (not typed or _values(row[name])) for name in _columns(kind, cfg))]  # yapf: disable


def _kind(part: Row) -> str:
    """Return "text", the kind of medium, or the unknown type of a part of a content list."""
    given = [name for name, value in part.items() if value is not None]
    named = str(part.get("type") or next((name for name in given if name in _TYPES), "text"))
    return _TYPES.get(named, named)


def _typed(part: Any, where: str) -> Part:
    """Return the kind of a part of a content list, and its text or the medium inside (None: it is in a column)."""
    given = {name: value for name, value in part.items() if value is not None} if isinstance(part, dict) else {}
    kind = _kind(given)
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
    """Names of the columns that may hold media of ``kind``, those of options first: its own, and another one that names
    a column of this kind."""
    named = [(key == COLUMNS[kind][0], its != kind, key) for its, key in _keys_of_options(cfg).items()
             if _kind_in(key, its) == kind]  # yapf: disable
    return tuple(dict.fromkeys((*(key for *_, key in sorted(named)), *COLUMNS[kind])))


def _kind_in(column: str, kind: str) -> str:
    """Return the kind of the media in a column that the option of ``kind`` names: of a known column its own."""
    return next((its for its in KINDS if column in COLUMNS[its]), kind)


def _keys_of_options(cfg: MediaConfig) -> dict[str, str]:
    return {"image": cfg.images_key, "video": cfg.videos_key, "audio": cfg.audios_key}


def other_kinds(cfg: MediaConfig) -> Iterator[str]:
    """Yield a notice for every option that names a column of another kind, as ``--images_key audio_path`` of
    LightRFT."""
    for kind, key in _keys_of_options(cfg).items():
        if (other := _kind_in(key, kind)) != kind:
            yield f"--{kind}s_key {key}: the column {key!r} holds media of kind {other}, and is read as --{other}s_key"


def plain_marks(rows: Rows, chats: list[list[Message]], cfg: MediaConfig, takes: Sequence[str]) -> Iterator[str]:
    """Yield a notice for each kind whose placeholders are plain words in rows, although the model takes that kind."""
    for kind in takes:
        columns = _columns(kind, cfg)
        found = [i for i, (row, chat) in enumerate(zip(rows.rows, chats)) if not any(name in row for name in columns)
                 and any(f"<{kind}>" in _words(turn) for turn in chat)
                 and not any(_placeholders(turn.get("content"), kind, []) for turn in chat)]  # yapf: disable
        if found:
            yield (f"{rows.where(found[0])}: <{kind}> in {len(found)} of {len(rows)} rows is read as plain words, "
                   f"because the row has no column {' or '.join(columns)} (it has {', '.join(rows.rows[found[0]])}). "
                   f"If it stands for a medium, name its column with --{kind}s_key")


def _words(message: Message) -> str:
    """Return the texts of a message."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    return "".join(map(_text, parts))


def _text(part: Any) -> str:
    return str((part.get("text") if isinstance(part, dict) else part) or "")


def _values(value: Any) -> list[Any]:
    """Return the media in the value of a column."""
    if getattr(value, "dtype", None) == object:  # a list that went through pandas
        value = value.tolist()
    if value is None or isinstance(value, (str, list, tuple, dict)) and not value:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _column(row: Row, kind: str, cfg: MediaConfig) -> str | None:
    """Return the column that holds the media of one kind: the named one, else the first known one that is not
    empty."""
    return next((name for name in _columns(kind, cfg) if _values(row.get(name))), None)


def _listed(row: Row, kind: str, cfg: MediaConfig) -> list[Any]:
    """Return the media of one kind in the columns of a row."""
    name = _column(row, kind, cfg)
    return [] if name is None else _values(row[name])


def _check_columns(row: Row, kind: str, cfg: MediaConfig, rules: MediaRules, where: str) -> None:
    """Refuse a row that has other media in a second column, unless an option names the first."""
    filled = [name for name in _columns(kind, cfg) if _values(row.get(name))]
    if len(filled) < 2 or (filled[0] == _columns(kind, cfg)[0] != COLUMNS[kind][0]):
        return
    try:
        found = [_keys(_values(row[name]), kind, rules, where) for name in filled]
    except MediaError:
        found = [[name] for name in filled]  # one of them cannot be read, so they are not the same
    if any(keys != found[0] for keys in found):
        raise MediaError(f"{where}: the columns {' and '.join(map(repr, filled))} hold different {kind}s. Name the one "
                         f"to read with --{kind}s_key, or remove the others")


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
        frames = "; the frames of one video are a list in the list: [[frame, frame]]" * (kind == "video")
        raise MediaError(f"{where}: {len(values)} {kind}s for {empty} placeholders (<{kind}> or {{'type': '{kind}'}}). "
                         f"Write one placeholder for each, or none, which puts them first{frames}")
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
