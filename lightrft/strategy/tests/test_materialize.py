"""Models whose weights stay in their files until the strategy has sharded them."""
import os
import re
import runpy
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import model_folders
from lightrft.tests.support.packages import needs_deepspeed
from lightrft.tests.support.warm import warm_environ, warm_python

ROOT = Path(__file__).parents[3]
BENCHMARK = ROOT / "benchmarks" / "load_memory.py"


@needs_deepspeed
@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_read_what_a_whole_model_has(tmp_path: Path) -> None:
    """With every strategy and from all forms of files; a rank of FSDP2 takes its share, one tensor and a tenth."""
    model_folders.write(tmp_path)
    command = [warm_python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m",
               "lightrft.tests.support.load_ranks", str(tmp_path)]  # yapf: disable
    environment = {**os.environ, **warm_environ(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def test_a_meta_tensor_that_nothing_can_read_is_an_error() -> None:
    strategy = get_strategy(StrategyConfig(strategy="single"))
    strategy.setup()
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="weight of Linear is on the meta device, and nothing can read it"):
        strategy.prepare(model)


@pytest.mark.skipif(not BENCHMARK.exists(), reason="installed without its repository")
def test_the_benchmark_ends_with_an_error_above_its_bar(monkeypatch: pytest.MonkeyPatch,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    """With the figures of docs/benchmarks.md: those of the trainer pass, those of the former way do not."""
    benchmark = runpy.run_path(str(BENCHMARK))
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| FSDP2 \| (\d) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2", "4"]
    inside = benchmark["main"].__globals__
    monkeypatch.setitem(inside, "write_model", lambda *args, **changes: 264.0)
    for taken, refused in ((2, []), (1, ["1 rank:", "2 ranks:", "4 ranks:"])):
        measured = {int(row[0]): {"peak": float(row[taken]), "bar": float(row[3])} for row in rows}
        monkeypatch.setitem(inside, "run", lambda way, chosen, ranks, folder: measured[ranks])  # noqa: B023
        with pytest.raises(SystemExit) if refused else nullcontext(SimpleNamespace(value="")) as error:
            benchmark["main"]([])
        said = str(error.value).splitlines()
        assert len(said) == len(refused) and all(words in line for words, line in zip(refused, said)), said
        assert all("MiB of host memory per rank, more than its share + the largest tensor + 10 % = " in line
                   for line in said)  # yapf: disable
        assert capsys.readouterr().out.count("\n| ") == 4, "the table is printed all the same"
