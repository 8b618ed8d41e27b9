"""The proof of the weight sync: every fault is caught and named, and right syncs of every family pass."""
import copy
import re
import time
from pathlib import Path

import pytest
import torch

from lightrft.config.schema import ModelConfig, RolloutConfig, StrategyConfig
from lightrft.models.loader import load_actor
from lightrft.ops.rounding import Arithmetic
from lightrft.rollout import SamplingParams
from lightrft.rollout.hf import engine as hf_engine
from lightrft.rollout.hf.engine import HFEngine
from lightrft.rollout.hf.kv_cache import Prefill
from lightrft.rollout.weight_sync import verify as sync_proof
from lightrft.rollout.weight_sync.sync import sync_weights
from lightrft.rollout.weight_sync.verify import WeightSyncError, get_weight_sync_verifier
from lightrft.strategy.optimizer import OptimSpec
from lightrft.strategy.strategy import FakeStrategy
from lightrft.tests.support import runs, tiny, tiny_task
from lightrft.tests.support.episodes import Group, generate
from lightrft.tests.support.faulty_sync import FAULTS, TARGET, TWIN, break_sync
from lightrft.tests.support.launch import launch
from lightrft.types import Prompt
from lightrft.utils.timer import Timer

PROMPTS = [Prompt(str(i), list(range(40 + i, 60 + 3 * i)), "") for i in range(6)]
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
FAMILIES = {
    "qwen2": ("qwen2", {}), "qwen2 untied": ("qwen2", {"tie_word_embeddings": False}), "qwen3": ("qwen3", {}),
    "llama": ("llama", {}), "llama tied": ("llama", {"tie_word_embeddings": True}), "mistral": ("mistral", {}),
    "gemma2": ("gemma2", {}), "gemma3": ("gemma3", {}), "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe untied": ("qwen3_moe", {"tie_word_embeddings": False}), "lora": ("qwen2", {}),
}  # yapf: disable


class Rig:
    """One process whose engine has weights of its own, as under FSDP2; or shares those of the trainer."""

    def __init__(self, folder, mode="both", bf16=False, every=1, shared=False, **model):
        self.strategy = FakeStrategy(StrategyConfig(), bf16)
        self.strategy.setup()
        self.prepared = self.strategy.prepare(load_actor(ModelConfig(pretrain=str(folder), **model)), OptimSpec(1e-3))
        source, dtype = self.prepared.model.hf_model, torch.bfloat16 if bf16 else torch.float32
        own = source if shared else hf_engine._empty_copy(self.prepared.model, self.strategy.device, dtype)
        self.engine, self.timer = HFEngine(own, [3], 1 << 22, owns_model=not shared), Timer()
        cfg = RolloutConfig(sync_proof=mode, sync_canary_every=every)
        self.proof = get_weight_sync_verifier(cfg, self.strategy, self.prepared, self.engine, PROMPTS,
                                              Arithmetic("cpu", "bf16" if bf16 else "float32"), self.timer)
        self.version = 0

    def learn(self, size=0.01):
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.prepared.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
        self.prepared.refresh()

    def sync(self):
        self.version += 1
        sync_weights(self.strategy, self.prepared, self.engine, self.version, proof=self.proof)
        return self.proof.check(self.version)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"), initializer_range=0.12)


@pytest.mark.parametrize("kind, bf16",
                         [*((kind, False)
                            for kind in FAULTS), *((kind, True)
                                                   for kind in FAULTS if kind != "one bit")])  # rounded away
def test_a_faulty_sync_is_named(folder, kind, bf16):
    rig = Rig(folder, "fingerprint", bf16)
    rig.sync()
    rig.learn()
    break_sync(rig.engine, kind)
    with pytest.raises(WeightSyncError) as caught:
        rig.sync()
    said, first = str(caught.value), {"swapped": f"{TWIN} (layer 0)", "stale": "model.embed_tokens.weight"}
    name = first.get(kind, f"{TARGET} (layer 1)")
    assert said.startswith(f"weight sync 2: {name} differs between engine and trainer on rank 0: "), said
    assert FAULTS[kind][1] in said and "--load_checkpoint" in said and caught.value.exit_code == 1
    count = {"stale": 26, "swapped": 2}.get(kind, 1)
    assert f". {count} of 26 weights differ" in said, said
    if kind == "skipped" and (page := Path(tiny.__file__).parents[3] / "docs" / "weight_sync.md").exists():
        assert f"```text\n{said.partition(' If ')[0]}" in page.read_text(
            encoding="utf-8"), "the docs show another message"


