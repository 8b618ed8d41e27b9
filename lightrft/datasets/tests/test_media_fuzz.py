"""A short run of benchmarks/media_fuzz.py, and faults that it has to notice."""
import sys
from pathlib import Path

import pytest

from lightrft.datasets import media, pictures, waveform

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="installed without its repository")


@pytest.fixture(scope="module")
def fuzz():
    for package in ("av", "soundfile", "soxr"):
        pytest.importorskip(package)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import media_fuzz
    sys.path.remove(str(ROOT / "benchmarks"))
    return media_fuzz


def test_broken_rows_are_used_rightly_or_refused(fuzz, tmp_path):
    pytest.importorskip("torchvision")
    from lightrft.tests.support import tiny_vision
    tallies = fuzz.fuzz(160, 3, str(tiny_vision.save_model(tmp_path, "qwen2_5_vl", True)))
    total = fuzz.total(tallies)
    assert not total.faults and total.rows == 160 == total.used + total.refused
    assert total.used > 20 and total.refused > 60 and all(tally.rows >= 5 for tally in tallies.values())


@pytest.mark.parametrize("place, name, wrong, kind", [
    (media.Path, "is_relative_to", lambda path, root: True, "path out of the root"),
    (pictures, "check_pixels", lambda size, most: None, "bomb"),
    (pictures, "orientation", lambda image: 1, "picture, odd mode"),
    (waveform, "_check_form", lambda channels, rate: None, "sound bomb"),
])  # yapf: disable
def test_a_fault_is_noticed(fuzz, monkeypatch, place, name, wrong, kind):
    monkeypatch.setattr(fuzz, "KINDS", {kind: fuzz.KINDS[kind]})
    monkeypatch.setattr(place, name, wrong)
    assert len(fuzz.fuzz(12, 0)[kind].faults) > 2
