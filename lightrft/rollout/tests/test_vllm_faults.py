"""vLLM comes to grief on one of two ranks: both end within a minute and say which one, in which phase, and why."""
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightrft.tests.support.engine_faults import ended, launched, left
from lightrft.tests.support.gpu_measurements import MODULE, ROOT, check_piece, piece
from lightrft.tests.support.launch import launch, preload

pytestmark = [
    pytest.mark.engine, pytest.mark.slow, pytest.mark.dist,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
]

VLLM = ["vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen2"]
CASES = ["raise@1:9 1", "raise@1:9 2", "kill@1:9 1", "kill@1:9 2", "long@1:2 2"]  # fault, --engine_tp_size


@pytest.fixture(name="broken", scope="module")
def broken_fixture(tmp_path_factory):
    preload(*VLLM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # as vllm/launch.py does; the server imports vLLM before it
        yield launched(tmp_path_factory.mktemp("vllm"), "vllm", CASES)
    preload()


@pytest.mark.parametrize("case", CASES)
def test_a_rank_whose_engine_fails(case, broken):
    """Rank 0 waits at the next barrier of the trainer or, with one engine of both, in a collective inside vLLM."""
    codes, what = {
        "raise": ([1, 1], "rank 1 raised RuntimeError: vLLM's model is broken, in phase rollout"),
        "kill": ([1, -9], "rank 1 died without a word (killed, crashed, or out of memory), in phase"),
        "long": ([2, 2], "rank 1 stopped the run: request 3: 1188 prompt + 6 new tokens are more than the 70 that"),
    }[case.partition("@")[0]]
    run = broken[case]
    assert ended(run) == codes, run.output
    assert what in run.log(0) and "in phase rollout" in run.log(0).partition(what[:30])[2], run.output
    assert ("shm_allreduce" in run.log(0)) == case.endswith("9 2"), "rank 0 did not wait where it was to wait"
    assert left(run) == ([], False)


def test_nothing_is_left_that_would_stop_the_next_run(broken):
    """vLLM's shared memory had a name that did not depend on the run, and outlived a run that was killed."""
    assert not [path for run in broken.values() for path in Path("/dev/shm").glob(f"lightrft-{run.store.port}-*")]


@pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="installed without its repository")
def test_what_make_gpu_measures_of_vllm(tmp_path, broken):
    """Steps and the life of an engine, of one rank and of two; here, because this server has imported vLLM."""
    pieces = [(tmp_path / name, *piece(tmp_path / name, name)) for name in ("run-vllm-0.5b", "run-vllm-7b-tp2")]
    for folder, one, options, run in [(*each, launch(each[0], each[2], each[1].ranks, module=MODULE))
                                      for each in pieces]:
        assert run.wait(200) == [0] * one.ranks, run.output
        check_piece(folder, one)
