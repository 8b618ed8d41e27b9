"""Rows of pictures, videos and sounds that are broken or odd, drawn from a seed; see ``media_fuzz.py``."""
import base64
import io
import os
import pickle
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lightrft.datasets.waveform import write_wav

Rng = np.random.Generator
Check = Callable[[list[Any]], bool]  # of the decoded media of a row


def anything(media: list[Any]) -> bool:
    """Require nothing."""
    return True


@dataclass
class Case:
    """A row, and what must become of it: "used", "refused" or "either"; used media must pass ``check``. The model
    ``takes`` these kinds of media."""
    columns: dict[str, Any]
    must: str
    check: Check = anything
    content: Any = "What is it?"
    takes: tuple[str, ...] = ("image", "video", "audio")


KINDS: dict[str, Callable[[Rng, Path], Case]] = {}


def kind(name: str) -> Callable[[Any], Any]:
    """Register a function that draws a row."""

    def register(draw: Callable[[Rng, Path], Case]) -> Callable[[Rng, Path], Case]:
        KINDS[name] = draw
        return draw

    return register


# -- media that are whole ---------------------------------------------------------------------------------------------
def picture(rng: Rng) -> np.ndarray:
    """Draw pixels [H, W, 3]."""
    height, width = rng.integers(1, 60, 2)
    return rng.integers(0, 256, (height, width, 3), np.uint8)


def encoded(pixels: np.ndarray, form: str) -> bytes:
    """Encode pixels; GIF, JPEG and WEBP change them."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


@cache
def wave(form: str, rate: int = 16_000) -> bytes:
    """Return a second of a tone as a sound file."""
    import soundfile
    file = io.BytesIO()
    soundfile.write(file, 0.5 * np.sin(np.arange(rate) / 9), rate, format=form)
    return file.getvalue()


@cache
def film(form: str, codec: str = "mpeg4", rate: int = 10) -> bytes:
    """Return 3 seconds of video, ``rate`` frames per second."""
    import av
    file = io.BytesIO()
    with av.open(file, "w", format=form) as out:
        stream = out.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for i in range(3 * rate):
            frame = av.VideoFrame.from_ndarray(np.full((32, 48, 3), 80 // rate * i, np.uint8), format="rgb24")
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return file.getvalue()


def gif(frames: int, size: int) -> bytes:
    """Return an animated GIF whose frames all differ."""
    file, images = io.BytesIO(), [Image.new("L", (size, size), i % 256) for i in range(frames)]
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=100)
    return file.getvalue()


def cut(data: bytes, rng: Rng) -> bytes:
    """Keep the start of ``data``: up to all but one byte."""
    return data[:rng.integers(0, len(data))]


def flip(data: bytes, rng: Rng) -> bytes:
    """Change 1 to 8 bytes."""
    changed = bytearray(data)
    for at in rng.integers(0, len(data), rng.integers(1, 9)):
        changed[at] ^= int(rng.integers(1, 256))
    return bytes(changed)


def same(pixels: np.ndarray) -> Check:
    """Require one picture with exactly these pixels."""
    return lambda media: len(media) == 1 and np.array_equal(np.asarray(media[0]), pixels)


def decoded_from(data: bytes) -> np.ndarray:
    """Decode a whole picture with Pillow alone."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


# -- pictures ---------------------------------------------------------------------------------------------------------
FORMS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "JPEG2000")


@kind("picture cut off")
def _(rng: Rng, root: Path) -> Case:
    data = encoded(picture(rng), str(rng.choice(FORMS)))
    return Case({"images": [cut(data, rng)]}, "either", same(decoded_from(data)))


@kind("picture, bytes changed")
def _(rng: Rng, root: Path) -> Case:
    pixels, form = picture(rng), str(rng.choice(FORMS))
    return Case({"images": [flip(encoded(pixels, form), rng)]}, "either", same(pixels) if form == "PNG" else anything)


@kind("picture under another suffix")
def _(rng: Rng, root: Path) -> Case:
    data = encoded(picture(rng), str(rng.choice(FORMS)))
    name = f"picture{rng.integers(1000)}{rng.choice(['.jpg', '.mp4', '.txt', '.pkl', ''])}"
    (root / name).write_bytes(data)
    return Case({"images": [name]}, "used", same(decoded_from(data)))


