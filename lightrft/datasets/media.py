"""Finds the pictures, videos and sounds of rows: every form that data sets write becomes a :class:`Medium`.

Nothing is decoded here (:mod:`lightrft.datasets.decoding`). Known rows: verl, LightRFT, TRL and ms-swift.
"""
import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image

from lightrft.config.media_schema import MediaConfig
from lightrft.datasets.pictures import encode_png
from lightrft.datasets.rows import DataError
from lightrft.datasets.waveform import as_mono, write_wav

KINDS = ("image", "video", "audio")
_NESTED = 4  # objects inside each other around one medium, at most
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{16,}={0,2}")
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"II*\0", b"MM\0*", b"fLaC", b"OggS", b"ID3", b"\xff\xfb",
          b"\xff\xf3", b"\x1aE\xdf\xa3", b"FORM", b".snd")  # yapf: disable


class MediaError(DataError):
    """A picture, video or sound that cannot be used; ``--media_policy`` decides what happens to its row."""


@dataclass(frozen=True)
class MediaRules:
    """Limits on what is read, and from where.

    Attributes:
        root: the folder that holds all files; None: files are refused.
        prefix: text that tells the files of several roots apart in keys.
        urls: download ``http://`` and ``https://`` addresses.
        max_bytes: of one encoded medium.
        max_image_pixels: of one decoded picture or frame; a video may have 10 times as many in all its frames.
        decode_timeout_s: to read, download and decode one medium.
        fps: frames per second of a video.
        max_frames: most frames of a video; longer ones have fewer frames per second.
        max_seconds: longest sound.
        policy: "error" or "skip": what a :class:`MediaError` does to its row.
    """
    root: Path | None = None
    prefix: str = ""
    urls: bool = False
    max_bytes: int = 2**29
    max_image_pixels: int = 64_000_000
    decode_timeout_s: float = 30.0
    fps: float = 2.0
    max_frames: int = 256
    max_seconds: float = 3600.0
    policy: str = "error"

    @classmethod
    def of(cls, cfg: MediaConfig) -> "MediaRules":
        """Take the rules from the options.

        Raises:
            DataError: ``--media_root`` is no folder.
        """
        root = None if cfg.media_root is None else Path(cfg.media_root).expanduser()
        if root is not None and not root.is_dir():
            raise DataError(f"--media_root {cfg.media_root}: no such folder")
        return cls(root=root, urls=cfg.media_urls, decode_timeout_s=cfg.media_timeout_s, policy=cfg.media_policy,
                   fps=cfg.fps)

    def for_rows_of(self, file: str) -> "MediaRules":
        """Return these rules for the rows of ``file``: without a ``root``, the folder of an existing file is it."""
        path = Path(file)
        if self.root is not None or not path.exists():
            return self
        folder = path if path.is_dir() else path.parent
        return replace(self, root=folder, prefix=str(folder))


@dataclass(frozen=True)
class Medium:
    """One picture, video or sound by reference: cheap to make and to pickle.

    Attributes:
        kind: "image", "video" or "audio".
        key: the kind and a hash, the same on every rank and node: of the content; of a file, of its path below the root
            and its size; of a URL, of its text.
        source: the encoded bytes, a file, a URL, or the pictures of a video.
        where: row and value, for messages.
    """
    kind: str
    key: str
    source: "bytes | Path | str | tuple[Medium, ...]" = field(repr=False)
    where: str = field(default="", compare=False)


