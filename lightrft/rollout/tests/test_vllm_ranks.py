"""vLLM in processes of its own, which are forked from a server that has imported it: what two ranks generate and train
with one engine or one each, and what they say when it comes to grief on one of them: which one, in which phase, why.
"""
import math
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightrft.tests.support import runs, tiny, tiny_task
from lightrft.tests.support.engine_faults import ended, launched, left
from lightrft.tests.support.gpu_measurements import MODULE, ROOT, check_piece, piece
from lightrft.tests.support.engine_rig import EXACT, SIZES
from lightrft.tests.support.launch import finish, launch, preload, torchrun
from lightrft.trainer.tests.test_partial_rollout import of_ranks

pytestmark = [
    pytest.mark.engine, pytest.mark.slow, pytest.mark.dist,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
]

VLLM = ["vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen2",
        "lightrft.tests.support.vllm_warmed"]  # yapf: disable
RANKS = "lightrft.tests.support.vllm_ranks"
MOE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts": 4,
       "num_experts_per_tok": 2, "moe_intermediate_size": 48, "initializer_range": 0.12}  # yapf: disable
CASES = ["raise@1:9 1", "raise@1:9 2", "kill@1:9 2", "long@1:2 2"]  # fault, --engine_tp_size


@pytest.fixture(name="server", scope="module", autouse=True)
def fixture_server():
    """Lets the processes of this module be forked from one that has imported vLLM."""
    preload(*VLLM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # as vllm/launch.py does; the server imports vLLM before it
        yield
    preload()


@pytest.fixture(name="broken", scope="module")
def fixture_broken(server, tmp_path_factory):
    return launched(tmp_path_factory.mktemp("vllm"), "vllm", CASES)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_whose_engine_fails(case, broken):
    """Rank 0 waits at the next barrier of the trainer or, with one engine of both, in a collective inside vLLM. What
    one rank has to submit to an engine of both is refused by both, before any draws a token."""
    codes, what = {
        "raise": ([1, 1], "rank 1 raised RuntimeError: vLLM's model is broken, in phase rollout"),
        "kill": ([1, -9], "rank 1 died without a message (killed, crashed, or out of memory), in phase"),
        "long": ([2, 2], "prompt 7: 1188 prompt + 6 new tokens are more than the 70 that"),
    }[case.partition("@")[0]]
    run = broken[case]
    assert ended(run) == codes, run.output
    assert what in run.log(0), run.output
    assert "in phase rollout" in run.log(0).partition(what[:30])[2] or case.startswith("long"), run.output
    waits = run.log(0).partition("rank 0 stops for that reason")[2]  # gloo's raises, where vLLM has no shared memory
    assert "/vllm/v1/" in waits or not case.endswith("9 2"), "rank 0 did not wait where it was to wait"
    assert left(run) == ([], False)


def test_nothing_is_left_that_would_stop_the_next_run(broken):
    """vLLM's shared memory had a name that did not depend on the run, and outlived a run that was killed."""
    assert not [path for run in broken.values() for path in Path("/dev/shm").glob(f"lightrft-{run.store.port}-*")]


@pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="installed without its repository")
def test_what_make_gpu_measures_of_vllm(tmp_path):
    """Steps and the life of an engine, of one rank and of two; here, because this server has imported vLLM."""
    pieces = [(tmp_path / name, *piece(tmp_path / name, name)) for name in ("run-vllm-0.5b", "run-vllm-7b-tp2")]
    for folder, one, options, run in [(*each, launch(each[0], each[2], each[1].ranks, module=MODULE))
                                      for each in pieces]:
        assert run.wait(200) == [0] * one.ranks, run.output
        check_piece(folder, one)


def test_two_ranks_run_one_engine(tmp_path):
    torchrun(RANKS, tiny.save_model(tmp_path / "model", **SIZES), 2, "early")


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_on_two_ranks(tp, tmp_path, monkeypatch):
    """FSDP2 shards them by expert, vLLM within each expert, and pads what it has."""
    monkeypatch.setitem(tiny.FAMILIES, "moe", ("qwen3_moe", MOE))
    torchrun(RANKS, tiny.save_model(tmp_path, "moe"), tp)