@kind("picture, odd mode")
def _(rng: Rng, root: Path) -> Case:
    mode, turn = str(rng.choice(["1", "L", "LA", "P", "RGBA", "I;16"])), int(rng.integers(1, 9))
    shape = tuple(int(side) for side in rng.integers(1, 9, 2))
    exif = Image.Exif()
    exif[0x0112] = turn
    file = io.BytesIO()
    Image.new(mode, shape).save(file, "PNG", exif=exif)
    wanted = shape if turn < 5 else shape[::-1]
    return Case({"image": file.getvalue()}, "used", lambda media: media[0].size == wanted and media[0].mode == "RGB")


@kind("picture, odd shape")
def _(rng: Rng, root: Path) -> Case:
    height, width = [(1, 1), (1, 2), (3, 3), (1, int(rng.integers(2, 4000))),
                     (int(rng.integers(2, 4000)), 3)][rng.integers(5)]
    pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
    return Case({"images": [pixels if rng.integers(2) else encoded(pixels, "PNG")]}, "either", same(pixels))


@kind("huge stated size")
def _(rng: Rng, root: Path) -> Case:
    side = int(rng.integers(1500, 2**31 - 1))

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(999))) + chunk(b"IEND", b"")
    bmp = bytearray(encoded(np.zeros((4, 4, 3), np.uint8), "BMP"))
    bmp[18:26] = struct.pack("<ii", min(side, 2**31 - 1), side)
    animated = bytearray(gif(2, 8))
    animated[6:10] = b"\xff\xff\xff\xff"
    return Case({"images": [[png, bytes(bmp), bytes(animated)][rng.integers(3)]]}, "refused")


@kind("bomb")
def _(rng: Rng, root: Path) -> Case:
    file, side = io.BytesIO(), int(rng.integers(1500, 4000))
    if rng.integers(2):
        Image.new("1", (side, side)).save(file, "PNG")
        return Case({"images": [file.getvalue()]}, "refused")
    info = PngInfo()
    info.add_text("comment", "x" * (66 << 20), zip=True)
    Image.new("L", (2, 2)).save(file, "PNG", pnginfo=info)
    return Case({"images": [file.getvalue()]}, "refused")


# -- what is no picture -----------------------------------------------------------------------------------------------
@kind("wrong type")
def _(rng: Rng, root: Path) -> Case:
    values = [7, 3.5, True, object(), {1, 2}, {"a": 1}, {"bytes": None, "path": None}, [[]], np.zeros((2, 2)),
              np.zeros(3, object), {"bytes": 5}, {"url": ["x"]}, range(3), b"", "", None]  # yapf: disable
    value = values[rng.integers(len(values))]
    column = str(rng.choice(["images", "videos", "audios"]))
    must = "either" if column == "videos" and isinstance(value, list) else "refused"
    return Case({column: [value]}, must)


@kind("nested")
def _(rng: Rng, root: Path) -> Case:
    value: Any = encoded(picture(rng), "PNG")
    depth = int(rng.integers(6, 3000))
    for _ in range(depth):
        value = [value] if depth % 2 else {"image": value}
    return Case({"images": [value]}, "refused")


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


@kind("pickle")
def _(rng: Rng, root: Path) -> Case:
    data = pickle.dumps(Trap(root.parent / "unpickled"), protocol=int(rng.integers(0, 6)))
    text = base64.b64encode(data).decode()
    form = [data, {"bytes": data}, text, f"data:image/png;base64,{text}"][rng.integers(4)]
    return Case({str(rng.choice(["images", "videos", "audios"])): [form]}, "refused")


@kind("random bytes")
def _(rng: Rng, root: Path) -> Case:
    start = [b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF\0\0\0\0WAVE", b"fLaC", b"OggS",
             b"\x1aE\xdf\xa3",
             b"\0\0\0\x18ftypmp42", b"II*\0", b"BM", b"#EXTM3U\n", b"ffconcat version 1.0\n"]  # yapf: disable
    data = start[rng.integers(len(start))] + rng.bytes(int(rng.integers(1, 3000)))
    return Case({str(rng.choice(["images", "videos", "audios"])): [data]}, "refused")


