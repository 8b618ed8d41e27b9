"""Decodes a :class:`~lightrft.datasets.media.Medium` under the limits of its rules: size, pixels, time."""
import hashlib
import io
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, TypeVar

import requests
from PIL import Image

from lightrft.datasets.media import check_size, file_digest, Medium, MediaError, MediaRules
from lightrft.datasets.pictures import (ANIMATED, animation, check_pixels, Frame, open_picture, picture_size,
                                        sample_frames, STILL, to_rgb)
from lightrft.datasets.waveform import read_sound, resample, Waveform
from lightrft.utils.errors import CaptureException, first_line, install_command, UserError

T = TypeVar("T")
Tick = Callable[[], None]  # called inside loops; raises TimeoutError when time is up

VIDEO_PIXELS = 10  # times those of one picture: most of all frames of a video
_NOT_MOVING = "a still picture, not a video. The frames of a video are a list in the list of videos: [[frame, frame]]"
# containers that hold their own data; playlists (HLS, concat) name other files and URLs
_CONTAINERS = "mov,matroska,avi,mpegts,mpeg,flv,ogg,asf,gif"
_LENGTH_FROM_ZERO = ("matroska,webm", "asf")  # containers whose length is the time of the end, not from the first frame


@dataclass(frozen=True, eq=False)
class Video:
    """Frames of equal size, RGB, shown at ``times`` of a video that lasts ``seconds``."""
    frames: list[Image.Image]
    seconds: float
    times: list[float]


def decode(medium: Medium, rules: MediaRules, rate: int = 16_000) -> Image.Image | Video | Waveform:
    """Return an RGB picture, the frames of a video, or mono sound at ``rate`` Hz.

    Raises:
        MediaError: the medium is broken, too large, or takes longer than the rules allow.
        UserError: a package is missing.
    """
    readers: dict[str, Callable[[Tick], Image.Image | Video | Waveform]] = {
        "image": lambda tick: _picture(medium, rules, tick),
        "video": lambda tick: _video(medium, rules, tick),
        "audio": lambda tick: resample(_sound(medium, rules, tick), rate),
    }
    return _limited(readers[medium.kind], medium, rules)


def image_size(medium: Medium, rules: MediaRules) -> tuple[int, int]:
    """Return (height, width) of the upright picture from its header alone. Raises as :func:`decode`."""

    def read(tick: Tick) -> tuple[int, int]:
        with _opened(medium, rules, tick) as file:
            return picture_size(open_picture(file, rules.max_image_pixels))

    return _limited(read, medium, rules)


def _limited(read: Callable[[Tick], T], medium: Medium, rules: MediaRules) -> T:
    """Call ``read`` in a thread that is abandoned when time is up; every error names the medium.

    The decoders are third-party code on untrusted bytes and raise all kinds of exceptions. A late thread ends at its
    next tick, or at the end of a picture, whose size is limited.
    """
    deadline, done, caught = time.monotonic() + rules.decode_timeout_s, [], CaptureException()

    def tick() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError

    def work() -> None:
        with caught:
            done.append(read(tick))

    thread = Thread(target=work, name="decode", daemon=True)
    thread.start()
    thread.join(rules.decode_timeout_s)
    error = caught.cause
    if thread.is_alive() or type(error) is TimeoutError:
        raise MediaError(f"{medium.where}: decoding takes more than {rules.decode_timeout_s:g} s. Raise "
                         "--media_timeout_s, make it smaller, or remove the row") from error
    if isinstance(error, UserError):
        raise error
    if error is not None:
        raise MediaError(
            f"{medium.where}: cannot be read: {first_line(error)[:300]} ({type(error).__name__}). Write it "
            "again, or remove the row") from error
    return done[0]


def _opened(medium: Medium, rules: MediaRules, tick: Tick) -> BinaryIO:
    """Open the encoded bytes of a medium that is not a list of pictures; a file must have the content of its key."""
    if isinstance(medium.source, bytes):
        return io.BytesIO(medium.source)
    if isinstance(medium.source, Path):
        check_size(medium.source.stat().st_size, rules, medium.where)
        if file_digest(medium.source) != medium.key.rpartition(":")[2]:
            raise MediaError(f"{medium.where}: the file has changed since the run read its rows. Start the run again, "
                             "and leave the files alone while it lasts")
        return medium.source.open("rb")
    return io.BytesIO(_download(str(medium.source), medium, rules, tick))


def _download(url: str, medium: Medium, rules: MediaRules, tick: Tick) -> bytes:
    """Download a medium; an error that may pass is tried once more. Each download must have the content of the first,
    because the key of a URL says nothing about its content."""
    try:
        data = _fetch(url, medium, rules, tick)
    except requests.RequestException as first:
        try:
            if not _may_pass(first):
                raise
            data = _fetch(url, medium, rules, tick)
        except requests.RequestException as error:
            raise MediaError(f"{medium.where}: cannot be downloaded ({error}). Correct the address, or download it "
                             "first and write its path") from error
    check_size(len(data), rules, medium.where)
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    if rules.downloads.setdefault(medium.key, digest) != digest:
        raise MediaError(f"{medium.where}: what the server sends has changed since the run read its rows. Download it "
                         "first and write its path")
    return data


