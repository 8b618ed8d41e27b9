"""Every form of a medium in a row, and every one that is refused."""
import base64
import io
import os
import pickle
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from lightrft.datasets.decoding import decode, image_size
from lightrft.datasets.media import find_medium, MediaError, MediaRules
from lightrft.datasets.tests.test_decoding import greys, video
from lightrft.datasets.waveform import write_wav

RED = Image.new("RGB", (4, 2), "red")
TONE = np.sin(np.arange(800) / 8).astype(np.float32)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


PNG, WAV = encoded(RED), write_wav(TONE, 16_000)
TEXT = base64.b64encode(PNG).decode()
GIF = encoded(RED, "GIF", save_all=True, append_images=[Image.new("RGB", (4, 2), "blue")], duration=500)


@pytest.fixture
def rules(tmp_path):
    """Rules whose root is ``tmp_path/data``, with a picture, a link to it, and things that are no such file."""
    root = tmp_path / "data"
    (root / "more").mkdir(parents=True)
    (root / "red.png").write_bytes(PNG)
    (root / "more" / "tone.wav").write_bytes(WAV)
    (root / "empty.png").touch()
    (root / "link.png").symlink_to("red.png")
    (tmp_path / "secret.png").write_bytes(PNG)
    (root / "out.png").symlink_to("../secret.png")
    (root / "loop.png").symlink_to("loop.png")
    os.mkfifo(root / "pipe.png")
    return MediaRules(root=root)


def find(value, rules, kind="image"):
    return find_medium(value, kind, rules, "rows.jsonl, row 3")


# -- forms ------------------------------------------------------------------------------------------------------------
FORMS = {
    "bytes": PNG,
    "bytearray": bytearray(PNG),
    "struct": {"bytes": PNG, "path": None},
    "bytes win over a path": {"bytes": PNG, "path": "../elsewhere.png"},
    "struct of a path": {"bytes": None, "path": "red.png"},
    "empty bytes beside a path": {"bytes": b"", "path": "red.png"},
    "empty address beside a path": {"image_url": "", "path": "red.png"},
    "path": "red.png",
    "path with dots": "more/../red.png",
    "link": "link.png",
    "base64": TEXT,
    "base64 in lines": "\n".join(TEXT[i:i + 20] for i in range(0, len(TEXT), 20)),
    "base64 for URLs, without padding": TEXT.replace("+", "-").replace("/", "_").rstrip("="),
    "data URL": f"data:image/png;base64,{TEXT}",
    "data URL in capitals": f"DATA:IMAGE/PNG;CHARSET=utf-8;BASE64,{TEXT}",
    "quoted data URL": f"data:image/png;name=a.png;base64,{quote(TEXT, safe='')}",
    "chat part": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{TEXT}"}},
    "Qwen's part": {"type": "image", "image": "red.png"},
    "part with a path": {"type": "image", "path": "red.png"},
    "Pillow": RED,
    "array": np.asarray(RED),
}  # yapf: disable


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_picture(form, rules):
    medium = find(FORMS[form], rules)
    assert decode(medium, rules).tobytes() == RED.tobytes() and image_size(medium, rules) == (2, 4)
    assert pickle.loads(pickle.dumps(medium)) == medium and medium.kind == "image"


def test_a_grey_array_with_a_channel_is_one_without(rules):
    grey = np.arange(8, dtype=np.uint8).reshape(2, 4)
    assert find(grey[..., None], rules).key == find(grey, rules).key
    assert np.asarray(decode(find(grey[..., None], rules), rules))[..., 1].tolist() == grey.tolist()


def test_absolute_paths_and_file_urls_below_the_root(rules):
    for text in (str(rules.root / "red.png"), f"file://{rules.root}/red.png", f"file://localhost{rules.root}/red.png"):
        assert find(text, rules).source == rules.root / "red.png"
    spaced = rules.root / "a b.png"
    spaced.write_bytes(PNG)
    assert find(f"file://{rules.root}/a%20b.png", rules).source == spaced


