"""SGLang on two ranks, which are forked from a server that has imported it: one engine of both, the quickstart, and
what the ranks say when SGLang comes to grief on one of them: which one, in which phase, and why.

For an environment with SGLang; :mod:`lightrft.rollout.tests.test_sglang_engine` runs it there.
"""
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from sglang.srt.managers.load_snapshot import shm_path_for

from lightrft.rollout.sglang import launch
from lightrft.tests.support import runs, tiny
from lightrft.tests.support.engine_faults import ended, launched, left
from lightrft.tests.support.engine_rig import SIZES
from lightrft.tests.support.launch import ROOT, torchrun
from lightrft.tests.support.sglang_experts import MOE
from lightrft.tests.support.sglang_suite import ENVIRON
from lightrft.tests.support.warm import warm_environ, warm_python

CASES = {  # test_vllm_ranks has more, of what is the same code
    "raise@1:9 2": ([1, 1], ": RuntimeError: SGLang's model is broken"),
    "die@1:2 1": ([1, -9], "rank 1 died without a message (killed, crashed, or out of memory)"),
}  # yapf: disable


@pytest.fixture(name="server", scope="module", autouse=True)
def fixture_server():
    """Lets the processes of this module be forked from the server that has imported SGLang, in its environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRON.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(name="broken", scope="module")
def fixture_broken(server, tmp_path_factory):
    return launched(tmp_path_factory.mktemp("sglang"), "sglang", CASES)


def test_one_engine_of_both_ranks(tmp_path, monkeypatch):
    """With experts, each of which is cut up between the ranks."""
    monkeypatch.setitem(tiny.FAMILIES, "moe", ("qwen3_moe", MOE | {"tie_word_embeddings": False}))
    torchrun("lightrft.tests.support.sglang_ranks", tiny.save_model(tmp_path / "model", "moe", **SIZES))


def test_quickstart_learns_and_a_killed_scheduler_ends_all_ranks(tmp_path):
    """The command after the warm-up, for 16 steps on two ranks; then rank 1 loses its scheduler in a rollout."""
    out, mark, before = tmp_path / "out", tmp_path / "mark", os.environ["WARMED_UP"]
    launcher = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = (f"--pretrain {before}/sft/hf --prompt_data {before}/data/train.parquet --save_path {out} "
             "--engine_type sglang --engine_kv_mib 16 --max_steps 22 --eval_steps 0 --no_eval_at_start --save_steps -1 "
             "--rollout_batch_size 16 --train_batch_size 128 "
             "--plugin lightrft.tests.support.sglang_fault_plugin").split()
    own = warm_environ() | {"FAULT": "scheduler", "FAULT_MARK": str(mark)}
    done = subprocess.run([*launcher, "examples/quickstart/train_colocate.py", *words], env=os.environ | own, text=True,
                          cwd=ROOT, timeout=500, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # yapf: disable
    said = done.stdout
    assert done.returncode != 0 and mark.exists(), said[-8000:]
    assert time.time() - mark.stat().st_mtime < 60, "the ranks did not end in time"
    cause = r"rank 1 raised RuntimeError: SGLang's scheduler \(process \d+\) has ended with exit code -9"
    assert re.search(cause + r"(.|\n)*-- rank 0 stops for that reason", said), said[-8000:]
    rows = [row for row in runs.read_lines(out / "metrics.jsonl") if "reward/mean" in row]
    rewards = [row["reward/mean"] for row in rows]
    assert [row["step"] for row in rows] == list(range(1, 17)) and "step-1 facts hold" in said
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards
    assert max(row["rollout/mismatch/abs_dp_max"] for row in rows) < 1e-4
    alive = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, timeout=20).stdout
    assert str(out) not in alive, "processes are left"


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
