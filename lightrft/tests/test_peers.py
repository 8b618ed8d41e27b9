"""The comparisons with TRL's trainer (``make peers`` and vl_peer.py), where TRL is installed: a step of each."""
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightrft
from lightrft.tests.support.warm import warm_environ, warm_python

ROOT = Path(lightrft.__file__).parents[1]
SCRIPT, PACKAGES = ROOT / "benchmarks" / "peers.py", Path(sys.prefix) / "oracles"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="installed without its repository")


def run(script: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([warm_python(), script, *map(str, words)], capture_output=True, text=True, timeout=280,
                          env=os.environ | warm_environ(nested=True))  # yapf: disable


def test_it_says_so_where_trl_is_not_installed(tmp_path: Path) -> None:
    done = run(SCRIPT, "--packages", tmp_path)
    assert done.returncode == 1 and "run make peers" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not (PACKAGES / "trl").is_dir(), reason="TRL is missing: make oracles")
@pytest.mark.parametrize("script, example", [("peers", "quickstart"), ("vl_peer", "quickstart_vl")])
def test_both_trainers_make_the_same_steps(script: str, example: str, tmp_path: Path) -> None:
    if script == "vl_peer":
        pytest.importorskip("torchvision", reason="needs torchvision: make test installs it")
    made = run(ROOT / "examples" / example / "prepare.py", "--out", tmp_path, "--train_rows", 20, "--sft_rows", 20)
    assert made.returncode == 0, made.stderr
    (tmp_path / "sft").mkdir()
    (tmp_path / "base").rename(tmp_path / "sft" / "hf")  # untrained
    done = run(SCRIPT.with_stem(script), "--home", tmp_path, "--cases", "tiny", "--pairs", 1, "--threads", 1, "--out",
               tmp_path / "out")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out").read_text())
    assert found["trl"] == "1.16.0" and found["torch"] and found["cpu"]
    sides = found["runs"]["tiny, threads 1"]
    for side in ("trl", "lightrft", "lightrft, default"):
        (result, ) = sides[side]
        assert result["steps"] == 1 and result["samples"] == 16 and result["cpu_s"] > 0, (side, result)
        assert 16 <= result["tokens"] <= 16 * 8 and f"| tiny | 1 | {side} |" in done.stdout, (side, result)
    trained = {side: result["trained"] for side, (result, ) in sides.items()}
    assert trained == {"trl": 16, "lightrft": 16, "lightrft, default": trained["lightrft, default"]}
    assert trained["lightrft, default"] < 16  # an untrained model's answers are all wrong


@pytest.mark.slow
@pytest.mark.skipif(not (PACKAGES / "trl").is_dir(), reason="TRL is missing: make oracles")
def test_a_reward_model_has_the_losses_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides of benchmarks/offline.py on the same ragged rows: tokens and losses of all steps are equal."""
    for folder in (PACKAGES, SCRIPT.parent):
        monkeypatch.syspath_prepend(folder)
    offline = importlib.import_module("offline")
    offline.prepare(tmp_path, [])
    case, data = offline.TINY["rm tiny"], str(tmp_path / "data" / "train.parquet")
    trl, own = (offline.SIDES[side](case, str(tmp_path / "ragged"), data, str(tmp_path / side)) for side in case.sides)
    assert len(own.losses) == 3 and own.losses == pytest.approx(trl.losses, rel=1e-3)
    assert max(abs(loss - own.losses[0]) for loss in own.losses) > 5e-3, own.losses
    assert own.result()["tokens"] == trl.result()["tokens"] > 0 and own.result()["peak_mib"] > 0
