"""Models that see and hear under every strategy: text, media and both, on one and on two ranks."""
from pathlib import Path

import pytest

from lightrft.tests.support import media_strategies
from lightrft.tests.support.launch import torchrun
from lightrft.tests.support.packages import needs_deepspeed

pytest.importorskip("torchvision")


@pytest.fixture(name="folder", scope="module")
def fixture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the models; the first run leaves there what one process finds."""
    folder = tmp_path_factory.mktemp("media")
    for name, family in media_strategies.RIGS.items():
        family.save(folder / name, tied=False)
    return folder


@needs_deepspeed
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(520)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_strategy_trains_the_same(ranks: int, folder: Path) -> None:
    torchrun(media_strategies.__name__, folder, ranks=ranks, limit_s=500)