def test_a_fault_at_the_first_sync(folder):
    rig = Rig(folder, "fingerprint")
    break_sync(rig.engine, "transposed")
    with pytest.raises(WeightSyncError, match="weight sync 1: " + re.escape(TARGET)):
        rig.sync()


@pytest.mark.parametrize("kind", ["transposed", "swapped", "stale", "scaled"])
def test_canaries_alone_see_it_and_the_fingerprints_name_it(folder, kind):
    rig = Rig(folder, "canary")
    assert rig.sync()["rollout/canary_gap"] < 1e-5
    rig.learn()
    break_sync(rig.engine, kind)
    with pytest.raises(WeightSyncError, match=r"log-probs of canaries differ .* \(mean: rank 0 .*model\."):
        rig.sync()


def test_canaries_are_as_rare_as_asked_for(folder):
    """By the version of the weights: a resumed run has them in the steps of one that was not interrupted."""
    rig = Rig(folder, "both", every=4)
    rig.version = -1
    assert [bool(rig.sync()) for _ in range(8)] == [True, True, False, False, True, False, False, False]
    resumed = Rig(folder, "both", every=4)
    resumed.version = 1
    assert [bool(resumed.sync()) for _ in range(4)] == [True, False, True, False]


def test_a_cache_that_outlives_the_update(folder, monkeypatch):
    """Keys and values of prompts that were seen before an update are read after it; all weights are right."""
    rig = Rig(folder)
    rig.sync()
    rig.learn(0.03)
    write, current = Prefill.attend, rig.engine._cache

    def attend(self, layer, query, key, value, *args, **kwargs):
        before = self.store.data[layer].clone()
        out = write(self, layer, query, key, value, *args, **kwargs)
        self.store.data[layer].copy_(before)
        return out

    monkeypatch.setattr(Prefill, "attend", attend)
    with pytest.raises(WeightSyncError, match="canaries differ .* a cache survived the update"):
        rig.sync()
    assert rig.engine._cache is current, "the cache is a new one: nothing stale was read"


def test_no_generation_before_the_first_sync(folder):
    rig = Rig(folder)
    with pytest.raises(RuntimeError, match="no weights yet"):
        generate(rig.engine, [Group([5], [1])], SamplingParams(2))


def test_shared_weights_are_proven_by_their_addresses(folder, monkeypatch):
    rig = Rig(folder, shared=True)
    monkeypatch.setattr(sync_proof, "fingerprints", None)  # would raise
    for _ in range(3):
        rig.learn()
        rig.sync()
    rig.engine.model = copy.deepcopy(rig.engine.model)
    with pytest.raises(WeightSyncError, match="model.embed_tokens.weight is not shared"):
        rig.sync()


def test_a_shared_copy_is_compared_with_the_weights(folder):
    rig = Rig(folder, bf16=True, shared=True)
    rig.sync()
    rig.learn()
    assert rig.sync()
    with torch.no_grad():
        rig.prepared.model.hf_model.model.layers[1].mlp.up_proj._parameters["weight"].mul_(2)
    with pytest.raises(WeightSyncError, match=r"layers.1.mlp.up_proj.weight \(layer 1\) was not rounded again"):
        rig.sync()


def test_a_weight_that_cannot_be_read_is_left_to_the_canaries(folder, monkeypatch):
    monkeypatch.setattr(HFEngine, "weight_dtypes", lambda self: {
        name: p.dtype for name, p in self.model.named_parameters() if name != TARGET})  # yapf: disable
    rig = Rig(folder)
    rig.sync()
    rig.learn(0.03)
    break_sync(rig.engine, "transposed")
    with pytest.raises(WeightSyncError, match="every comparable weight equals"):
        rig.sync()