@kind("base64, broken")
def _(rng: Rng, root: Path) -> Case:
    pixels = picture(rng)
    text = base64.b64encode(encoded(pixels, "PNG")).decode()
    at = int(rng.integers(0, len(text)))
    broken = [text[:at], text[:at] + "!" + text[at:], text[:at] + "\0" + text[at + 1:]][rng.integers(3)]
    return Case({"images": [str(rng.choice(["", "data:image/png;base64,", "data:image/png,"])) + broken]}, "either",
                same(pixels))  # the end of a PNG holds no pixels


# -- files and addresses ----------------------------------------------------------------------------------------------
@kind("path out of the root")
def _(rng: Rng, root: Path) -> Case:
    secret = root.parent / "secret.png"
    climb = "../" * int(rng.integers(1, 30))
    link = root / f"link{rng.integers(1000)}.png"
    link.unlink(missing_ok=True)
    link.symlink_to(secret)
    folder = root / f"folder{rng.integers(1000)}"
    folder.unlink(missing_ok=True)
    folder.symlink_to(root.parent)
    forms = ["../secret.png", f"{climb}{secret}", f"{climb}etc/passwd", str(secret), link.name,
             f"{folder.name}/secret.png",
             f"file://{secret}", "file:///etc/passwd", "a/../../secret.png", f"{root}/../secret.png",
             "file://localhost/%2e%2e/etc/passwd", "~/secret.png", "/proc/self/environ", "/dev/zero"]  # yapf: disable
    value = forms[rng.integers(len(forms))]
    return Case({"images": [[value, Path(value), {"path": value}, {"bytes": None, "path": value}][rng.integers(4)]]},
                "refused")


@kind("path of no file")
def _(rng: Rng, root: Path) -> Case:
    forms = [".", "", "..", "pipe", "none.png", "x" * 300, "x" * 70_000, "a\0b.png", "\ud800.png", "loop", "dir/", "\n",
             "C:\\a.png", "%2e%2e/secret.png", "ü.png", "secret.png/", "|ls", "$(touch x)", "-"]  # yapf: disable
    return Case({str(rng.choice(["images", "videos", "audios"])): [forms[rng.integers(len(forms))]]}, "refused")


@kind("address")
def _(rng: Rng, root: Path) -> Case:
    forms = ["http://127.0.0.1:9/a.png", "https://[::1/a.png", "HTTP://localhost/a.png", "ftp://host/a.png",
             "s3://b/a.png",
             "gopher://x", "file://host/a.png", "data:image/png;base64,", "data:,x", "data:", "javascript:alert(1)",
             "concat:/etc/passwd|/etc/hosts", "http://", "subfile,,start,0,end,0,,:/etc/passwd"]  # yapf: disable
    value = forms[rng.integers(len(forms))]
    form = [value, {"url": value}, {"type": "image_url", "image_url": {"url": value}}][rng.integers(3)]
    return Case({str(rng.choice(["images", "videos", "audios"])): [form]}, "refused")


# -- sound ------------------------------------------------------------------------------------------------------------
def a_second(media: list[Any]) -> bool:
    """Require one sound of about a second."""
    return abs(media[0].seconds - 1) < 0.06


@kind("sound cut off")
def _(rng: Rng, root: Path) -> Case:
    return Case({"audios": [cut(wave(str(rng.choice(["WAV", "FLAC", "OGG", "MP3", "AIFF"]))), rng)]}, "either",
                a_second)


@kind("sound, bytes changed")
def _(rng: Rng, root: Path) -> Case:
    return Case({"audios": [flip(wave(str(rng.choice(["WAV", "FLAC", "OGG", "MP3"]))), rng)]}, "either")


@kind("NaN, infinite, empty or loud sound")
def _(rng: Rng, root: Path) -> Case:
    samples = rng.uniform(-1, 1, 500).astype(np.float32)
    samples[rng.integers(500)] = rng.choice([np.nan, np.inf, -np.inf, 3e4])
    samples = samples if rng.integers(4) else samples[:0]
    form = [write_wav(samples, 16_000), {"array": samples.tolist(), "sampling_rate": 8000}]
    return Case({"audios": [form[rng.integers(2)]]}, "refused")


