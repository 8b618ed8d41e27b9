"""Families of models and experts of a MoE in SGLang, the real one on a CPU, which keeps as one tensor what checkpoints
have in pieces.

For an environment with SGLang, as :mod:`lightrft.tests.support.sglang_engine`.
"""
import multiprocessing

import pytest

from lightrft.rollout import SamplingParams
from lightrft.tests.support import tiny
from lightrft.tests.support.engine_rig import EXACT, NEW, names_faults_of_experts, requests
from lightrft.tests.support.gpu_measurements import check_piece, piece
from lightrft.tests.support.sglang_rig import SIZES, Rig, forked, verifier
from lightrft.utils.errors import UserError

GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
FAMILIES = {  # SGLang's Mistral is its Llama; sglang_vision has Qwen3
    "mistral": ("mistral", {"head_dim": 32}),
    "gemma": ("gemma", {"head_dim": 32, "hidden_act": "gelu_python"}),  # SGLang takes no notice of this function's name
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": None}), "gemma3": ("gemma3_text", GEMMA)
}  # yapf: disable
MOE = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def started(folder, monkeypatch, tied):
    monkeypatch.setitem(tiny.FAMILIES, "moe", ("qwen3_moe", MOE | {"tie_word_embeddings": tied}))
    with forked():
        return Rig(tiny.save_model(folder, "moe", **SIZES))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_a_family_arrive(family, tmp_path, monkeypatch):
    """Each in an engine of its own, before and after all weights changed. All of them can be read back, but for norms
    of Gemma 1, to which SGLang adds 1."""
    monkeypatch.setitem(tiny.FAMILIES, family, FAMILIES[family])
    with forked():
        rig = Rig(tiny.save_model(tmp_path, family, **SIZES))
    rig.proof = verifier(rig.cfg, rig.strategy, rig.prepared, rig.engine)
    for _ in range(2):
        assert rig.sync() < 1e-5
        mean, largest = rig.gap(requests(1), SamplingParams(NEW))
        assert mean < EXACT and largest < 2e-5, (mean, largest)
        rig.learn()
    read = {name for name in rig.engine.weights.shapes if family != "gemma" or "norm" not in name}
    assert set(rig.engine.weight_dtypes()) == read == set(rig.proof.fingerprints.trainer)
    rig.engine.shutdown()


def test_experts_arrive_and_a_wrong_one_is_named(tmp_path, monkeypatch):
    rig = started(tmp_path, monkeypatch, tied=False)
    rig.proof = verifier(rig.cfg, rig.strategy, rig.prepared, rig.engine)
    for _ in range(2):
        assert rig.sync() < 1e-5
        mean, largest = rig.gap(requests(1), SamplingParams(NEW))
        assert mean < EXACT and largest < 2e-5, (mean, largest)
        rig.learn()
    assert set(rig.engine.weight_dtypes()) == set(rig.engine.weights.shapes) == set(rig.proof.fingerprints.trainer)
    names_faults_of_experts(rig)
    rig.engine.shutdown()


def test_a_weight_that_the_trainer_does_not_send(tmp_path, monkeypatch):
    """SGLang gives a Qwen3-MoE a separate head, although it is tied."""
    before = multiprocessing.active_children()
    with pytest.raises(UserError, match="SGLang has lm_head.weight, for which the trainer sends no weight: it would"):
        started(tmp_path, monkeypatch, tied=True)
    assert multiprocessing.active_children() == before


def test_what_make_gpu_measures(tmp_path):
    """Steps and the life of an engine, in the reduced form; here, because this process has imported SGLang."""
    one, options = piece(tmp_path / "piece", "run-sglang-0.5b")
    from benchmarks.gpu.child import main
    with forked():
        main([word for name, value in options.items() for word in (f"--{name}", value)])
    check_piece(tmp_path / "piece", one)
