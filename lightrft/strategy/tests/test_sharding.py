"""Shards come from the placements of a tensor on its mesh, whatever they are."""
from pathlib import Path

import pytest

from lightrft.tests.support import sharding_ranks
from lightrft.tests.support.launch import torchrun


@pytest.mark.dist
@pytest.mark.slow
def test_every_layout_on_four_ranks(tmp_path: Path) -> None:
    said = torchrun(sharding_ranks.__name__, tmp_path / "checkpoints", ranks=4, limit_s=280)
    assert "layouts" in said
