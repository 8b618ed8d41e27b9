"""Pictures as a model sees them: upright, RGB, 8 bits. Functions raise ``ValueError`` for pictures that are broken."""
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

# none of them runs another program (EPS does), and each is known by its first bytes
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "JPEG2000")
ANIMATED = (b"GIF8", b"\x89PNG", b"RIFF")  # first bytes of GIF, APNG and WebP
STILL = re.compile(  # and of JPEG, BMP, TIFF, JPEG 2000, AVIF and HEIF
    rb"\xff\xd8\xff|BM|II\*\0|MM\0\*|\0\0\0\x0cjP  |\xff\x4f\xff\x51|....ftyp(?:avif|mif1|hei[cx])", re.DOTALL)
_ORIENTATION = 0x0112  # tag of EXIF
_PHOTOMETRIC = 262  # tag of TIFF: 0, white is zero; 1, black is zero
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
Frame = tuple[float, float, Callable[[], Image.Image]]  # start and length in seconds, and the picture


def open_picture(file: BinaryIO, most: int) -> Image.Image:
    """Read the header of a picture.

    Raises:
        ValueError: of another format than ``FORMATS``, or more than ``most`` pixels.
    """
    Image.init()
    try:
        image = Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])  # older ones lack AVIF
    except UnidentifiedImageError:
        raise ValueError(f"none of the known formats ({', '.join(FORMATS)}), or its header is broken") from None
    check_pixels(image.size, most)
    return image


def check_pixels(size: tuple[int, ...], most: int) -> None:
    """Raise ``ValueError`` if a picture of ``size`` (width, height) has no pixel, or more than ``most``."""
    if len(size) != 2 or not 0 < size[0] * size[1] <= most:
        raise ValueError(f"{' x '.join(map(str, size))} pixels; it must have 1 to {most}")


def orientation(image: Image.Image) -> int:
    """Return EXIF's orientation, 1 to 8, from the header alone (Pillow's own ``getexif`` decodes a PNG).

    Pillow turns a TIFF by itself.
    """
    value = 1 if image.format == "TIFF" else Image.Image.getexif(image).get(_ORIENTATION)
    return value if value in _TURNS else 1


def picture_size(image: Image.Image) -> tuple[int, int]:
    """Return (height, width) of the upright picture."""
    width, height = image.size
    return (width, height) if orientation(image) >= 5 else (height, width)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert the first frame: upright by EXIF, on white where it is transparent, 16 bits scaled to 8.

    Raises:
        ValueError: a picture of floating-point numbers, or of integers of more than 16 bits.
        OSError: it is cut off.
    """
    turn = _TURNS.get(orientation(image))
    image.load()
    if image.mode.startswith("I"):
        image = _eight_bits(image)
    elif image.mode == "F":
        raise ValueError("floating-point pixels, whose range is not known. Save it with 8 or 16 bits")
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    rgb = image.convert("RGB")
    return rgb if turn is None else rgb.transpose(turn)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scale grey values of 16 bits; Pillow leaves the negative of a TIFF, and the transparent value of a PNG, to us."""
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(f"pixels from {values.min()} to {values.max()}, more than 16 bits. Save it with 8 or 16 bits")
    clear = values == image.info.get("transparency", -1)
    if getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0:
        values = 65535 - values  # white is zero
    grey = Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
    if clear.any():
        grey.putalpha(Image.fromarray((~clear * 255).astype(np.uint8)))
    return grey


def encode_png(picture: Any, most: int) -> bytes:
    """Encode a picture of Pillow, or an array [H, W] or [H, W, C] uint8, C up to 4, as PNG, as a model sees it.

    Raises:
        ValueError, OSError, TypeError: it cannot be converted.
    """
    size = picture.size if isinstance(picture, Image.Image) else picture.shape[1::-1]
    check_pixels(size, most)
    grey = not isinstance(picture, Image.Image) and picture.shape[2:] == (1, )  # which Pillow wants as [H, W]
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture[..., 0] if grey else picture)
    file = io.BytesIO()
    to_rgb(image).save(file, "PNG", compress_level=1)
    return file.getvalue()


# -- moving pictures --------------------------------------------------------------------------------------------------
def animation(image: Image.Image) -> Iterator[Frame]:
    """Yield the frames of a GIF, WebP or APNG; one without a duration takes 0.1 s, as browsers show it."""
    start = 0.0
    for index in count():
        try:
            image.seek(index)
        except EOFError:
            return
        image.load()
        length = float(image.info.get("duration") or 100) / 1000
        yield start, length, lambda: to_rgb(image)
        start += length


def fitted(size: tuple[int, int], least: int, most: int) -> tuple[int, int]:
    """Return ``size`` scaled to at least ``least`` and at most ``most`` pixels (0: no limit); its shape stays."""
    pixels = size[0] * size[1]
    wanted = most if 0 < most < pixels else least if pixels < least else pixels
    if wanted == pixels:
        return size
    scale, rounded = math.sqrt(wanted / pixels), math.ceil if wanted > pixels else int
    return max(1, rounded(size[0] * scale)), max(1, rounded(size[1] * scale))


def resized(picture: Image.Image, least: int, most: int) -> Image.Image:
    """Resize a picture to at least ``least`` and at most ``most`` pixels (:func:`fitted`)."""
    size = fitted(picture.size, least, most)
    return picture if size == picture.size else picture.resize(size, Image.Resampling.BICUBIC)


def sample_frames(frames: Iterable[Frame], fps: float, most: int, pixels: int,
                  tick: Callable[[], None]) -> tuple[list[Image.Image], float, list[float]]:
    """Keep about ``fps`` frames per second, evenly spaced; also return the length and their times, in seconds.

    Every frame is read once, so nothing depends on what the file states about itself. More than ``most`` frames halve
    the rate, as often as needed.

    Args:
        frames: in the order of time.
        pixels: most pixels of all frames together.
        tick: called for every frame; it raises when time is up.

    Raises:
        ValueError: there is no frame, sizes differ, or ``pixels`` are not enough.
    """
    kept: list[tuple[float, Image.Image]] = []
    every, end = 1 / fps, 0.0
    for start, length, picture in frames:
        tick()
        end = max(end, start + length)
        if kept and _slot(start, every) <= _slot(kept[-1][0], every):
            continue
        kept.append((start, picture()))
        while len(kept) > most:
            every *= 2
            kept = [one for i, one in enumerate(kept) if not i or _slot(one[0], every) > _slot(kept[i - 1][0], every)]
        _check_frames(kept[0][1].size, kept[-1][1].size, len(kept), pixels)
    if not kept:
        raise ValueError("no frame that can be read")
    return [picture for _, picture in kept], end, [start for start, _ in kept]


def _slot(start: float, every: float) -> int:
    return int((start + 1e-6) // every)


def _check_frames(first: tuple[int, int], size: tuple[int, int], frames: int, pixels: int) -> None:
    if size != first:
        raise ValueError(f"frames of {first[0]} x {first[1]} and of {size[0]} x {size[1]} pixels")
    if frames * size[0] * size[1] > pixels:
        raise ValueError(f"{frames} frames of {size[0]} x {size[1]} pixels are more than {pixels} pixels. Lower --fps, "
                         "or make the frames smaller")
