"""Models that see and hear under every strategy: text, media and both, on one and on two ranks."""

import pytest

from lightrft.tests.support import media_strategies, tiny_vision
from lightrft.tests.support.launch import torchrun
from lightrft.tests.support.tiny_sound import SOUNDS

pytest.importorskip("torchvision")
FAMILY = "qwen3_vl"  # the tower feeds several layers of the decoder


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_strategy_trains_the_same(ranks: int, tmp_path) -> None:
    tiny_vision.save_model(tmp_path / "model", FAMILY, tied=False)
    tiny_vision.save_model(tmp_path / "tiles", "llava_onevision", tied=False)
    tiny_vision.save_model(tmp_path / "bare", "gemma3", tied=False)
    SOUNDS["qwen2_audio"].save(tmp_path / "sounds", tied=False)
    torchrun(media_strategies.__name__, tmp_path, ranks=ranks, limit_s=280)
