"""Models that see and hear under every strategy: text, media and both, on one and on two ranks."""

import pytest

from lightrft.tests.support import media_strategies
from lightrft.tests.support.launch import torchrun

pytest.importorskip("torchvision")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_strategy_trains_the_same(ranks: int, tmp_path) -> None:
    for name, family in media_strategies.RIGS.items():
        family.save(tmp_path / name, tied=False)
    torchrun(media_strategies.__name__, tmp_path, ranks=ranks, limit_s=500)