@pytest.mark.parametrize("take", [lambda stream: None, lambda stream: next(iter(stream))], ids=["not begun", "cut off"])
def test_merged_weights_that_the_engine_did_not_take(folder, take):
    """The last fingerprints of the stream, and all that the engine has, are those of the previous sync."""
    rig = Rig(folder, "fingerprint", lora_rank=2)
    rig.sync()
    rig.learn()
    rig.engine.update_weights = lambda stream, version: take(stream)
    with pytest.raises(WeightSyncError, match="did not read the stream of weights to its end"):
        rig.sync()


def test_lora_is_proven_merged(folder):
    rig = Rig(folder, "fingerprint", lora_rank=2)
    rig.sync()
    rig.learn()
    break_sync(rig.engine, "scaled")
    with pytest.raises(WeightSyncError, match=re.escape(TARGET)):
        rig.sync()


def test_its_time_is_booked_apart_and_the_model_stays_as_it_was(folder):
    rig = Rig(folder)
    rig.prepared.model.train()
    state = torch.get_rng_state()
    rig.sync()
    assert rig.prepared.model.training and torch.equal(torch.get_rng_state(), state)
    assert rig.timer.metrics()["time/sync_proof_s"] > 0
    assert Rig(folder, "off").proof is None


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_right_syncs_pass(family, bf16, tmp_path, monkeypatch):
    """20 updates of every family: no false alarm."""
    monkeypatch.setitem(tiny.FAMILIES, "qwen3_moe", ("qwen3_moe", MOE))
    name, changes = FAMILIES[family]
    tiny.save_model(tmp_path, name, initializer_range=0.12, **changes)
    rig = Rig(tmp_path, bf16=bf16, every=5, **({"lora_rank": 2} if family == "lora" else {}))
    rig.version = -1
    gaps = [rig.sync().get("rollout/canary_gap")]
    for _ in range(20):
        rig.learn()
        gaps.append(rig.sync().get("rollout/canary_gap"))
    assert len([gap for gap in gaps if gap is not None]) == 6
    assert len(rig.proof.fingerprints.trainer) == len(list(rig.engine.model.named_parameters())), "some were not read"


def test_two_ranks_stop_together(tmp_path):
    """A whole run under FSDP2: at the second sync the engine of one rank takes over a weight that is off by a factor of
    1.001. In bfloat16 log-probs do not show that (test_first_step_limits)."""
    home = tiny_task.write_home(tmp_path)
    options = tiny_task.OPTIONS | {
        "pretrain": home / "model", "prompt_data": [home / "train.jsonl"], "reward": [home / "reward.py"],
        "save_path": tmp_path / "run", "plugin": "lightrft.tests.support.faulty_sync", "eval_steps": 0,
        "eval_at_start": False, "best_metric": "reward/mean", "bf16": True
    }  # yapf: disable
    run = launch(tmp_path / "cwd", options, 2, FAULTY_SYNC="scaled@1:1")
    run.until("differs between engine and trainer", 60)
    start = time.monotonic()
    codes = run.wait(30)
    assert codes == [1, 1], run.output
    assert time.monotonic() - start < 20
    reported = f"weight sync 1: {TARGET} (layer 1) differs between engine and trainer on rank 1: "
    assert run.output.count(reported) == 1 and "Traceback" not in run.output, run.output


def test_a_run_with_the_proof_is_the_same_run(tmp_path):
    home, found = runs.write_home(tmp_path), {}
    for mode in ("off", "both"):
        options = {"sync_proof": mode, "max_steps": 3, "save_trajectories": True}
        found[mode] = runs.run(home, tmp_path / mode, **options)
    for name, value in found["off"].weights.items():
        assert torch.equal(value, found["both"].weights[name]), name
    assert found["off"].rollout(3) == found["both"].rollout(3)
    assert ["rollout/canary_gap" in line for line in found["both"].lines] == [True, False, False]