def _fetch(url: str, medium: Medium, rules: MediaRules, tick: Tick) -> bytes:
    data = bytearray()
    with requests.get(url, stream=True, timeout=rules.decode_timeout_s) as answer:
        answer.raise_for_status()
        for chunk in answer.iter_content(1 << 16):
            tick()
            data += chunk
            check_size(len(data), rules, medium.where)
    return bytes(data)


def _may_pass(error: requests.RequestException) -> bool:
    """Return True for errors of the connection and of a busy server."""
    if error.response is not None:
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError))


def _picture(medium: Medium, rules: MediaRules, tick: Tick) -> Image.Image:
    with _opened(medium, rules, tick) as file:
        return to_rgb(open_picture(file, rules.max_image_pixels))


def _sound(medium: Medium, rules: MediaRules, tick: Tick) -> Waveform:
    with _opened(medium, rules, tick) as file:
        return read_sound(file.read(), rules.max_seconds, tick)


# -- video ------------------------------------------------------------------------------------------------------------
def _video(medium: Medium, rules: MediaRules, tick: Tick) -> Video:
    pixels = VIDEO_PIXELS * rules.max_image_pixels
    if isinstance(medium.source, tuple):  # pictures, already at the wanted rate
        listed = _listed(medium.source, rules, tick)
        return Video(*sample_frames(listed, rules.fps, rules.max_frames, pixels, tick))
    with _opened(medium, rules, tick) as file:
        start = file.read(12)
        if start[:4] == b"RIFF" and int.from_bytes(start[4:8], "little") + 8 > file.seek(0, io.SEEK_END):
            raise ValueError("cut off: the file is shorter than it states")  # AVI, whose index is at its end
        file.seek(0)
        if STILL.match(start):
            raise ValueError(_NOT_MOVING)
        moving = start.startswith(ANIMATED) and (start[:4] != b"RIFF" or start[8:] == b"WEBP")
        frames = _animation(file, rules) if moving else _streamed(file, rules)
        return Video(*sample_frames(frames, rules.fps, rules.max_frames, pixels, tick))


def _listed(media: tuple[Medium, ...], rules: MediaRules, tick: Tick) -> Iterator[Frame]:
    for i, medium in enumerate(media):
        yield i / rules.fps, 1 / rules.fps, lambda: _picture(medium, rules, tick)


def _animation(file: BinaryIO, rules: MediaRules) -> Iterator[Frame]:
    """Yield the frames of a GIF, WebP or APNG."""
    image = open_picture(file, rules.max_image_pixels)
    if not getattr(image, "is_animated", False):
        raise ValueError(_NOT_MOVING)
    yield from animation(image)
    if image.format == "GIF":
        file.seek(-16, io.SEEK_END)
        if not file.read().rstrip(b"\0").endswith(b";"):
            raise ValueError("cut off: the GIF has no end")


def _streamed(file: BinaryIO, rules: MediaRules) -> Iterator[Frame]:
    """Yield the frames of a video file with PyAV, their times counted from the first: a file that was cut out of a
    longer one, or sent, need not begin at 0.

    Raises:
        ValueError: no video in it, frames too large, or cut off.
        UserError: PyAV is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise UserError(f"video files need the package av: {install_command('video')}, or write a video as a list of "
                        "pictures or an animated GIF") from error
    with av.open(file, container_options={"format_whitelist": _CONTAINERS}) as container:
        if not container.streams.video:
            raise ValueError("it has no video")
        stream = container.streams.video[0]
        check_pixels((stream.width, stream.height), rules.max_image_pixels)
        length, end, first = 1 / float(stream.average_rate or 25), 0.0, None
        for i, frame in enumerate(container.decode(stream)):
            check_pixels((frame.width, frame.height), rules.max_image_pixels)
            start = i * length
            if frame.time is not None:  # in ticks, so that no rounding depends on where the file begins
                first = frame.pts - round(start / frame.time_base) if first is None else first
                start = float((frame.pts - first) * frame.time_base)
            end = max(end, start + length)
            yield start, length, lambda: _upright(frame)
        _check_whole(end, _stated_seconds(stream, container, first or 0))


def _stated_seconds(stream: Any, container: Any, first: int) -> float:
    """Return the length that the file states, from its frame at tick ``first`` on; 0 for none."""
    stated = float(stream.duration * stream.time_base) if stream.duration else (container.duration or 0) / 1e6
    return stated - float(first * stream.time_base) if container.format.name in _LENGTH_FROM_ZERO else stated


def _check_whole(end: float, stated: float) -> None:
    """Raise ``ValueError`` if the last frame ends far before ``stated``, the length that the file states."""
    if math.isfinite(stated) and end < 0.9 * stated - 0.3:
        raise ValueError(f"cut off: its frames end after {end:.1f} of {stated:.1f} s")


def _upright(frame: Any) -> Image.Image:
    """Convert a frame of PyAV; phones write upright videos as turned frames."""
    image = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image