def test_two_ranks_train(tmp_path):
    """One engine each; the first step's facts hold, and the responses are those of one rank."""
    home = runs.write_home(tmp_path)
    tiny.save_model(home / "model", num_hidden_layers=1, **SIZES)
    (home / "judge.py").write_text("def score(queries, prompts, labels):\n"
                                   "    return [sum(map(ord, query)) % 7 / 7 for query in queries]\n")
    options = runs.BASE | {
        "pretrain": home / "model", "prompt_data": home / "train.jsonl", "reward": home / "judge.py:score",
        "engine_type": "vllm", "engine_kv_mib": 16, "max_steps": 2, "save_trajectories": True
    }  # yapf: disable
    said = {}
    for ranks in (1, 2):
        run = finish(tmp_path / str(ranks), options | {"save_path": tmp_path / str(ranks)}, ranks, limit_s=280)
        assert "step-1 facts hold" in run.output
        lines = runs.read_lines(tmp_path / str(ranks) / "metrics.jsonl")
        assert len(lines) == 2 and all(math.isfinite(line["policy/grad_norm"]) for line in lines)
        said[ranks] = [row["response"] for row in runs.read_lines(tmp_path / str(ranks) / "rollouts" / "step_1.jsonl")]
    assert said[1] == said[2]


def test_two_ranks_train_adapters(tmp_path):
    """FSDP2, one engine each and one of both: every rollout is by the weights of now, by proof and by log-probs."""
    home = tiny_task.write_home(tmp_path)
    tiny.save_model(home / "model", num_hidden_layers=1, **SIZES)
    options = runs.BASE | {
        "pretrain": home / "model", "prompt_data": home / "train.jsonl", "reward": home / "reward.py", "engine_type":
        "vllm", "engine_kv_mib": 16, "max_steps": 3, "lora_rank": 4, "lora_sync": "adapter", "sync_proof": "both",
        "actor_learning_rate": 0.05, "sync_canary_every": 1
    }  # yapf: disable
    folders = [tmp_path / str(tp_size) for tp_size in (1, 2)]
    started = [launch(at, options | {"save_path": at, "engine_tp_size": int(at.name)}, 2) for at in folders]
    for folder, run in zip(folders, started):
        assert run.wait(280) == [0, 0], run.output
        lines = runs.read_lines(folder / "metrics.jsonl")
        assert len(lines) == 3 and all(line["rollout/mismatch/abs_logp_mean"] < EXACT for line in lines), lines
        assert lines[2]["rollout/canary_gap"] < EXACT


def test_two_ranks_share_an_engine(tmp_path):
    """Every prompt is trained once in each episode, whole, and every token has the log-prob that it was drawn with."""
    home = tiny_task.write_home(tmp_path / "home")
    tiny.save_model(home / "model", hidden_size=128, initializer_range=0.06)
    lines, rows = of_ranks(home, tmp_path / "run", 2, engine_type="vllm", engine_tp_size=2, engine_kv_mib=16)
    once = [(row["uid"], row["index"]) for row in rows]
    assert Counter(once) == dict.fromkeys(once, 2) and len(set(once)) == 20 * 4
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    assert all(line["rollout/mismatch/abs_logp_mean"] < 2e-6 for line in lines)


def test_models_that_see(tmp_path):
    """Qwen2.5-VL and Qwen3-VL: names, fingerprints and log-probs of text and pictures."""
    pytest.importorskip("torchvision", reason="needs torchvision: make test installs it")
    torchrun("lightrft.tests.support.vllm_vision", tmp_path, ranks=1)


@pytest.mark.whole
@pytest.mark.timeout(600)
def test_the_other_families_that_see_or_hear(tmp_path):
    """Pictures, sounds and videos; LLaVA and Mistral take part where mistral_common is installed."""
    pytest.importorskip("torchvision", reason="needs torchvision: make test installs it")
    said = torchrun("lightrft.tests.support.vllm_media", tmp_path, "others", ranks=1, limit_s=550)
    mistral = (Path(sys.prefix) / "mistral" / "mistral_common").is_dir() or find_spec("mistral_common")
    assert said.count("\t1\t") == (12 if mistral else 7), said
