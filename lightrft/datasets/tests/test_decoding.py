"""Odd, broken and huge pictures and videos."""
import io
import struct
import sys
import time
import zlib
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from lightrft.datasets.decoding import decode, image_size
from lightrft.datasets.media import find_medium, MediaError, MediaRules
from lightrft.datasets.waveform import write_wav
from lightrft.utils.errors import UserError

RULES = MediaRules()
TONE = np.sin(np.arange(1600) / 8).astype(np.float32)
NOISE = np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8)


def decoded(data, kind="image", rules=RULES, **options):
    return decode(find_medium(data, kind, rules, "row 1"), rules, **options)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def size_of(data):
    return image_size(find_medium(data, "image", RULES, "row 1"), RULES)


# -- pictures ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "JPEG2000"])
def test_formats(kind):
    image = decoded(encoded(Image.fromarray(NOISE), kind))
    assert image.mode == "RGB" and image.size == (40, 24)
    assert kind in ("JPEG", "GIF", "WEBP") or (np.asarray(image) == NOISE).all()


def pixel(image, kind="PNG", **options):
    return decoded(encoded(image, kind, **options)).getpixel((0, 0))


def test_odd_modes():
    assert pixel(Image.new("RGBA", (2, 2), (255, 0, 0, 0))) == (255, 255, 255), "transparent on white"
    assert pixel(Image.new("RGBA", (2, 2), (255, 0, 0, 51))) == (255, 204, 204)
    assert pixel(Image.new("LA", (2, 2), (0, 51))) == (204, 204, 204)
    assert pixel(Image.new("1", (1, 1), 1)) == (255, 255, 255) and pixel(Image.new("L", (1, 1), 7)) == (7, 7, 7)
    palette = Image.new("RGB", (2, 2), (9, 8, 7)).quantize(2)
    assert pixel(palette) == (9, 8, 7) and pixel(palette, transparency=palette.getpixel((0, 0))) == (255, 255, 255)
    assert pixel(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100)[0] > 200
    assert pixel(Image.new("L", (1, 1), 7), transparency=7) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled(kind):
    ramp = np.array([[0, 257 * 100, 65535]], np.uint16)
    assert np.asarray(decoded(encoded(Image.fromarray(ramp), kind)))[0, :, 0].tolist() == [0, 100, 255]
    assert np.asarray(decoded(ramp))[0, :, 0].tolist() == [0, 100, 255]
    with pytest.raises(MediaError, match="more than 16 bits"):
        decoded(encoded(Image.fromarray(ramp.astype(np.int32) * 2), "TIFF"))
    with pytest.raises(MediaError, match="floating-point"):
        decoded(encoded(Image.fromarray(ramp.astype(np.float32)), "TIFF"))


def test_sixteen_bits_with_a_transparent_value_or_as_a_negative():
    ramp = np.array([[0, 257 * 100, 65535]], np.uint16)
    assert np.asarray(decoded(encoded(Image.fromarray(ramp), transparency=0)))[0, :, 0].tolist() == [255, 100, 255]
    black_is_zero, tag = encoded(Image.fromarray(ramp), "TIFF"), struct.pack("<HHI", 262, 3, 1)  # photometric
    data = black_is_zero.replace(tag + b"\1", tag + b"\0")
    assert data != black_is_zero and np.asarray(decoded(data))[0, :, 0].tolist() == [255, 155, 0]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_turns(kind, turn):
    from PIL import ImageOps
    exif = Image.Exif()
    exif[0x0112] = turn
    data = encoded(Image.fromarray(NOISE), kind, exif=exif)
    wanted = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert decoded(data).tobytes() == wanted.tobytes() and size_of(data) == wanted.size[::-1]
    assert decoded(Image.open(io.BytesIO(data))).tobytes() == wanted.tobytes(), "an object of Pillow is turned too"


