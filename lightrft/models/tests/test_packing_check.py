"""A small copy of a model shows at load whether it runs on packed sequences."""
import re
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightrft.models.architectures import modality_of
from lightrft.models import actor_modality, packing_check
from lightrft.models.packing_check import Gap, packing_fault, packing_gap
from lightrft.tests.support import tiny
from lightrft.utils.errors import UserError

ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 9.0, 20.0],
        "original_max_position_embeddings": 64, "factor": 8.0}  # yapf: disable
REFUSED = {
    "falcon": {}, "gptj": {"n_layer": 2, "n_embd": 64, "n_head": 4, "rotary_dim": 8}, "bloom": {},
    "bart": {"is_decoder": True, "is_encoder_decoder": False},
    "marian": {"is_decoder": True, "is_encoder_decoder": False}, "bert-generation": {}, "gpt_oss": {},
    "codegen": {}, "rwkv": {}, "xlstm": {}, "reformer": {"is_decoder": True}
}  # yapf: disable
ACCEPTED = {
    "qwen2": {}, "gpt2": {}, "cohere": {}, "qwen3_moe": {"num_experts": 8}, "stablelm": {},
    "nemotron": {"num_key_value_heads": 8},
    "phi3": {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": ROPE},
    "llama": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    "granite": {}, "gemma3n_text": {}, "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}
}  # yapf: disable
if Version(transformers.__version__) >= Version("5.24"):  # their attention is that of all others
    ACCEPTED |= {kind: REFUSED.pop(kind) for kind in ("codegen", "gptj")}
PAGE = Path(__file__).parents[3] / "docs" / "families.md"


@pytest.mark.parametrize("kind", REFUSED)
def test_wrong_families_are_refused_by_name(kind):
    with pytest.raises(UserError, match=f"'somewhere'.*model type '{kind}'.*(alone|packed).*; give a decoder-only"):
        modality_of(AutoConfig.for_model(kind, **REFUSED[kind]), "somewhere")


@pytest.mark.parametrize("kind", ACCEPTED)
def test_right_families_are_not(kind):
    assert packing_fault(AutoConfig.for_model(kind, **ACCEPTED[kind])) == ""


def test_a_copy_has_a_layer_of_each_kind_and_limits_that_one_sequence_crosses():
    small = packing_check.cut(AutoConfig.for_model("gemma3_text", num_hidden_layers=12))
    assert small.layer_types == ["sliding_attention", "full_attention"] and small.num_hidden_layers == 2
    assert small.sliding_window < min(packing_check.LENS) and small.hidden_size < 2304 and small.vocab_size < 100
    wide = packing_check.cut(AutoConfig.for_model("gemma4_text", num_hidden_layers=12))
    assert [layer.head_dim for layer in wide.per_layer_config] == [256, 512], "wider heads of full attention"
    shared = packing_check.cut(AutoConfig.for_model("gemma3n_text"))  # its last layers have no keys of their own
    assert 0 < shared.num_kv_shared_layers < shared.num_hidden_layers == len(shared.layer_types)
    long, dynamic = (packing_check.cut(AutoConfig.for_model(kind, **ACCEPTED[kind])) for kind in ("phi3", "llama"))
    first, second, _ = packing_check.LENS
    assert first < long.rope_parameters["original_max_position_embeddings"] < second
    assert first < dynamic.max_position_embeddings < second


@pytest.mark.skipif(not PAGE.exists(), reason="installed without its repository")
def test_the_page_has_the_families_of_this_release():
    """And their verdicts, as far as tests know them. Of a family with an encoder, the page has the decoder."""
    trains, release = {}, ".".join(transformers.__version__.split(".")[:2])
    for title, section in re.findall(r"^## Transformers (\S+)$(.*?)(?=^## )", PAGE.read_text(),
                                     re.MULTILINE | re.DOTALL):
        for count, verdict, kinds in re.findall(r"^\| (\d+) (train|refused): .* \| (`.*`) \|$", section, re.MULTILINE):
            row = re.findall(r"`([^`]+)`", kinds)
            assert len(row) == int(count)
            trains |= dict.fromkeys(row, verdict == "train")
        if title == release:
            break
    else:
        pytest.skip(f"the page has no table of transformers {release}")
    assert set(trains) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert {kind for kind in {**ACCEPTED, **REFUSED} if trains[kind]} == {*ACCEPTED, "bert-generation"}


def test_a_family_without_a_small_copy_is_refused(monkeypatch):
    """A config that its family cannot build, and one that cannot be cut; a small one of the latter is tried whole."""
    with pytest.raises(
            UserError, match="'dots1' cannot be checked on packed sequences: no small copy of its config "
            r"runs in the code of transformers \(TypeError: .*; give a decoder-only"):
        modality_of(AutoConfig.for_model("dots1"), "somewhere")
    monkeypatch.setattr(packing_check, "cut", lambda config, heads: {}["cut"])
    small = tiny.config("qwen2", vocab_size=301)
    assert packing_fault(small) == ""
    small.vocab_size = 10**7
    assert "KeyError" in packing_fault(small)


def test_the_folder_of_a_config_does_not_count(monkeypatch):
    """The model that a run exports is that which it has loaded."""
    modality_of(tiny.config("qwen2", vocab_size=302), "somewhere")
    monkeypatch.setattr(packing_check, "packing_gap", lambda config: {}["tried again"])
    assert packing_fault(tiny.config("qwen2", vocab_size=302, name_or_path="elsewhere")) == ""


def test_rounding_is_measured_in_the_code_of_the_family():
    """Not in the pack: positions that are wrong by one are no rounding, in a family that rounds coarsely either."""
    gap = packing_gap(AutoConfig.for_model("hrm_text"))
    assert 2e-5 < gap.packed <= 4 * gap.rounding < 1e-2 and gap.is_rounding
    assert not gap._replace(packed=0.1).is_rounding and not Gap(3e-5, 0.0).is_rounding


SCALED = {"granite": {"logits_scaling": 3.0}, "falcon_h1": {"lm_head_multiplier": 3.0},
          "hyperclovax": {"logits_scaling": 3.0}, "cohere": {"logit_scale": 3.0}}  # yapf: disable


@pytest.mark.parametrize("kind", SCALED)
def test_logits_that_the_head_does_not_scale_are_seen(kind, monkeypatch):
    """Each family has a factor of its own, which is 1 in the default config of some."""
    assert packing_fault(AutoConfig.for_model(kind, **SCALED[kind])) == ""
    monkeypatch.setattr(actor_modality, "_scale", lambda config: 1.0)
    with pytest.raises(UserError, match=kind):
        modality_of(AutoConfig.for_model(kind, bos_token_id=2, **SCALED[kind]), "somewhere")


def test_nothing_else_changes():
    """Neither random numbers nor defaults, also within a context of another device."""
    state, config = torch.get_rng_state(), tiny.config("qwen2", vocab_size=300, rms_norm_eps=3e-6)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert packing_fault(config) == ""
            assert torch.empty(1).is_meta and torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state) and config.vocab_size == 300
