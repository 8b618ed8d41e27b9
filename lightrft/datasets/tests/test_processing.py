"""Media as the processor of a model makes them of a file: frames, their times, and the tokens of a prompt."""
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor
from transformers.video_utils import load_video

from lightrft.config.schema import DataConfig
from lightrft.datasets.media import find_medium, MediaRules
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.processing import MediumProcessor
from lightrft.datasets.media_cache import DiskCache
from lightrft.datasets.media_prompts import pair_media
from lightrft.datasets.rows import DataError, hold_rows, load_rows
from lightrft.datasets.tests.test_decoding import greys, video
from lightrft.datasets.waveform import Waveform, write_wav
from lightrft.tests.support import tiny_vision

pytest.importorskip("torchvision")
pytest.importorskip("av")
SIZES = [(28, 28), (30, 200), (199, 31), (56, 84), (113, 97), (64, 333), (500, 400)]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A video of 8 frames, 2 a second, which is what processors sample."""
    path = tmp_path_factory.mktemp("video") / "a.mp4"
    path.write_bytes(video(greys(8), rate=2))
    return path


@pytest.mark.parametrize(
    "name",
    ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "glm46v", "qwen2_5_omni_thinker", "internvl", "smolvlm", "gemma4"])
def test_a_video_is_what_the_processor_makes_of_its_file(name, file, tmp_path):
    """Pixels, seconds per grid and the words in the prompt; without the times processors assume 24 frames a second."""
    family = tiny_vision.FAMILIES[name]
    tokenizer = family.tokenizer()
    processor = family.processor(tokenizer)
    processor.save_pretrained(tmp_path)
    store = MediaStore(AutoProcessor.from_pretrained(tmp_path), MediaRules(file.parent))
    keys = store.register([find_medium("a.mp4", "video", store.rules, "row 1")])
    frames, metadata = load_video(str(file), backend="pyav")
    text = f"a {family.placeholders['video']} b"
    videos, times = ([[[frames]], [[metadata]]] if name == "smolvlm" else [[frames], [metadata]])
    options = {"fps": 2} if name == "qwen2_5_omni_thinker" else {"video_metadata": times}
    whole = store.processor(text=[text], videos=videos, do_sample_frames=False, return_tensors="pt", **options)
    found, made = store.tensors(keys[0]).tensors, family.named(whole)
    for tensor in found.keys() & made.keys():
        torch.testing.assert_close(found[tensor], torch.as_tensor(made[tensor]), rtol=0, atol=0)
    assert any(name.startswith("pixel_values") for name in found.keys() & made.keys())
    seconds = {"qwen2_5_vl": "second_per_grid_ts", "qwen2_5_omni_thinker": "video_second_per_grid"}.get(name)
    assert seconds is None or found[seconds].tolist() == [1.0]
    assert store.encode(text, keys) == whole["input_ids"][0].tolist()
    with pytest.raises(DataError, match="the chat template wrote 0 .* for 1 media of kind video"):
        store.encode("a b", keys)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("kind,codec", [("mp4", "mpeg4"), ("mpegts", "mpeg2video")])
def test_a_video_that_begins_later_is_the_same_to_the_model(name, kind, codec):
    """Tensors, seconds per grid and the times in the prompt, of which positions are made."""
    store = MediaStore(tiny_vision.FAMILIES[name].processor(tiny_vision.FAMILIES[name].tokenizer()), MediaRules())
    files = [video(greys(20), kind=kind, codec=codec, first=first) for first in (0, 5)]
    keys = store.register([find_medium(file, "video", store.rules, "row 1") for file in files])
    at_zero, later = (store.tensors(key) for key in keys)
    assert keys[0] != keys[1] and at_zero.text == later.text and at_zero.tensors.keys() == later.tensors.keys()
    assert all(torch.equal(tensor, later.tensors[name]) for name, tensor in at_zero.tensors.items())


def test_times_of_frames_that_were_left_out(tmp_path):
    """Of 10 frames a second every fifth is kept: the prompt has their own times."""
    (tmp_path / "a.mp4").write_bytes(video(greys(40), rate=10))
    tokenizer = tiny_vision.FAMILIES["qwen3_vl"].tokenizer()
    store = MediaStore(tiny_vision.FAMILIES["qwen3_vl"].processor(tokenizer), MediaRules(tmp_path))
    keys = store.register([find_medium("a.mp4", "video", store.rules, "row 1")])
    assert np.allclose(store.open(keys[0]).times, np.arange(8) / 2)
    assert [word for word in store.tensors(keys[0]).text.split("<") if "seconds" in word
            ] == [f"{seconds:.1f} seconds>" for seconds in (0.25, 1.25, 2.25, 3.25)]  # means of two frames


def test_a_video_of_one_frame_has_a_remedy_of_its_own():
    """Qwen3-VL's processor refuses it, Qwen2-VL's shows it twice."""
    frame = Image.new("RGB", (56, 56))
    for name in ("qwen2_vl", "qwen3_vl"):
        store = MediaStore(tiny_vision.FAMILIES[name].processor(tiny_vision.FAMILIES[name].tokenizer()), MediaRules())
        (key, ) = store.register([find_medium([frame], "video", store.rules, "row 1")])
        refused = pytest.raises(DataError,
                                match="row 1: .* refuses it: .*The video has one frame: raise --fps if it is")
        with refused if name == "qwen3_vl" else nullcontext():
            assert store.tensors(key).kind == "video"


@pytest.mark.parametrize("name",
                         [name for name, family in tiny_vision.FAMILIES.items() if "image" in family.placeholders])
def test_the_text_of_a_picture_from_its_size(name):
    """Where a processor has a function for sizes; those with breaks between rows or tiles are processed instead."""
    family = tiny_vision.FAMILIES[name]
    single = MediumProcessor(family.processor(family.tokenizer()))
    noise = np.random.default_rng(0)
    found = [single.text_of_size(height, width) for height, width in SIZES]
    without = name == "qwen2_5_omni_thinker" and not hasattr(single.processor, "_get_num_multimodal_tokens")
    if without or name in ("llava_pixtral", "mistral3", "idefics3", "smolvlm"):
        assert found == [None] * len(SIZES)
        return
    for text, size in zip(found, SIZES):
        picture = Image.fromarray(noise.integers(0, 256, (*size, 3), dtype=np.uint8))
        assert text == single.process("image", picture).text, size


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_omni_thinker", "voxtral"])
def test_no_sound_is_cut_to_a_window(name):
    """Windows of these models last 1 s; Voxtral hears several, of 2 s."""
    family = tiny_vision.FAMILIES[name]
    single = MediumProcessor(family.processor(family.tokenizer()), 8 * (name == "voxtral"))
    whole, longer = (Waveform(np.zeros(samples, np.float32), 16_000) for samples in (16_000, 40_000))
    text = single.process("audio", whole).text
    if name == "voxtral":
        assert single.process("audio", longer).text == 2 * text
        return
    with pytest.raises(ValueError, match="it lasts 2.50 s, and the model processes only the first 1 s of a sound"):
        single.process("audio", longer)


def test_the_end_of_a_sound_that_is_a_little_longer_than_the_window_is_cut_off(tmp_path, capfd):
    """Windows last 1 s; encoders pad by up to 0.1 s. The rows are counted, again when the disk has the tensors."""
    family = tiny_vision.FAMILIES["qwen2_audio"]
    noise = np.random.default_rng(0).standard_normal(17_601).astype(np.float32) / 10
    sounds = [write_wav(noise[:samples], 16_000) for samples in (16_000, 16_640, 17_600, 17_601)]
    rows = load_rows(hold_rows([{"prompt": "?", "audios": [sound]} for sound in sounds]))
    cfg = DataConfig(media_policy="skip")
    for _ in range(2):
        store = MediaStore(family.processor(family.tokenizer()), MediaRules())
        store.disk = DiskCache(tmp_path, 1 << 30, store.settings)
        chats = [[{"role": "user", "content": "<audio>?"}] for _ in sounds]
        keys = [media for _, media in pair_media(rows, chats, cfg, store).values()]
        whole, *cut = [store.tensors(key).tensors["input_features"] for key, in keys]
        assert len(cut) == 2 and all(torch.equal(whole, tensor) for tensor in cut)
        assert [len(store.open(key).samples) for key, in keys] == [16_000] * 3, "what an engine hears"
        said = capfd.readouterr().err
        assert "2 of 4 rows have a sound that lasts up to 0.1 s longer than the model processes" in said
        assert "1 of 4 rows have media that cannot be read" in said and "lasts 1.10 s" in said
