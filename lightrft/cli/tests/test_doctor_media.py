"""The doctor on models that see or hear: their packages and their processor."""
import sys

import pytest

from lightrft.config.schema import Config
from lightrft.config.tree import build
from lightrft.preflight.checks import examine
from lightrft.preflight.checks.packages import check_media, check_media_package, MEDIA_PACKAGES
from lightrft.tests.support import tiny
from lightrft.tests.support.tiny_vision import FAMILIES
from lightrft.utils.errors import install_command

pytest.importorskip("torchvision")


def config(**options):
    return build(Config, options)


def test_what_a_model_that_sees_or_hears_needs(tmp_path, monkeypatch):
    reads = tiny.save_model(tmp_path / "reads")
    assert not list(check_media(config(pretrain=str(reads)))) and not list(check_media(config()))
    sees = FAMILIES["qwen2_5_vl"].save(tmp_path / "sees", True)
    found = {finding.name: finding for finding in check_media(config(pretrain=str(sees)))}
    assert {"pillow", "torchvision", "av", "media"} == found.keys() and found["pillow"].verdict == "ok"
    assert "image, video, processed by Qwen2_5_VLProcessor" == found["media"].text
    hears = FAMILIES["qwen2_audio"].save(tmp_path / "hears", True)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    found = {finding.name: finding for finding in check_media(config(pretrain=str(hears)))}
    assert {"pillow", "soundfile", "soxr", "media"} == found.keys()
    assert found["soundfile"].verdict == "warn" and found["soundfile"].remedy == install_command("audio")
    assert "without it only PCM and float WAV can be read" in found["soundfile"].text
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert check_media_package(MEDIA_PACKAGES["image"][0]).verdict == "fail"
    (sees / "preprocessor_config.json").unlink(missing_ok=True)
    (sees / "processor_config.json").unlink()
    monkeypatch.undo()
    lines = list(examine("media", lambda: check_media(config(pretrain=str(sees)))))
    assert lines[-1].verdict == "fail" and "processor" in lines[-1].text
