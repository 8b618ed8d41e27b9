"""vLLM comes to grief on one of two ranks: both end within a minute and say which one, in which phase, and why."""
import os
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightrft.tests import faults, tiny
from lightrft.tests.launch import launch, no_orphans, preload

pytestmark = [
    pytest.mark.engine, pytest.mark.slow, pytest.mark.dist,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
]

SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
VLLM = ["vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen2"]
OPTIONS = faults.OPTIONS | {
    "engine_type": "vllm", "engine_kv_mib": 16, "plugin": "lightrft.rollout.tests.vllm_mischief",
    "generate_max_len": 6, "train_batch_size": 32, "eval_steps": 0, "eval_at_start": False, "self_test": "false",
    "sync_proof": "fingerprint", "best_metric": "none", "use_tensorboard": False, "disable_ckpt": True
}  # yapf: disable
CASES = ["raise@1:9 1", "raise@1:9 2", "kill@1:9 1", "kill@1:9 2", "long@1:2 2"]  # mischief, --engine_tp_size


@pytest.fixture(name="broken", scope="module")
def broken_fixture(tmp_path_factory):
    """Runs whose rank 1 comes to grief in its second step; all at once, they mostly wait."""
    home, found = faults.write_home(tmp_path_factory.mktemp("vllm")), {}
    tiny.save_model(home / "model", **SIZES)
    preload(*VLLM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # as vllm_start does; the server imports vLLM before it
        for case in CASES:
            mischief, tp_size = case.split()
            options = OPTIONS | {
                "pretrain": home / "model", "prompt_data": home / "train.jsonl", "reward": home / "reward.py",
                "save_path": home / case / "run", "engine_tp_size": tp_size
            }  # yapf: disable
            found[case] = launch(home / case, options, 2, MISCHIEF=mischief)
    yield found
    preload()


def ended(run, limit_s=60.0):
    """Exit codes, ``limit_s`` after the mischief at the latest."""
    mark, end = run.logs[1].parent / "mischief", time.monotonic() + 200
    while not mark.exists() and run.processes[1].is_alive() and time.monotonic() < end:
        time.sleep(0.1)
    assert mark.exists(), f"no mischief was made\n{run.output}"
    return run.wait(limit_s - (time.time() - mark.stat().st_mtime))


@pytest.mark.parametrize("case", CASES)
def test_a_rank_whose_engine_fails(case, broken):
    """Rank 0 waits at the next barrier of the trainer or, with one engine of both, in a collective inside vLLM."""
    codes, what = {
        "raise": ([1, 1], "rank 1 raised RuntimeError: vLLM's model is a pumpkin, in phase rollout"),
        "kill": ([1, -9], "rank 1 died without a word (killed, crashed, or out of memory), in phase"),
        "long": ([2, 2], "rank 1 stopped the run: request 3: 1188 prompt + 6 new tokens are more than the 70 that"),
    }[case.partition("@")[0]]
    run = broken[case]
    assert ended(run) == codes, run.output
    assert what in run.log(0) and "in phase rollout" in run.log(0).partition(what[:30])[2], run.output
    assert ("shm_allreduce" in run.log(0)) == case.endswith("9 2"), "rank 0 did not wait where it was to wait"
    assert no_orphans(run.logs[0].parent)
    for process in run.processes:
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)


def test_nothing_is_left_that_would_stop_the_next_run(broken):
    """vLLM's shared memory had a name that did not depend on the run, and outlived a run that was killed."""
    assert not [path for run in broken.values() for path in Path("/dev/shm").glob(f"lightrft-{run.store.port}-*")]