def find_medium(value: Any, kind: str, rules: MediaRules, where: str) -> Medium:
    """Return a reference to the medium ``value`` of a row.

    Args:
        value: bytes, a path, a ``file://``, ``http(s)://`` or ``data:`` URL, base64 text, a picture of Pillow, an array
            of pixels ([H, W] or [H, W, C] uint8), a list of pictures (video), or an object that holds one of these:
            ``{"bytes", "path"}``, ``{"array", "sampling_rate"}``, ``{"image"}``, ``{"url"}``,
            ``{"type": "image_url", "image_url": {"url"}}``.
        kind: one of ``KINDS``.
        where: file and row, for messages.

    Raises:
        MediaError: it is missing, empty, of another type, too large, or outside of ``rules.root``.
    """
    value = _unwrapped(value, kind, where)
    named = f"{where}: {kind} {shorten(value)}"
    source = _source(value, kind, rules, named)
    return Medium(kind, f"{kind}:{_digest(source, rules)}", source, named)


def shorten(value: Any) -> str:
    """Return a short description of a value of a row, for messages."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"of {len(value)} bytes"
    if isinstance(value, Mapping):
        return f"object of {', '.join(map(str, value))[:80] or 'nothing'}"
    if isinstance(value, (str, Path)):
        text = str(value)
        return repr(text if len(text) <= 80 else f"{text[:60]}...{text[-15:]}")
    return repr(value) if isinstance(value, (int, float, type(None))) else type(value).__name__


def _digest(source: Any, rules: MediaRules) -> str:
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(source, bytes):
        digest.update(source)
    elif isinstance(source, Path) and rules.root is not None:
        below = source.relative_to(rules.root.resolve()).as_posix()
        digest.update(f"file\0{rules.prefix}\0{below}\0{source.stat().st_size}".encode("utf-8", "surrogateescape"))
    elif isinstance(source, tuple):
        digest.update("\0".join(("frames", *(frame.key for frame in source))).encode())
    else:
        digest.update(f"url\0{source}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _unwrapped(value: Any, kind: str, where: str) -> Any:
    """Take the value out of the objects that data sets put around it."""
    names = ("bytes", kind, f"{kind}_url", f"input_{kind}", "url", "path", "data", "base64")
    for _ in range(_NESTED):
        if not isinstance(value, Mapping) or value.get("array") is not None:
            return value
        value = next((value[name] for name in names if value.get(name) is not None), None)
    raise MediaError(f"{where}: {kind} {shorten(value)}: objects inside objects. Write the {kind} as bytes or a path")


def _source(value: Any, kind: str, rules: MediaRules, where: str) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _checked(bytes(value), rules, where)
    if isinstance(value, str):
        return _text_source(value, rules, where)
    if isinstance(value, Path):
        return _file(str(value), rules, where)
    if kind == "audio" and isinstance(value, Mapping):
        return _checked(_encoded_sound(value, where), rules, where)
    if kind == "image" and isinstance(value, (Image.Image, np.ndarray)):
        return _checked(_encoded_picture(value, rules, where), rules, where)
    if kind == "video" and (isinstance(value, (list, tuple)) or isinstance(value, np.ndarray) and value.ndim == 4):
        return _frames(value, rules, where)
    problem = "it is empty" if value is None else f"{type(value).__name__} is not a form of it that is known"
    raise MediaError(f"{where}: {problem}. Write the encoded bytes or the path of a file")


def _frames(values: Any, rules: MediaRules, where: str) -> tuple[Medium, ...]:
    if not 0 < len(values) <= rules.max_frames:
        raise MediaError(f"{where}: {len(values)} pictures; a video has 1 to {rules.max_frames}. Leave some out")
    return tuple(find_medium(value, "image", rules, f"{where}, frame {i}") for i, value in enumerate(values, start=1))


def _checked(data: bytes, rules: MediaRules, where: str) -> bytes:
    check_size(len(data), rules, where)
    return data


def check_size(size: int, rules: MediaRules, where: str) -> None:
    """Raise :class:`MediaError` if ``size`` bytes are none, or more than the rules allow."""
    if size == 0:
        raise MediaError(f"{where}: it is empty (0 bytes). Write the data again, or remove the row")
    if size > rules.max_bytes:
        raise MediaError(
            f"{where}: {size} bytes are more than the {rules.max_bytes} that are allowed. Make it smaller, "
            "or remove the row")


# -- text: URLs, base64 and paths -------------------------------------------------------------------------------------
def _text_source(text: str, rules: MediaRules, where: str) -> bytes | Path | str:
    scheme = text[:8].lower()
    if scheme.startswith("data:"):
        return _checked(_data_url(text, where), rules, where)
    if scheme.startswith("file://"):
        return _file(_file_url(text, where), rules, where)
    if scheme.startswith(("http://", "https://")):
        if not rules.urls:
            raise MediaError(
                f"{where}: downloads are off. Allow them with --media_urls, or download it first and write "
                "its path")
        return text
    if re.match(r"[a-z][a-z0-9+.-]*://", scheme):
        raise MediaError(f"{where}: this kind of URL is not read. Write a path, or an http(s) URL with --media_urls")
    inline = _base64(text)
    return _file(text, rules, where) if inline is None else _checked(inline, rules, where)


def _data_url(text: str, where: str) -> bytes:
    head, comma, body = text.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise binascii.Error("no ';base64,' in it")
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"{where}: not a data URL in base64 ({error}). Write the row again") from error


def _file_url(text: str, where: str) -> str:
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise MediaError(f"{where}: not a URL ({error}). Write the path") from error
    if parts.netloc not in ("", "localhost"):
        raise MediaError(f"{where}: a file of another machine, {parts.netloc!r}. Write file:///path or the path")
    return unquote(parts.path)


def _base64(text: str) -> bytes | None:
    """Decode base64 whose first bytes are those of a known format; None for other text, e.g. a path."""
    if not _BASE64.fullmatch("".join(text[:96].split())):
        return None
    plain = "".join(text.split()).rstrip("=").translate(str.maketrans("-_", "+/"))
    try:
        data = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if data.startswith(_MAGIC) or data[4:8] == b"ftyp" else None


def _file(text: str, rules: MediaRules, where: str) -> Path:
    """Return the real path of a regular file below the root, after all symbolic links.

    Raises:
        MediaError: as in :func:`find_medium`.
    """
    if rules.root is None:
        raise MediaError(
            f"{where}: a path, but these rows are in no file that it could be relative to. Name the folder "
            "of the media with --media_root")
    try:
        root = rules.root.resolve()
        path = (root / text).resolve()
        inside, found = path.is_relative_to(root), path.is_file()
        size = path.stat().st_size if inside and found else 0
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error  # which has the path, whole
        raise MediaError(f"{where}: not a path that can be read ({reason}). Correct the row") from error
    if not inside:
        raise MediaError(
            f"{where}: outside of {root}, the only folder that is read. Name another one with --media_root")
    if not found:
        raise MediaError(f"{where}: no such file in {root}. Copy it there, or name another folder with --media_root")
    check_size(size, rules, where)
    return path


# -- values of Python programs ----------------------------------------------------------------------------------------
def _encoded_picture(picture: "Image.Image | np.ndarray", rules: MediaRules, where: str) -> bytes:
    try:
        return encode_png(picture, rules.max_image_pixels)
    except (OSError, ValueError, TypeError, LookupError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise MediaError(f"{where}: not a picture: {error}. Write [H, W] or [H, W, C] uint8, or encoded "
                         "bytes") from error


def _encoded_sound(value: Mapping[str, Any], where: str) -> bytes:
    """Encode ``{"array", "sampling_rate"}`` as a WAV file."""
    rate = value.get("sampling_rate")
    try:
        if isinstance(rate, bool) or not isinstance(rate, int) or not 0 < rate < 2**31:
            raise ValueError(f"sampling_rate {rate!r}")
        return write_wav(as_mono(value["array"]), rate)
    except (ValueError, TypeError, OverflowError) as error:
        raise MediaError(f"{where}: not a sound: {error}. Write numbers from -1 to 1 and their sampling_rate in "
                         "Hz") from error
