"""Processed media on disk: what is read again, what is not, and files that several ranks write or that are damaged."""
import io
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from lightrft.config.schema import DataConfig
from lightrft.datasets.media import find_medium
from lightrft.datasets.media_cache import settings_of
from lightrft.datasets.media_store import open_store
from lightrft.models.tokenizer import load_tokenizer
from lightrft.tests.support import tiny_vision
from lightrft.utils.errors import UserError
from lightrft.utils.logging import get_logger

pytest.importorskip("torchvision")


def png(seed, size=(56, 84)):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)).save(file, "BMP")
    return file.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = str(tiny_vision.save_model(tmp_path_factory.mktemp("m"), "qwen2_5_vl", True))
    return folder, load_tokenizer(folder)


@pytest.fixture
def opened(model, tmp_path):
    """Open a store on ``tmp_path/cache``, as a run does at its start."""
    get_logger()  # whose first call decides where messages go

    def store(path=None, **options):
        options = {"media_cache_dir": str(tmp_path / "cache"), "media_root": str(tmp_path)} | options
        return open_store(path or model[0], model[1], DataConfig(**options))

    return store


def tensors(store, *values):
    found = [find_medium(value, "image", store.rules, "row 1") for value in values]
    return [store.tensors(key) for key in store.register(found)]


def files(tmp_path):
    return sorted((tmp_path / "cache").rglob("*.safetensors"))


def same(one, other):
    return one.text == other.text and one.kind == other.kind and one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


def test_a_later_run_reads_what_an_earlier_one_processed(opened, tmp_path):
    first, second = opened(), opened()
    made = tensors(first, png(0), png(1))
    again = tensors(second, png(1), png(0))
    assert same(made[0], again[1]) and same(made[1], again[0])
    assert (first.decoded, second.decoded) == (2, 0)
    for options in ({"max_pixels": 1000}, {"fps": 1.0}):
        other = opened(**options)
        tensors(other, png(0))
        assert other.decoded == 1, "other settings are other files"
    processor = first.processor
    processor.image_processor.image_mean = [0.25] * 3
    processor.save_pretrained(tmp_path / "other")
    other = opened(str(tmp_path / "other"))
    tensors(other, png(0))
    assert other.decoded == 1, "so are those of another processor"
    before = settings_of(processor)
    processor.__class__ = type("Other", (type(processor), ), {})
    assert settings_of(processor) != before
    off = opened(media_cache_dir=None)
    tensors(off, png(0))
    assert off.decoded == 1 and len(files(tmp_path)) == 5


def test_the_content_decides_and_not_the_name_of_a_file(opened, tmp_path):
    (tmp_path / "a.bmp").write_bytes(png(0))
    (made, ) = tensors(opened(), "a.bmp")
    store = opened()
    assert same(made, tensors(store, png(0))[0]) and store.decoded == 0
    (tmp_path / "a.bmp").write_bytes(png(1))  # of the same size
    store = opened()
    assert not same(made, tensors(store, "a.bmp")[0]) and store.decoded == 1


@pytest.mark.parametrize("damage", [
    lambda data: data[:len(data) // 2], lambda data: b"", lambda data: b"x" * 100,
    lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    lambda data: data.replace(b"image_pad", b"image_pat", 1),
])  # yapf: disable
def test_a_damaged_file_is_made_again(damage, opened, tmp_path, caplog):
    (made, ) = tensors(opened(), png(0))
    (path, ) = files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    store = opened()
    assert same(made, tensors(store, png(0))[0])
    assert store.decoded == 1 and "is damaged" in caplog.text
    assert same(made, store.disk.read(path)), "the file is whole again"


def test_the_budget_keeps_what_was_read_last(opened, tmp_path):
    pictures = [png(seed, (224, 224)) for seed in range(8)]  # 300 KiB each when processed
    store = opened(media_disk_mib=1)
    for age, picture in enumerate(pictures[:3]):
        tensors(store, picture)
        for path in files(tmp_path):
            os.utime(path, (path.stat().st_mtime - 1000, ) * 2)
    tensors(opened(media_disk_mib=1), pictures[0])
    tensors(store, *pictures[3:])
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 1 << 20
    later = opened(media_disk_mib=1)
    tensors(later, pictures[0], pictures[7])
    assert later.decoded < 2, "the oldest went first"
    unlimited = opened()
    tensors(unlimited, *pictures)
    assert len(files(tmp_path)) == 8


def test_ranks_share_a_folder(opened, tmp_path):
    pictures = [png(seed) for seed in range(12)]
    (expected, *_) = [tensors(opened(media_cache_dir=None), *pictures)]
    stores = [opened() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda store: tensors(store, *pictures), stores):
            assert all(map(same, found, expected))
    assert len(files(tmp_path)) == 12 and not list((tmp_path / "cache").rglob("*.tmp"))


def test_folders_that_cannot_be_used(opened, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--media_cache_dir .*file"):
        opened(media_cache_dir=str(tmp_path / "file"))
    store = opened()
    (tmp_path / "cache").rmdir()
    (tmp_path / "cache").write_text("no folder any more")
    tensors(store, png(0), png(1))
    assert store.decoded == 2 and caplog.text.count("cannot be written") == 1