def test_first_frame_of_an_animation_is_the_picture():
    frames = [Image.new("RGB", (3, 3), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "PNG", "TIFF"):
        assert decoded(encoded(frames[0], kind, save_all=True, append_images=frames[1:])).getpixel(
            (0, 0)) == (255, 0, 0)


def png_of_size(width, height):
    """A PNG that states a size, with little in it."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(
        b"IEND", b"")


@pytest.mark.parametrize("width, height", [(9000, 9000), (20_000, 20_000), (2**31 - 1, 2**31 - 1), (0, 5)])
def test_bombs_are_refused_from_the_header(width, height):
    data = png_of_size(width, height)
    for read in (decoded, size_of):
        with pytest.raises(MediaError, match="row 1: image of .*(pixels|header is broken|bomb)"):
            read(data)


def test_text_bombs_are_refused():
    info = PngImagePlugin.PngInfo()
    info.add_text("a", "x" * (80 << 20), zip=True)
    with pytest.raises(MediaError, match="too large"):
        decoded(encoded(Image.fromarray(NOISE), pnginfo=info))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "JPEG2000"])
def test_pictures_cut_off(kind):
    data = encoded(Image.fromarray(NOISE), kind)
    for length in range(1, len(data) - 20, max(1, len(data) // 12)):
        with pytest.raises(MediaError, match="row 1"):
            decoded(data[:length])


def test_other_files_are_no_pictures():
    import pickle
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    for data in (b"hello", pickle.dumps([1]), eps, b"<svg xmlns='http://www.w3.org/2000/svg'/>",
                 write_wav(np.ones(9), 8000)):
        with pytest.raises(MediaError, match="none of the known formats"):
            decoded(data)


def test_time_is_limited():
    data, took = encoded(Image.new("L", (7000, 7000))), []
    for _ in range(2):  # the first one also imports
        took.append(-time.monotonic())
        decoded(data)
        took[-1] += time.monotonic()
    with pytest.raises(MediaError, match="decoding takes more than .* s.*--media_timeout_s"):
        decoded(data, rules=replace(RULES, decode_timeout_s=min(took) / 10))


def test_a_file_that_vanishes_or_grows(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(encoded(Image.fromarray(NOISE)))
    rules = MediaRules(root=tmp_path, max_bytes=10_000)
    medium = find_medium("a.png", "image", rules, "row 1")
    path.write_bytes(bytes(20_000))
    with pytest.raises(MediaError, match="row 1: image 'a.png': 20000 bytes are more than"):
        decode(medium, rules)
    path.unlink()
    with pytest.raises(MediaError, match="row 1: image 'a.png': cannot be read"):
        decode(medium, rules)


# -- packages ---------------------------------------------------------------------------------------------------------
def test_missing_packages_name_their_extra(monkeypatch):
    for name in ("soundfile", "soxr", "av"):
        monkeypatch.setitem(sys.modules, name, None)
    for data, kind, message in ((b"fLaC" + bytes(50), "audio", r"soundfile.*\[audio\]"),
                                (write_wav(TONE,
                                           8000), "audio", r"8000 Hz for a model of 16000 Hz needs.*soxr.*\[audio\]"),
                                (b"\0\0\0\x18ftypmp42" + bytes(9), "video", r"av: .*\[video\].*GIF")):
        with pytest.raises(UserError, match=message) as caught:
            decoded(data, kind)
        assert not isinstance(caught.value, MediaError), "no policy may skip all rows for that"
    assert len(decoded(write_wav(TONE, 16_000), "audio").samples) == 1600


# -- video ------------------------------------------------------------------------------------------------------------
def video(frames, rate=10, kind="mp4", codec="mpeg4", rotate=0, first=0):
    """Encode frames, of which the first is shown at the second ``first``."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as out:
        stream = out.add_stream(codec, rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt, stream.bit_rate = "yuv420p", 4_000_000
        if rotate and not hasattr(stream, "set_display_rotation"):
            pytest.skip("PyAV before 17 cannot write it")
        if rotate:
            stream.set_display_rotation(rotate)
        for i, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = first * rate + i, Fraction(1, rate)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return file.getvalue()


def greys(count):
    """Frames, each a little lighter."""
    return [np.full((32, 48, 3), 6 * i, np.uint8) for i in range(count)]


def levels(found):
    return [round(np.asarray(frame).mean() / 6) for frame in found.frames]


@pytest.mark.parametrize("kind", ["mp4", "matroska", "avi"])
def test_video_files_at_the_wanted_rate(kind):
    data = video(greys(40), kind=kind)
    found = decoded(data, "video")
    assert levels(found) == [0, 5, 10, 15, 20, 25, 30, 35] and abs(found.seconds - 4) < 0.11
    assert levels(decoded(data, "video", replace(RULES, fps=1.0))) == [0, 10, 20, 30]
    assert levels(decoded(data, "video", replace(RULES, fps=60.0, max_frames=40))) == list(range(40))


def test_long_videos_have_fewer_frames_evenly_spaced():
    data = video(greys(40))
    assert levels(decoded(data, "video", replace(RULES, fps=10.0,
                                                 max_frames=10))) == [0, 4, 8, 12, 16, 20, 24, 28, 32, 36]
    assert levels(decoded(data, "video", replace(RULES, max_frames=1))) == [0]


def test_animations_without_a_video_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    frames = [Image.fromarray(frame) for frame in greys(40)]
    for kind in ("GIF", "PNG", "WEBP"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)
        found = decoded(data, "video")
        assert levels(found) == [0, 5, 10, 15, 20, 25, 30, 35] and abs(found.seconds - 4) < 0.01, kind


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "JPEG2000", "AVIF"])
def test_still_pictures_are_no_videos(kind):
    """They are what a flat list of frames becomes."""
    if kind not in Image.SAVE:
        pytest.skip("older versions of Pillow lack AVIF")
    with pytest.raises(MediaError, match=r"row 1: video of .*: a still picture, not a video. .*\[\[frame, frame\]\]"):
        decoded(encoded(Image.fromarray(NOISE), kind), "video")