@kind("stereo, any rate")
def _(rng: Rng, root: Path) -> Case:
    rate = int(rng.choice([8000, 11_025, 22_050, 44_100, 48_000]))
    left = 0.5 * np.sin(np.arange(rate) * 2 * np.pi * 440 / rate)
    form = np.stack([left, left], int(rng.integers(2)))

    def pitch(media: list[Any]) -> bool:
        return a_second(media) and abs(int(np.abs(np.fft.rfft(media[0].samples)).argmax()) - 440) <= 2

    return Case({"audio": {"array": form, "sampling_rate": rate}}, "used", pitch)


# -- video ------------------------------------------------------------------------------------------------------------
def whole_film(media: list[Any]) -> bool:
    """Require nearly all of the 3 seconds."""
    return media[0].seconds > 2.3


@kind("video cut off")
def _(rng: Rng, root: Path) -> Case:
    return Case({"videos": [cut(film(str(rng.choice(["mp4", "matroska", "avi"]))), rng)]}, "either", whole_film)


@kind("video, bytes changed")
def _(rng: Rng, root: Path) -> Case:
    return Case({"videos": [flip(film(str(rng.choice(["mp4", "matroska", "avi"]))), rng)]}, "either")


@kind("GIF of many frames")
def _(rng: Rng, root: Path) -> Case:
    frames = int(rng.integers(2, 400))
    data = gif(frames, int(rng.integers(1, 40)))
    if rng.integers(2):
        return Case({"images": [data]}, "used", lambda media: np.asarray(media[0]).max() == 0)
    seconds = frames / 10
    return Case({"videos": [data]}, "used", lambda media: abs(media[0].seconds - seconds) < 0.01 + 0.2 * (frames > 255))


@kind("playlist")
def _(rng: Rng, root: Path) -> Case:
    target = str(rng.choice([str(root.parent / "secret.mp4"), "http://127.0.0.1:9/a.ts", "/etc/passwd"]))
    forms = [f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{target}\n#EXT-X-ENDLIST\n",
             f"ffconcat version 1.0\nfile {target}\n",
             f"<?xml version='1.0'?><MPD><BaseURL>{target}</BaseURL></MPD>"]  # yapf: disable
    name = f"list{rng.integers(1000)}{rng.choice(['.m3u8', '.mp4', '.ffconcat', '.mpd'])}"
    (root / name).write_text(forms[rng.integers(3)], encoding="utf-8")
    return Case({"videos": [name]}, "refused")


# -- positions --------------------------------------------------------------------------------------------------------
@kind("placeholders")
def _(rng: Rng, root: Path) -> Case:
    marks, given = (int(n) for n in rng.integers(0, 4, 2))
    data = encoded(np.zeros((2, 2, 3), np.uint8), "PNG")
    in_parts = rng.integers(2)
    content: Any = [{"type": "image"}] * marks + [{"type": "text", "text": "?"}
                                                  ] if in_parts else "<image>" * marks + "?"
    must = "used" if marks in (given, 0) else "refused"
    return Case({"images": [data] * given}, must, lambda media: len(media) == given, content)


@kind("content list, broken")
def _(rng: Rng, root: Path) -> Case:
    forms: list[Any] = [[{"type": "image", "image": {}}], [{"type": "img"}], [None], [[]], [{}], [{"type": "text"}], 5,
                        [{"type": "text", "text": b"x"}], {"type": "image"}, [{"type": ["image"]}],
                        [{"type": "video", "image": "a"}],
                        [{"type": "image", "image": {"type": "image"}}], ["<video>"], "<audio><image>"]  # yapf: disable
    columns = {"images": None, "videos": [], "audios": None}  # without them, <video> is a word
    return Case(columns, "refused", content=forms[rng.integers(len(forms))])


# -- the folder of the files -------------------------------------------------------------------------------------------
def prepare(folder: Path) -> Path:
    """Make the folder that rows may read, and things next to it that they may not."""
    root = folder / "data"
    (root / "dir").mkdir(parents=True)
    (folder / "secret.png").write_bytes(encoded(np.zeros((2, 2, 3), np.uint8), "PNG"))
    (folder / "secret.mp4").write_bytes(film("mp4"))
    (root / "loop").symlink_to("loop")
    os.mkfifo(root / "pipe")
    return root
