"""Finds the pictures, videos and sounds of rows: every form that data sets write becomes a :class:`Medium`.

Nothing is decoded here (:mod:`lightrft.datasets.decoding`). Known rows: verl, LightRFT, TRL and ms-swift.
"""
import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image

from lightrft.config.prompt_schema import MediaConfig
from lightrft.datasets.pictures import encode_png
from lightrft.datasets.rows import DataError
from lightrft.datasets.waveform import as_mono, write_wav

KINDS = ("image", "video", "audio")
_NESTED = 4  # objects inside each other around one medium, at most
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]{16,}={0,2}")
_LONGEST_NAME = 255  # of a file: longer text that could be base64 is
_MAGIC = re.compile(  # first bytes of the formats that are read; weak ones with what else they state
    rb"\xff\xd8\xff|\x89PNG|GIF8|RIFF|II\*\0|MM\0\*|BM....\0\0\0\0|\0\0\0\x0cjP  |\xff\x4f\xff\x51"  # pictures
    rb"|fLaC|OggS|ID3|FORM|\.snd|caff|RF64|riff\x2e\x91\xcf\x11"  # sounds
    rb"|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff][\x10-\xef]"  # MP3
    rb"|....ftyp|....(?:moov|mdat|wide|free)|\x1aE\xdf\xa3|FLV\x01|G.{187}(?:G|$)|\0\0\x01[\xb3\xba]"  # videos
    rb"|\x30\x26\xb2\x75\x8e\x66\xcf\x11",
    re.DOTALL)
_GIVEN_TO_ALL = ("min_pixels", "max_pixels", "fps")  # options, which an object may repeat
_NOT_READ = ("sample_fps", "nframes", "min_frames", "max_frames", "total_pixels", "resized_height", "resized_width",
             "video_start", "video_end", "detail")  # keys of objects in rows of other programs that change a medium
_BLOCK = 1 << 20  # bytes that are read at a time
_DIGESTS: dict[Path, tuple[int, int, str]] = {}  # size, time of change and hash of the files that were read


class MediaError(DataError):
    """A picture, video or sound that cannot be used; ``--media_policy`` decides what happens to its row."""


@dataclass(frozen=True)
class MediaRules:
    """Limits on what is read, and from where; and what the URLs had.

    Attributes:
        root: the folder that holds all files; None: files are refused.
        urls: download ``http://`` and ``https://`` addresses.
        max_bytes: of one encoded medium.
        max_image_pixels: of one decoded picture or frame; a video may have 10 times as many in all its frames.
        decode_timeout_s: to read, download and decode one medium.
        fps: frames per second of a video.
        min_pixels, max_pixels: of a picture or frame as the model gets it; 0: no limit.
        max_frames: most frames of a video; longer ones have fewer frames per second.
        max_seconds: longest sound.
        policy: "error" or "skip": what a :class:`MediaError` does to its row.
        downloads: hash of what each URL had at its first download, by key; filled while media are read.
    """
    root: Path | None = None
    urls: bool = False
    max_bytes: int = 2**29
    max_image_pixels: int = 64_000_000
    decode_timeout_s: float = 30.0
    fps: float = 2.0
    min_pixels: int = 0
    max_pixels: int = 0
    max_frames: int = 256
    max_seconds: float = 3600.0
    policy: str = "error"
    downloads: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

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
                   fps=cfg.fps, min_pixels=cfg.min_pixels, max_pixels=cfg.max_pixels)

    def for_rows_of(self, file: str) -> "MediaRules":
        """Return these rules for the rows of ``file``: without a ``root``, the folder of an existing file is it."""
        path = Path(file)
        if self.root is not None or not path.exists():
            return self
        return replace(self, root=path if path.is_dir() else path.parent)


