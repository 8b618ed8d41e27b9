"""Models that see and hear under every strategy: text, media and both, on one and on two ranks."""
import os
import subprocess
import sys

import pytest

from lightrft.tests.support import media_strategies

pytest.importorskip("torchvision")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_strategy_trains_the_same(ranks: int, tmp_path) -> None:
    for name, family in media_strategies.RIGS.items():
        family.save(tmp_path / name, tied=False)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", f"{ranks}", "--standalone"] if ranks > 1 else []
    done = subprocess.run([sys.executable, *torchrun, "-m", media_strategies.__name__,
                           str(tmp_path)], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                          timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
