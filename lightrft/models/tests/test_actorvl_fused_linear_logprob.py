"""ActorVL takes log-probs straight from hidden states: head and log-softmax are one function, in chunks of rows."""
from dataclasses import replace

import pytest
import torch

from lightrft.tests.support import tiny_vision
from lightrft.tests.support.media_rig import MediaRig
from lightrft.tests.support.saved_bytes import saved_bytes

pytest.importorskip("torchvision")
TEMPERATURE = 0.7


@pytest.fixture(name="rig", scope="module")
def rig_fixture(tmp_path_factory):
    family = tiny_vision.FAMILIES["qwen2_5_vl"]
    return MediaRig(family.save(tmp_path_factory.mktemp("model"), tied=False), family.placeholders, family)


def from_logits(rig, exp):
    """Log-probs and entropies [N] of the drawn tokens, from logits [N, V] that exist as a whole."""
    index, hidden = rig.actor.action_hidden_states(exp)
    logprobs = (rig.hf.get_output_embeddings()(hidden).float() / TEMPERATURE).log_softmax(-1)
    chosen = logprobs.gather(-1, exp.token_ids[index, None])[:, 0]
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


def gradients(rig, values):
    """Gradients by name of a weighted sum of log-probs and entropies."""
    logprobs, entropies = values
    weight = torch.linspace(-1, 1, len(logprobs))
    rig.actor.zero_grad(set_to_none=True)
    (logprobs * weight + 0.1 * entropies * weight.flip(0)).sum().backward()
    return {name: parameter.grad for name, parameter in rig.actor.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("chunk_mib", [0, 256], ids=["a row at a time", "at once"])
def test_values_and_gradients_are_those_of_whole_logits(rig, chunk_mib, monkeypatch):
    monkeypatch.setattr(rig.actor, "chunk_mib", chunk_mib)
    exp = rig.pack(rig.samples())
    expected = from_logits(rig, exp)
    fused = [values[exp.loss_mask] for values in rig.actor(exp, temperature=TEMPERATURE, entropy=True)]
    for values, naive in zip(fused, expected):
        torch.testing.assert_close(values, naive, atol=1e-5, rtol=0)
    naive, found = gradients(rig, expected), gradients(rig, fused)
    assert found.keys() == naive.keys() and "model.lm_head.weight" in found
    for name, grad in found.items():
        assert (grad - naive[name]).norm() <= 5e-5 * naive[name].norm() + 1e-5, name


def test_no_logits_are_kept_for_the_backward_pass(rig):
    exp = rig.pack(rig.samples())
    logits = 4 * exp.loss_mask.sum().item() * len(rig.hf.get_output_embeddings().weight)
    states, _ = saved_bytes(rig.actor, lambda: rig.actor.action_hidden_states(exp))
    fused, _ = saved_bytes(rig.actor, lambda: rig.actor(exp, entropy=True))
    whole, _ = saved_bytes(rig.actor, lambda: from_logits(rig, exp))
    assert whole - states > logits > 2 * (fused - states)


@pytest.mark.parametrize("text", ["granite", "cohere"])
def test_a_scaled_head_scales_behind_a_tower_too(text, tmp_path):
    """Of LLaVA-Next around Granite or Cohere, as in vLLM; transformers' own class for both leaves the scale out."""
    family = tiny_vision.FAMILIES["llava_next"]
    given = {"granite": {"logits_scaling": 4.0}, "cohere": {"logit_scale": 0.25, "use_qk_norm": False}}[text]
    own = replace(family, config=family.config | {"text_config": family.config["text_config"] | given
                                                  | {"model_type": text}})  # yapf: disable
    rig = MediaRig(own.save(tmp_path, tied=False), own.placeholders, own)
    samples, head = rig.samples(), rig.hf.get_output_embeddings()
    with torch.no_grad():
        scaled = rig.logprobs(samples)
        assert rig.actor.modality.head(rig.hf).scale == 0.25 and (scaled - rig.plain(samples)).abs().max() > 0.1
        head.weight *= 0.25  # the scale, in the class that has none; the trainer's is taken away
        for name, none in (("logits_scaling", 1.0), ("logit_scale", 1.0)):
            setattr(rig.hf.config.get_text_config(), name, none)
        torch.testing.assert_close(scaled, rig.plain(samples), atol=1e-5, rtol=0)