def test_phone_videos_are_upright():
    half = np.zeros((32, 48, 3), np.uint8)
    half[:, 24:] = 255
    found = decoded(video([half] * 5, rotate=90), "video").frames[0]
    assert found.size == (32, 48)
    assert np.asarray(found)[:24].mean() > 200 > 50 > np.asarray(found)[24:].mean(), "turned counter-clockwise"


def test_broken_videos():
    data = video(greys(40), kind="matroska")
    gif = encoded(Image.fromarray(greys(3)[2]), "GIF", save_all=True,
                  append_images=[Image.fromarray(frame) for frame in greys(9)], duration=100)
    whole = video(greys(40))
    for broken, message in ((data[:len(data) // 3], "cut off: its frames end after"), (whole[:-200], "cannot be read"),
                            (gif[:len(gif) // 2], "truncated"), (gif[:-1], "cut off: the GIF has no end"),
                            (b"\0" * 500, "cannot be read"), ([Image.new("RGB", (4, 4)),
                                                               Image.new("RGB",
                                                                         (4, 5))], "frames of 4 x 4 and of 4 x 5"),
                            (encoded(Image.fromarray(NOISE),
                                     "JPEG"), "cannot be read"), (write_wav(TONE, 16_000), "cannot be read")):
        with pytest.raises(MediaError, match=message):
            decoded(broken, "video")


@pytest.mark.parametrize("kind,codec", [("mp4", "mpeg4"), ("matroska", "mpeg4"), ("mpegts", "mpeg2video"),
                                        ("asf", "mpeg4"), ("flv", "flv1")])
def test_times_count_from_the_first_frame(kind, codec):
    """A file that was cut out of a longer one, or sent, need not begin at 0."""
    found, at_zero = (decoded(video(greys(40), kind=kind, codec=codec, rate=25, first=first), "video")
                      for first in (7, 0))  # yapf: disable
    assert (found.times, found.seconds) == (at_zero.times, at_zero.seconds)
    assert found.times[0] == 0 and np.allclose(np.diff(found.times), 0.5, atol=0.05)
    assert levels(found) == levels(at_zero)


@pytest.mark.parametrize("kind,first", [("mp4", 0), ("matroska", 0), ("avi", 0), ("mp4", 20), ("matroska", 20)])
def test_videos_cut_off(kind, first):
    data, refused = video(greys(40), kind=kind, first=first), 0
    for length in range(len(data) // 40, len(data), len(data) // 40):
        try:
            assert decoded(data[:length], "video").seconds > 3.2, f"{length} of {len(data)} bytes"
        except MediaError:
            refused += 1
    assert refused > 20


def test_huge_videos_are_refused():
    gif = encoded(Image.new("L", (100, 100)), "GIF", save_all=True,
                  append_images=[Image.new("L", (100, 100), i) for i in range(1, 200)], duration=500)
    with pytest.raises(MediaError, match="11 frames of 100 x 100 pixels are more than 100000.*--fps"):
        decoded(gif, "video", replace(RULES, max_image_pixels=10_000))
    with pytest.raises(MediaError, match="48 x 32 pixels; it must have 1 to 1000"):
        decoded(video(greys(4)), "video", replace(RULES, max_image_pixels=1000))


def test_playlists_reach_no_other_file(tmp_path):
    pytest.importorskip("av")
    (tmp_path / "secret.mp4").write_bytes(video(greys(4)))
    lists = {
        "a.m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{tmp_path}/secret.mp4\n#EXT-X-ENDLIST\n",
        "a.ffconcat": f"ffconcat version 1.0\nfile {tmp_path}/secret.mp4\n", "a.mp4":
        "#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n"
    }
    (tmp_path / "data").mkdir()
    rules = MediaRules(root=tmp_path / "data")
    for name, text in lists.items():
        (rules.root / name).write_text(text)
        with pytest.raises(MediaError, match="cannot be read"):
            decoded(name, "video", rules)
