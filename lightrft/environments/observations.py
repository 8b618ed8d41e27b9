"""Observations as plain values: messages of an environment, texts and pictures as encoded bytes in base64. Nothing here
imports torch: worker processes import this module, and what reads pictures only when there is one."""
import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from lightrft.environments.base import Message, UnreadMedia

MAX_SHOWN_BYTES = 8 << 20  # of the pictures of one answer, in base64
_PICTURES = ("image", "image_url", "input_image")  # types of parts
_OF_ROWS = ("image", "video", "audio")  # kinds of media
_FIELDS = ("role", "name", "tool_call_id")
_ROLES = ("user", "tool", "system")
_THOUGHTS = ("reasoning_content", "thinking")
_BOARD = 8  # side of an array that may be one of numbers
_CONTENTS = ("bytes", "array", "data", "base64", "image", "path", "url", "image_url", "input_image")


def plain_messages(value: Any) -> list[Message]:
    """Return messages as a list of roles and contents: a text, or with pictures a list of parts ``{"type": "text",
    "text"}`` and ``{"type": "image", "data"}``. A text is one of the user. Of other fields the name and
    the id of a call are kept: what else a template reads, as calls and thoughts, is the policy's to write.

    Raises:
        UnreadMedia: it has a video or a sound.
        DataError, ValueError: a picture cannot be read, or is too large.
        TypeError: it is something else, or of another role.
    """
    if value is None or value == "":
        return []
    listed = _listed([{"role": "user", "content": value}] if isinstance(value, str) else value, _ROLES)
    return [_plain(each, _content(each["content"])) for each in listed]


def plain_history(value: Any) -> list[Message] | None:
    """Return a whole conversation as :func:`plain_messages` does. It may have turns of the assistant, with their
    thoughts and calls of tools, and parts of the media of the row as the prompt has them, without content.

    Raises:
        UnreadMedia, DataError, ValueError, TypeError: as :func:`plain_messages`; or it has no message, or ends with one
            of the assistant.
    """
    if value is None:
        return None
    value = [*map(_with_content, value)] if isinstance(value, (list, tuple)) else value
    listed = _listed(value, (*_ROLES, "assistant"))
    if not listed or listed[-1]["role"] == "assistant":
        raise ValueError("a history has no message, or ends with one of the assistant, whose next turn the policy "
                         "draws. End it with what the policy answers")
    return [_plain(each, _content(each["content"], of_row=True)) | _turn_of_policy(each) for each in listed]


def _listed(value: Any, roles: Sequence[str]) -> Sequence[Message]:
    """Return messages whose fields have the right types, and which are of ``roles``."""
    if not isinstance(value, (list, tuple)) or not all(
            isinstance(each, dict) and isinstance(each.get("role"), str)
            and isinstance(each.get("content"), (str, list)) and isinstance(each.get("name") or "", str)
            for each in value):  # yapf: disable
        raise TypeError(f"messages are {value!r}: expected a text, or a list of dicts with role and content: a text, "
                        "or a list of parts")
    odd = next((each["role"] for each in value if each["role"] not in roles), None)
    if odd == "assistant":
        raise TypeError("an environment wrote a message of the assistant, whose turns the policy draws. One that "
                        "changes earlier turns returns Step(history=...), the whole conversation")
    if odd is not None:
        raise TypeError(f"an environment wrote a message of the role {odd!r}, and chat templates have the roles "
                        f"{', '.join(_ROLES[:-1])} and {_ROLES[-1]}. Write one of these")
    return value


def _plain(message: Message, content: Any) -> Message:
    return {name: message[name] for name in _FIELDS if isinstance(message.get(name), str)} | {"content": content}


def _turn_of_policy(message: Message) -> Message:
    """Return the thoughts and the calls of a turn of the assistant.

    Raises:
        TypeError: a call is none.
    """
    if message["role"] != "assistant":
        return {}
    calls = message.get("tool_calls") or []
    made = [_call_of_policy(call) for call in (calls if isinstance(calls, list) else [calls])]
    thoughts = {name: message[name] for name in _THOUGHTS if isinstance(message.get(name), str)}
    return thoughts | ({"tool_calls": made} if made else {})