def test_sounds(rules):
    forms = [
        WAV, "more/tone.wav", {"array": TONE.tolist(), "sampling_rate": 16_000},
        {"type": "audio", "audio_url": "more/tone.wav"}, {"type": "audio", "audio": {"bytes": WAV, "path": None}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"}}
    ]
    for form in forms:
        assert (decode(find(form, rules, "audio"), rules).samples == TONE).all()


def test_videos_of_pictures(rules):
    for value in ([PNG, "red.png", {"bytes": PNG}], np.stack([np.asarray(RED)] * 3), {"video": [RED, RED, RED]}):
        video = decode(find(value, rules, "video"), rules)
        assert [frame.tobytes() for frame in video.frames] == [RED.tobytes()] * 3 and video.seconds == 1.5
    assert len(decode(find(GIF, rules, "video"), rules).frames) == 2


# -- keys -------------------------------------------------------------------------------------------------------------
def test_a_key_is_that_of_the_content(rules):
    same = [find(FORMS[form], rules).key for form in ("bytes", "struct", "base64", "data URL", "chat part")]
    assert len(set(same)) == 1 and same[0].startswith("image:") and len(same[0]) == 38
    other = [encoded(Image.new("RGB", (4, 2), "blue")), RED, np.asarray(RED), [PNG], [PNG, PNG]]
    kinds = ["image"] * 3 + ["video"] * 2
    keys = [find(value, rules, kind).key for value, kind in zip(other, kinds)]
    assert keys[1] == keys[2] and len({*keys, same[0]}) == 5, "Pillow and array are one picture, all others differ"
    assert find(RED, rules).key == find(RED.copy(), rules).key


def test_the_key_of_a_file_is_that_of_its_content(rules, tmp_path):
    """Another node has the same files in another folder, with other times."""
    medium = find("red.png", rules)
    assert medium.key == find("./more/../red.png", rules).key == find(PNG, rules).key
    moved = replace(rules, root=rules.root.rename(tmp_path / "elsewhere"))
    os.utime(moved.root / "red.png", (0, 0))
    assert find("red.png", moved).key == medium.key


def test_a_file_that_is_written_again_is_another_medium(rules):
    """Of the same size; what was found before is not decoded from the new content."""
    file, other = rules.root / "red.png", encoded(Image.new("RGB", (4, 2), (254, 0, 0)))
    assert len(other) == len(PNG)
    medium = find("red.png", rules)
    before = file.stat()
    file.write_bytes(other)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert find("red.png", rules).key != medium.key
    with pytest.raises(MediaError, match="row 3: .*: the file has changed since the run read its rows"):
        decode(medium, rules)
    file.write_bytes(PNG)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 2))
    assert decode(medium, rules).tobytes() == RED.tobytes()


def test_the_root_of_a_row_is_the_folder_of_its_file(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "rows.jsonl").touch()
    assert MediaRules().for_rows_of(str(tmp_path / "a" / "rows.jsonl")).root == tmp_path / "a"
    assert MediaRules(root=tmp_path).for_rows_of(str(tmp_path / "a" / "rows.jsonl")).root == tmp_path
    assert MediaRules().for_rows_of("memory:12").root is None
    assert MediaRules().for_rows_of(str(tmp_path)).root == tmp_path


# -- base64 -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "JPEG2000"])
def test_base64_of_every_picture(form, rules):
    options = {"irreversible": False} if form == "JPEG2000" else {}
    for data in (encoded(RED, form, **options), encoded(RED, form, no_jp2=True) if form == "JPEG2000" else b""):
        assert not data or decode(find(base64.b64encode(data).decode(), rules), rules).size == RED.size


@pytest.mark.parametrize("form, codec", [("mp4", "mpeg4"), ("mov", "mpeg4"), ("matroska", "mpeg4"), ("avi", "mpeg4"),
                                         ("flv", "flv"), ("mpegts", "mpeg2video"), ("mpeg", "mpeg2video"),
                                         ("asf", "mpeg4")])
def test_base64_of_every_video(form, codec, rules):
    data = video(greys(30), 25, form, codec)
    assert decode(find(base64.b64encode(data).decode(), rules, "video"), rules).frames[0].size == (48, 32)


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "AIFF", "AU", "CAF", "MP3"])
def test_base64_of_every_sound(form, rules):
    soundfile, file = pytest.importorskip("soundfile"), io.BytesIO()
    soundfile.write(file, np.tile(TONE, 20), 16_000, format=form)
    data = file.getvalue()
    assert decode(find(base64.b64encode(data).decode(), rules, "audio"), rules).seconds == pytest.approx(1, abs=0.1)


def test_mp3_of_every_kind_is_no_path(rules):
    """By version, layer and checksum; soundfile writes one kind."""
    for second in (0xE3, 0xF2, 0xF3, 0xFA, 0xFB, 0xFC, 0xFD):
        data = bytes([0xFF, second, 0x64, 0]) + bytes(96)
        assert find(base64.b64encode(data).decode(), rules, "audio").source == data


def test_base64_of_no_known_format_is_no_path(rules):
    with pytest.raises(MediaError, match="row 3: image .*: base64 of no known format .it begins with 25 50 44 46 2d"):
        find(base64.b64encode(b"%PDF-1.7" + bytes(300)).decode(), rules)
    (rules.root / "QUJDREVGR0hJSktMTU5P").write_bytes(PNG)  # letters of a name
    assert decode(find("QUJDREVGR0hJSktMTU5P", rules), rules).tobytes() == RED.tobytes()


