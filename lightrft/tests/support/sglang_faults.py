"""SGLang comes to grief on one of two ranks: both end within a minute and say which one, in which phase, and why.

For an environment with SGLang; :mod:`lightrft.rollout.tests.test_sglang_engine` runs it there.
"""
import re
import tempfile
from pathlib import Path

import pytest
from sglang.srt.managers.load_snapshot import shm_path_for

from lightrft.rollout.sglang import launch
from lightrft.tests.support.engine_faults import ended, launched, left
from lightrft.tests.support.launch import preload

SGLANG = ["sglang.srt.entrypoints.engine", "sglang.srt.managers.scheduler"]
CASES = {
    "raise@1:9 1": ([1, 1], ": RuntimeError: SGLang's model is broken"),
    "raise@1:9 2": ([1, 1], ": RuntimeError: SGLang's model is broken"),
    "die@1:2 1": ([1, -9], "rank 1 died without a word (killed, crashed, or out of memory)"),
    "long@1:2 2": ([2, 2], "rank 1 stopped the run: request 3: 1188 prompt + 6 new tokens are more than the 70"),
}  # yapf: disable


@pytest.fixture(name="broken", scope="module")
def broken_fixture(tmp_path_factory):
    preload(*SGLANG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")  # as sglang_start does; the server imports SGLang before it
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield launched(tmp_path_factory.mktemp("sglang"), "sglang", CASES)
    preload()


@pytest.mark.parametrize("case", CASES)
def test_a_rank_whose_engine_fails(case, broken):
    run, (codes, what) = broken[case], CASES[case]
    assert ended(run) == codes, run.output
    assert re.search(re.escape(what) + r"(.|\n)*, in phase rollout", run.output), run.output
    assert left(run) == ([], False)


def test_nothing_is_left_but_what_the_next_start_removes(broken):
    folders = [folder for folder in Path(tempfile.gettempdir()).glob("lightrft-sglang-*") if mine(folder, broken)]
    assert folders, "no rank was killed"
    others = set(Path("/dev/shm").glob("sglang_loads_lightrft*")) - {Path(shm_path_for(one.name)) for one in folders}
    assert not [path for path in others if mine(path, broken)]
    launch.claim()
    assert not [path for path in folders if path.exists() or Path(shm_path_for(path.name)).exists()]


def mine(path, runs):
    return any(f"-{process.pid}-" in path.name for run in runs.values() for process in run.processes)