def _call_of_policy(call: Any) -> Any:
    """Return a call of a tool, whose arguments are an object; in the form of OpenAI they are a text of one."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments", {}) if isinstance(function, dict) else None
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TypeError(f"a call of a tool in a history is {call!r}: expected {{'type': 'function', 'function': "
                        "{'name', 'arguments'}}, as turn.message has it")
    return call | {"function": function | {"arguments": arguments}}


def _with_content(message: Any) -> Any:
    """Return a message; a turn of the assistant that calls tools alone may have no content."""
    if isinstance(message, dict) and message.get("role") == "assistant" and message.get("content") is None:
        return message | {"content": ""}
    return message


def has_pictures(step: Any) -> bool:
    """Return True if messages, or what :class:`Step` holds, have a picture, which takes a while to encode."""
    messages = getattr(step, "history", None) or getattr(step, "messages", step)
    contents = [each.get("content") for each in messages
                if isinstance(each, dict)] if isinstance(messages, (list, tuple)) else []
    return bool(getattr(step, "images", ())) or any(isinstance(content, list) for content in contents)


def parts_of(value: Any) -> list[dict[str, Any]]:
    """Return the parts of a value that shows pictures: a picture of Pillow, a frame [H, W, 3] of bytes, or a list of
    parts, texts and pictures. Of others nothing."""
    if _is_picture(value):
        return [{"type": "image", "image": value}]
    if not isinstance(value, (list, tuple)) or not any(_is_picture(part) or _is_part(part) for part in value):
        return []
    return [part if isinstance(part, dict) else {"type": "image", "image": part} if _is_picture(part) else
            {"type": "text", "text": str(part)} for part in value]  # yapf: disable


def _is_part(value: Any) -> bool:
    """Return True for a part of a message that holds a picture; a dict that only has its type is data."""
    return isinstance(value, dict) and value.get("type") in _PICTURES and any(
        value.get(name) is not None for name in _CONTENTS)  # yapf: disable


def _is_picture(value: Any) -> bool:
    if type(value).__module__.startswith("PIL."):
        return True
    return str(getattr(value, "dtype", "")) == "uint8" and tuple(value.shape[2:]) == (3, )


def is_frame(value: Any) -> bool:
    """Return True for an array that looks like a picture: bytes [H, W] or [H, W, C], larger than boards of games."""
    shape = tuple(getattr(value, "shape", ()))
    return str(getattr(value, "dtype", "")) == "uint8" and len(shape) in (2, 3) and min(shape[:2]) > _BOARD


def _content(content: Any, of_row: bool = False) -> Any:
    """Return a text, or parts; with ``of_row`` a part without content stands for a medium of the row."""
    if isinstance(content, str):
        return content
    parts = [{"type": part["type"]} if of_row and _is_bare(part) else _part(part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _is_bare(part: Any) -> bool:
    return isinstance(part, dict) and part.keys() == {"type"} and part["type"] in _OF_ROWS


def _part(part: Any) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in _PICTURES:
        return {"type": "image", "data": encoded(part)}
    if kind in ("video", "audio", "video_url", "audio_url", "input_audio"):
        raise UnreadMedia(str(kind))
    raise TypeError(f"a part of a message is {part!r}: expected {{'type': 'text', 'text'}} or {{'type': 'image', "
                    "'image'}")


def encoded(picture: Any) -> str:
    """Return the encoded bytes of a picture in base64. It was decoded once, so that the trainer can.

    Args:
        picture: in any form that rows have (:func:`lightrft.datasets.media.find_medium`); a path is one of the worker.
    """
    from os.path import isfile
    from pathlib import Path

    from lightrft.datasets.decoding import decode
    from lightrft.datasets.media import find_medium, MediaRules
    rules = MediaRules(Path("/"), max_bytes=MAX_SHOWN_BYTES)
    if isinstance(value := _inside(picture), str) and isfile(value):  # False of a long data URI
        picture = Path(value).absolute()
    medium = find_medium(picture, "image", rules, "an observation")
    decode(medium, rules)
    content = medium.source.read_bytes() if isinstance(medium.source, Path) else medium.source
    assert isinstance(content, bytes), "URLs are refused"
    return b64encode(content).decode()


def _inside(picture: Any) -> Any:
    """Return the path in a part of a message, if it has one."""
    if not isinstance(picture, dict):
        return picture
    return next((picture[name] for name in ("image", "path") if isinstance(picture.get(name), str)), None)


def check_size(messages: Iterable[Message], images: Sequence[str]) -> int:
    """Return the characters of the pictures of an answer.

    Raises:
        ValueError: they are too many.
    """
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    size = sum(map(len, (*images, *(part.get("data", "") for part in parts))))
    if size > MAX_SHOWN_BYTES:
        raise ValueError(f"the pictures of the answer have {size} bytes in base64, and at most {MAX_SHOWN_BYTES} are "
                         "taken: show smaller ones, or save them as JPEG")
    return size
