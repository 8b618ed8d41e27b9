"""Liger's kernels need Triton and a GPU: a package of its name takes its place here."""
import sys

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from lightrft.config.schema import ModelConfig
from lightrft.models.liger import apply_liger
from lightrft.models.loader import load_actor
from lightrft.tests.support import tiny
from lightrft.utils.errors import UserError

PATCH = """
calls = []

def _apply_liger_kernel_to_instance(model, **given):
    calls.append((model, given))
    if type(model).__name__ not in {known}:
        raise TypeError("The model must be Gemma3ForCausalLM.")
    model.base_model.norm.in_place = True
"""


def loaded():
    return [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]


@pytest.fixture
def liger(tmp_path, monkeypatch):
    """A function that puts ``source`` in the place of ``liger_kernel.transformers``."""

    def write(source):
        folder = tmp_path / "liger_kernel" / "transformers"
        folder.mkdir(parents=True)
        (tmp_path / "liger_kernel" / "__init__.py").touch()
        (folder / "__init__.py").write_text(source)
        (folder / "monkey_patch.py"
         ).write_text("MODEL_TYPE_TO_APPLY_LIGER_FN = dict.fromkeys(['qwen2', 'mixtral', 'gemma3_text'])")
        monkeypatch.syspath_prepend(tmp_path)
        for name in loaded():
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    yield write
    for name in loaded():  # plans look for the package
        del sys.modules[name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal is for CPU")
@pytest.mark.parametrize(
    "error",
    [ImportError("no module"),
     AttributeError("module 'triton' has no 'jit'"),
     RuntimeError("no active driver")])
def test_broken_kernels_are_an_error_with_the_remedy(error, liger):
    liger(f"raise {error!r}")
    with pytest.raises(UserError, match=f"{type(error).__name__}: .*reinstall them with .*--use_liger false"):
        apply_liger(tiny.model())


def test_a_device_is_needed(tmp_path):
    with pytest.raises(ValueError, match="CUDA"):
        load_actor(ModelConfig(pretrain=str(tiny.save_model(tmp_path)), use_liger=True))


def patched(hf):
    """The model that Liger was given last, and the options."""
    apply_liger(hf)
    return sys.modules["liger_kernel.transformers"].calls[-1]


def test_the_experts_of_a_mixture_keep_their_own_products(liger):
    """Liger's wait for the device in every layer: ``compute_routing_metadata`` of release 0.8.5 reads a size."""
    liger(PATCH.format(known=["Qwen2ForCausalLM", "MixtralForCausalLM"]))
    losses = {"fused_linear_cross_entropy": False, "cross_entropy": False}
    assert patched(tiny.model())[1] == losses
    assert patched(tiny.model("mixtral"))[1] == losses | {"swiglu": False}


def test_a_classifier_that_liger_does_not_know_has_a_decoder_that_it_knows(liger):
    """As release 0.8.5 takes the three classes of Gemma-3."""
    liger(PATCH.format(known=["Gemma3TextModel"]))
    hf = AutoModelForSequenceClassification.from_config(tiny.config("gemma3", num_labels=1))
    assert patched(hf)[0] is hf.base_model


def test_norms_leave_the_gradient_of_their_output_alone(liger):
    """After a norm whose output is added to the residual, as in GLM-4V, the sum gives both the same memory. With the
    real release 0.8.5, whose kernels wrote into it, gradients of a tiny GLM-4V were up to six times their norm off."""
    liger(PATCH.format(known=["Qwen2ForCausalLM"]))
    hf = tiny.model()
    apply_liger(hf)
    assert hf.base_model.norm.in_place is False


def test_a_family_without_kernels_runs_as_it_is(liger, capsys):
    liger(PATCH.format(known=[]))
    apply_liger(tiny.model("llama"))
    assert not sys.modules["liger_kernel.transformers"].calls
    assert "Liger has no kernels for llama: the model's own code is used" in capsys.readouterr().err