# -- sizes and rates of one medium ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, kind", [("max_pixels", "image"), ("min_pixels", "image"), ("fps", "video"),
                                        ("nframes", "video"), ("video_start", "video"), ("resized_height", "image"),
                                        ("detail", "image")])
def test_sizes_and_rates_of_one_medium_are_refused(name, kind, rules):
    """Unless they are those of the options; None is what parquet fills in."""
    own = find_medium({kind: [PNG] if kind == "video" else PNG, name: None}, kind, rules, "row 1")
    assert own.kind == kind
    for value in ({"bytes": PNG, name: 3.0}, {"type": kind, kind: {"path": "red.png", name: 3.0}}):
        with pytest.raises(MediaError, match=f"row 3: {kind} with {name} 3.0: .* cannot be set for a single {kind}. "):
            find(value, rules, kind)
        if name in ("max_pixels", "min_pixels", "fps"):
            assert find(value, replace(rules, **{name: 3}), kind)
    assert find({"type": "image_url", "image_url": {"url": "red.png", "detail": "auto"}}, rules)


@pytest.mark.parametrize("rate", [8000, 8000.0, np.int64(8000)])
def test_the_rate_of_an_array_is_that_of_its_sound(rate, rules):
    """A file has its own."""
    sound = decode(find({"array": TONE, "sampling_rate": rate}, rules, "audio"), rules, 8000)
    assert sound.rate == 8000 and (sound.samples == TONE).all()
    assert find({"bytes": WAV, "sampling_rate": rate}, rules, "audio").key == find(WAV, rules, "audio").key


# -- refused ----------------------------------------------------------------------------------------------------------
def deep(value):
    for _ in range(3000):
        value = [value]
    return value


REFUSED = {
    "nothing": (None, "it is empty"),
    "no bytes": (b"", r"of 0 bytes: it is empty"),
    "struct of no bytes": ({"bytes": b"", "path": None}, r"of 0 bytes: it is empty"),
    "empty text": ("", "no such file"),
    "empty file": ("empty.png", "empty"),
    "part without medium": ({"type": "image"}, "it is empty"),
    "too large": (b"x" * 10_001, "10001 bytes are more than the 10000"),
    "too many pixels": (Image.new("1", (300, 300)), "300 x 300 pixels; it must have 1 to 50000"),
    "number": (7, "int is not a known form"),
    "list": ([PNG], "list is not a known form"),
    "missing": ("blue.png", r"'blue.png': no such file in .*--media_root"),
    "folder": ("more", "no such file"),
    "pipe": ("pipe.png", "no such file"),
    "out of the root": ("../secret.png", r"outside of .*--media_root"),
    "absolute": ("/etc/passwd", "outside of"),
    "link out of the root": ("out.png", "outside of"),
    "link to itself": ("loop.png", "not a path|no such file"),
    "file URL out of the root": ("file:///etc/passwd", "outside of"),
    "escaped file URL": ("file:///%2e%2e/%2e%2e/etc/passwd", "outside of"),
    "file of another machine": ("file://server/red.png", "another machine, 'server'"),
    "broken URL": ("file://[/red.png", "not a URL"),
    "null byte": ("red.png\0", "not a path|no such file"),
    "long name": ("x" * 5000 + ".png", "not a path|no such file"),
    "home": ("~/red.png", "no such file"),
    "download": ("https://example.com/red.png", "downloads are off.*--media_urls"),
    "other protocol": ("s3://bucket/red.png", "this kind of URL is not read"),
    "data URL without base64": ("data:image/png,abc", "not a data URL"),
    "data URL cut off": (f"data:image/png;base64,{TEXT[:-3]}", "not a data URL"),
    "nested": ({"image": {"image": {"image": {"image": {"image": PNG}}}}}, "objects inside objects"),
    "nested deeply": (deep([PNG]), "list is not a known form"),
    "array of floats": (np.zeros((4, 4, 3)), "not a picture"),
    "array of five colours": (np.zeros((4, 4, 5), np.uint8), r"not a picture.*\[H, W, 1 to 4\]"),
}  # yapf: disable


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, rules):
    value, message = REFUSED[case]
    with pytest.raises(MediaError, match=f"^rows.jsonl, row 3: image .*{message}"):
        find(value, replace(rules, max_bytes=10_000, max_image_pixels=50_000))


