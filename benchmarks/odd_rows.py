"""Whole rows of another form, of another program, for another model or beyond a limit; see ``media_fuzz.py``."""
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from broken_media import a_second, Case, decoded_from, encoded, film, FORMS, kind, picture, Rng, same, wave, whole_film

FILMS = {"flv": ("flv", 25), "mpegts": ("mpeg2video", 25), "mpeg": ("mpeg2video", 25)}  # -> codec and rate
SOUNDS = ("WAV", "FLAC", "OGG", "AIFF", "AU", "CAF", "MP3")


def as_text(data: bytes, rng: Rng) -> str:
    """Write base64 in one of its forms."""
    text = base64.b64encode(data).decode()
    lines = "\n".join(text[i:i + 76] for i in range(0, len(text), 76))
    return [text, lines, text.rstrip("="), text.replace("+", "-").replace("/", "_")][rng.integers(4)]


@kind("base64, every format")
def _(rng: Rng, root: Path) -> Case:
    column = str(rng.choice(["images", "videos", "audios"]))
    if column == "images":
        data = encoded(picture(rng), str(rng.choice(FORMS)))
        return Case({column: [as_text(data, rng)]}, "used", same(decoded_from(data)))
    if column == "audios":
        return Case({column: [as_text(wave(str(rng.choice(SOUNDS))), rng)]}, "used", a_second)
    form = str(rng.choice(["mp4", "matroska", "avi", *FILMS]))
    return Case({column: [as_text(film(form, *FILMS.get(form, ())), rng)]}, "used", whole_film)


@kind("base64 of no medium")
def _(rng: Rng, root: Path) -> Case:
    start = [b"%PDF-1.7", b"PK\3\4", b"\x7fELF", b"<svg>", b"\0\0\0\0", b"{}"][rng.integers(6)]
    text = as_text(start + rng.bytes(int(rng.integers(1, 900))), rng)
    return Case({str(rng.choice(["images", "videos", "audios"])): [text]}, "refused")


@kind("size or rate of one medium")
def _(rng: Rng, root: Path) -> Case:
    name = str(rng.choice(["max_pixels", "min_pixels", "fps", "nframes", "resized_height", "video_end", "sample_fps"]))
    value: Any = [3, 0.5, "all", [1], np.zeros(2), None][rng.integers(6)]
    data = encoded(np.zeros((30, 30, 3), np.uint8), "PNG")
    part = [{"type": "image", "image": data, name: value}, {"image": {"bytes": data, name: value}},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}",
                                                name: value}}][rng.integers(3)]  # yapf: disable
    must = "used" if value is None else "refused"
    return Case({}, must, content=[part]) if rng.integers(2) else Case({"images": [part]}, must)


@kind("two columns")
def _(rng: Rng, root: Path) -> Case:
    pixels, other = picture(rng), picture(rng)
    repeated = bool(rng.integers(2))
    data = encoded(pixels, "PNG")
    second = [data if repeated else encoded(other, "PNG"), [data, data] if not repeated else [data]][rng.integers(2)]
    return Case({"images": [data], "image": second}, "used" if repeated else "refused",
                lambda media: len(media) == 1 and media[0].size == pixels.shape[1::-1])


@kind("kind that the model lacks")
def _(rng: Rng, root: Path) -> Case:
    takes = [(), ("image", ), ("audio", ), ("image", "video")][rng.integers(4)]
    data = {"image": encoded(np.zeros((30, 30, 3), np.uint8), "PNG"), "video": film("mp4"), "audio": wave("WAV")}
    its = str(rng.choice(list(data)))
    columns: dict[str, Any] = {f"{its}s": [data[its]]} if rng.integers(2) else {}
    content: Any = "What is it?" if columns else [{"type": its, its: data[its]}]
    return Case(columns, "used" if its in takes else "refused", content=content, takes=takes)


@kind("frames in a flat list")
def _(rng: Rng, root: Path) -> Case:
    frames = [encoded(picture(rng), str(rng.choice(FORMS))) for _ in range(rng.integers(1, 4))]
    return Case({str(rng.choice(["videos", "video"])): frames}, "refused")


@kind("sound bomb")
def _(rng: Rng, root: Path) -> Case:
    import soundfile
    file, long = io.BytesIO(), bool(rng.integers(2))
    shape = (int(rng.integers(3_601_000, 9_000_000)), 1) if long else (99, int(rng.integers(17, 256)))
    form = str(rng.choice(["WAV", "FLAC"] if long else ["WAV", "OGG"]))
    soundfile.write(file, np.zeros(shape, np.int16), 1000, format=form)
    return Case({"audios": [file.getvalue()]}, "refused")