@dataclass(frozen=True)
class Medium:
    """One picture, video or sound by reference: cheap to make and to pickle.

    Attributes:
        kind: "image", "video" or "audio".
        key: the kind and a hash, the same on every rank and node: of the content, or of the text of a URL.
        source: the encoded bytes, a file, a URL, or the pictures of a video.
        where: row and value, for messages.
    """
    kind: str
    key: str
    source: "bytes | Path | str | tuple[Medium, ...]" = field(repr=False)
    where: str = field(default="", compare=False)

    def downloads(self) -> "Iterator[Medium]":
        """Yield what is downloaded: itself, or pictures of a video."""
        if isinstance(self.source, str):
            yield self
        elif isinstance(self.source, tuple):
            for frame in self.source:
                yield from frame.downloads()


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
        MediaError: it is missing, empty, of another type, too large, or outside of ``rules.root``, or an object states
            a size or rate that is not that of the options.
    """
    value = _unwrapped(value, kind, rules, where)
    named = f"{where}: {kind} {shorten(value)}"
    source = _source(value, kind, rules, named)
    return Medium(kind, f"{kind}:{_digest(source, named)}", source, named)


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


def file_digest(path: Path) -> str:
    """Hash the content of a file; one that has not changed since then is not read again.

    Raises:
        OSError: it cannot be read.
    """
    found = path.stat()
    known = _DIGESTS.get(path)
    if known is not None and known[:2] == (found.st_size, found.st_mtime_ns):
        return known[2]
    digest = _hash()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    _DIGESTS[path] = (found.st_size, found.st_mtime_ns, digest.hexdigest())
    return digest.hexdigest()


def _hash() -> Any:
    return hashlib.blake2b(digest_size=16)


def _digest(source: Any, where: str) -> str:
    if isinstance(source, Path):
        try:
            return file_digest(source)
        except OSError as error:
            raise MediaError(f"{where}: cannot be read ({error.strerror}). Make it readable, or correct the "
                             "row") from error
    digest = _hash()
    if isinstance(source, bytes):
        digest.update(source)
    elif isinstance(source, tuple):
        digest.update("\0".join(("frames", *(frame.key for frame in source))).encode())
    else:
        digest.update(f"url\0{source}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _unwrapped(value: Any, kind: str, rules: MediaRules, where: str) -> Any:
    """Take the value out of the objects that data sets put around it."""
    names = ("bytes", kind, f"{kind}_url", f"input_{kind}", "url", "path", "data", "base64")
    for _ in range(_NESTED):
        if isinstance(value, Mapping):
            _check_options(value, kind, rules, where)
        if not isinstance(value, Mapping) or value.get("array") is not None:
            return value
        given = [value[name] for name in names if value.get(name) is not None]
        value = next((one for one in given if not _is_empty(one)), given[0] if given else None)
    raise MediaError(f"{where}: {kind} {shorten(value)}: objects inside objects. Write the {kind} as bytes or a path")


def _is_empty(value: Any) -> bool:
    """Return True for the empty bytes or text that some programs write next to what counts."""
    return isinstance(value, (bytes, bytearray, memoryview, str)) and not len(value)


def _check_options(given: Mapping[str, Any], kind: str, rules: MediaRules, where: str) -> None:
    """Refuse sizes and rates of one medium, unless they are those of all."""
    for name in (*_GIVEN_TO_ALL, *_NOT_READ):
        value = given.get(name)
        same = name in _GIVEN_TO_ALL and isinstance(value, Real) and value == getattr(rules, name)
        if value is None or same or (name, value) == ("detail", "auto"):
            continue
        remedy = f"Use --{name} {value} for all" if name in _GIVEN_TO_ALL else f"Cut or resize the {kind} itself"
        raise MediaError(f"{where}: {kind} with {name} {shorten(value)}: sizes and rates cannot be set for a single "
                         f"{kind}. {remedy}, or remove {name} from the row")


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
    problem = "it is empty" if value is None else f"{type(value).__name__} is not a known form of it"
    remedy = ". Several pictures of a row are one list, not lists in a list; the frames of a video belong in a column "
    remedy = remedy + "of videos" if isinstance(value, (list, tuple)) and kind == "image" else ""
    raise MediaError(f"{where}: {problem}. Write the encoded bytes or the path of a file{remedy}")


def _frames(values: Any, rules: MediaRules, where: str) -> tuple[Medium, ...]:
    if not 0 < len(values) <= rules.max_frames:
        remedy = "Leave some out" if len(values) else "Write its frames, or remove the row"
        raise MediaError(f"{where}: {len(values)} pictures; a video has 1 to {rules.max_frames}. {remedy}")
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
            raise MediaError(f"{where}: downloads are off. Allow them with --media_urls, or download it first and "
                             "write its path")
        return text
    if re.match(r"[a-z][a-z0-9+.-]*://", scheme):
        raise MediaError(f"{where}: this kind of URL is not read. Write a path, or an http(s) URL with --media_urls")
    inline = _base64(text)
    if inline is not None and _MAGIC.match(inline):
        return _checked(inline, rules, where)
    try:
        return _file(text, rules, where)
    except MediaError as error:
        if inline is None or len(text) <= _LONGEST_NAME:
            raise
        raise MediaError(
            f"{where}: base64 of no known format (it begins with {inline[:8].hex(' ')}). Write the bytes of "
            "a picture, video or sound, or a path") from error


def _data_url(text: str, where: str) -> bytes:
    head, comma, body = text.partition(",")
    try:
        if not comma or not head.lower().endswith(";base64"):
            raise binascii.Error("no ';base64,' in it")
        return _decoded(unquote(body))
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
    """Decode base64; None for other text. A path without a dot may be base64 too."""
    if not _BASE64.fullmatch("".join(text[:96].split())):
        return None
    try:
        return _decoded(text)
    except (binascii.Error, ValueError):
        return None


def _decoded(text: str) -> bytes:
    """Decode base64 of either alphabet, also without padding or with white space."""
    plain = "".join(text.split()).rstrip("=").translate(str.maketrans("-_", "+/"))
    return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)


def _file(text: str, rules: MediaRules, where: str) -> Path:
    """Return the real path of a regular file below the root, after all symbolic links.

    Raises:
        MediaError: as in :func:`find_medium`.
    """
    if rules.root is None:
        raise MediaError(
            f"{where}: a relative path, but these rows come from no file. Name the folder of the media with "
            "--media_root")
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
        raise MediaError(f"{where}: not a picture: {error}. Write [H, W] or [H, W, 1 to 4] uint8, or "
                         "encoded bytes") from error


def _encoded_sound(value: Mapping[str, Any], where: str) -> bytes:
    """Encode ``{"array", "sampling_rate"}`` as a WAV file."""
    rate = value.get("sampling_rate")
    try:
        hertz = float(rate) if isinstance(rate, Real) and not isinstance(rate, bool) else 0.0
        if not (0 < hertz < 2**31 and hertz.is_integer()):
            raise ValueError(f"sampling_rate {rate!r}")
        return write_wav(as_mono(value["array"]), int(hertz))
    except (ValueError, TypeError, OverflowError) as error:
        raise MediaError(f"{where}: not a sound: {error}. Write numbers from -1 to 1 and their sampling_rate in "
                         "Hz") from error