def test_messages_are_short(rules):
    for value in ("x" * 70_000, {"image": "x" * 70_000}, {"x" * 70_000: 1}, b"x" * 70_000, deep("x")):
        with pytest.raises(MediaError) as caught:
            find(value, replace(rules, max_bytes=10))
        assert len(str(caught.value)) < 400, str(caught.value)[:1000]


@pytest.mark.parametrize("value, message", [
    ({"array": [0.0, float("nan")], "sampling_rate": 8000}, "NaN or infinite"),
    ({"array": [], "sampling_rate": 8000}, "not numbers"),
    ({"array": ["a"], "sampling_rate": 8000}, "not numbers"),
    ({"array": [[1], [2, 3]], "sampling_rate": 8000}, "not a sound"),
    ({"array": [20_000.0, 3.0], "sampling_rate": 8000}, "not from -1 to 1"),
    ({"array": [40_000, 3], "sampling_rate": 8000}, "more than 16 bits"),
    ({"array": [0.5]}, "sampling_rate None"),
    ({"array": [0.5], "sampling_rate": -1}, "sampling_rate -1"),
    ([0.5], "list is not a known form"),
])  # yapf: disable
def test_refused_sounds(value, message, rules):
    with pytest.raises(MediaError, match=message):
        find(value, rules, "audio")


def test_refused_videos(rules):
    for value, message in (([], "0 pictures.* Write its frames"), ([PNG] * 4, "4 pictures; a video has 1 to 3"),
                           ([PNG, None], "frame 2.*empty"), ([PNG,
                                                              [PNG]], "list is not a known form.*a column of videos")):
        with pytest.raises(MediaError, match=message):
            find(value, replace(rules, max_frames=3), "video")


def test_paths_without_a_root():
    with pytest.raises(MediaError, match="from no file.*--media_root"):
        find("red.png", MediaRules())


# -- downloads --------------------------------------------------------------------------------------------------------
class Answers(BaseHTTPRequestHandler):
    """A web server on this machine; ``asked`` has the paths so far."""
    asked = []

    def do_GET(self):
        self.asked.append(self.path)
        first, sent = self.asked.count(self.path) == 1, PNG
        states = {"/red.png": 200, "/endless": 200, "/moved": 302, "/busy": 503 if first else 200, "/cut": 200,
                  "/new": 200, "/down": 500}  # yapf: disable
        self.send_response(states.get(self.path, 404))
        if self.path == "/moved":
            self.send_header("Location", "file:///etc/passwd")
        if self.path == "/cut":
            self.send_header("Content-Length", str(len(PNG)))
            sent = PNG[:40] if first else PNG
        if self.path == "/new" and not first:
            sent = encoded(Image.new("RGB", (4, 2), "blue"))
        self.end_headers()
        if self.path not in ("/moved", "/endless"):
            self.wfile.write(sent)
        with suppress(ConnectionError):
            while self.path == "/endless":
                self.wfile.write(bytes(1 << 16))

    def log_message(self, *args):
        """Print nothing."""


@pytest.fixture(scope="module")
def site():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_downloads_when_allowed(site, rules):
    allowed = replace(rules, urls=True, max_bytes=1 << 20)
    medium = find({"url": f"{site}/red.png"}, allowed)
    assert decode(medium, allowed).tobytes() == RED.tobytes() and medium.source == f"{site}/red.png"
    for path, message in (("none", "cannot be downloaded.*404"), ("moved", "cannot be downloaded"),
                          ("endless", "bytes are more than the 1048576")):
        with pytest.raises(MediaError, match=message):
            decode(find(f"{site}/{path}", allowed), allowed)


def test_downloads_have_one_content_and_a_second_try(site, rules):
    """A URL whose content changes is an error, as a file is; a connection that breaks, or a busy server, is not."""
    allowed = replace(rules, urls=True)
    for path in ("busy", "cut"):
        assert decode(find(f"{site}/{path}", allowed), allowed).tobytes() == RED.tobytes()
    for path, state in (("down", 500), ("gone", 404)):
        with pytest.raises(MediaError, match=f"cannot be downloaded.*{state}"):
            decode(find(f"{site}/{path}", allowed), allowed)
    assert [Answers.asked.count(path) for path in ("/busy", "/cut", "/down", "/gone")] == [2, 2, 2, 1]
    medium = find(f"{site}/new", allowed)
    assert image_size(medium, allowed) == (2, 4)
    with pytest.raises(MediaError, match="row 3: image 'http.*/new': what the server sends has changed since the run"):
        decode(medium, allowed)
    other = replace(allowed, downloads={})
    assert decode(medium, other).getpixel((0, 0)) == (0, 0, 255), "another run starts with what there is now"
