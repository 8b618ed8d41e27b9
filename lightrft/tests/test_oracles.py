"""The comparison with verl and TRL, where they are installed (``make oracles``)."""
import subprocess
import sys
from pathlib import Path

import pytest

import lightrft
from lightrft.tests.support.warm import warm_python

ROOT = Path(lightrft.__file__).parents[1]
SCRIPT, PACKAGES = ROOT / "benchmarks" / "oracles.py", Path(sys.prefix) / "oracles"
WRONG = """
import sys
sys.path.insert(0, sys.argv[1])
import oracles, oracle_preferences
cases = oracles.verl_losses
def wrong():
    first = next(cases())
    yield oracles.replace(first, flags=first.flags.replace("--eps_clip 0.2", "--eps_clip 0.21"))
oracles.verl_losses, oracles.verl_advantages, oracles.trl_cases = wrong, lambda: (), lambda: ()
oracle_preferences.preference_cases = lambda: ()
sys.exit(oracles.main(["--batches", "5"]))
"""
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="installed without its repository")
needs_peers = pytest.mark.skipif(not (PACKAGES / "verl").is_dir(), reason="verl and TRL are missing: make oracles")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, for the packages are stubs in part."""
    return subprocess.run([warm_python(), "-W", "ignore", *words], capture_output=True, text=True, timeout=280)


def test_it_says_so_where_they_are_not_installed(tmp_path: Path) -> None:
    done = run(str(SCRIPT), "--packages", str(tmp_path))
    assert done.returncode == 0 and "nothing is compared: run make oracles" in done.stdout, done.stderr


@pytest.mark.slow
@needs_peers
def test_every_algorithm_of_the_same_name_agrees() -> None:
    done = run(str(SCRIPT), "--batches", "5")
    assert done.returncode == 0 and " 0 are above it" in done.stdout, done.stdout + done.stderr
    names = [line.split("|")[1:3] for line in done.stdout.splitlines() if line.startswith("| ")]
    page = (ROOT / "docs" / "oracles.md").read_text(encoding="utf-8").splitlines()
    assert names == [line.split("|")[1:3] for line in page if line.startswith("| ")], "the table in docs is another one"


@pytest.mark.slow
@needs_peers
def test_another_bound_is_seen(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    done = run(str(tmp_path / "wrong.py"), str(SCRIPT.parent))
    assert done.returncode == 1 and "0 of 1 rows agree" in done.stdout, done.stdout + done.stderr
