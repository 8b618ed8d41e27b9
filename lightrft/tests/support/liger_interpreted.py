"""Liger's own kernels, which Triton's interpreter runs on a CPU, against transformers' modules: logits and gradients.

For an environment with Triton and liger-kernel; :mod:`lightrft.models.tests.test_liger` runs it there, with
``TRITON_INTERPRET=1``.
"""
from importlib import import_module

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification
from triton.language.extra import libdevice
from triton.runtime import interpreter

from lightrft.models.liger import apply_liger
from lightrft.tests.support import tiny, tiny_vision

IDS = torch.arange(4, 10)[None]
convert = interpreter._implicit_cvt


@triton.jit
def rsqrt(x):
    """1 / sqrt(x); the function of the CUDA library is empty in the interpreter."""
    return 1 / tl.sqrt(x)


@triton.jit
def tanh(x):
    """The hyperbolic tangent, likewise."""
    return 2 * tl.sigmoid(2 * x) - 1


def converted(argument):
    """Pass a number to a kernel as a compiled kernel gets it: the interpreter leaves floats as they are."""
    if not isinstance(argument, float):
        return convert(argument)
    return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)


libdevice.rsqrt, libdevice.tanh, interpreter._implicit_cvt = rsqrt, tanh, converted
import_module("liger_kernel.transformers.monkey_patch")  # it takes these functions


@pytest.fixture(autouse=True)
def fixture_device(monkeypatch):
    """A device is asked for; Liger has been imported without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def with_kernels(hf):
    """A copy of a model that computes with Liger's kernels."""
    copy = type(hf)(hf.config).eval()
    copy.load_state_dict(hf.state_dict())
    apply_liger(copy)
    return copy


def results(hf):
    """Logits, and the gradients of a sum of their squares, by name."""
    logits = hf(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
    logits.square().sum().backward()
    return {"logits": logits.detach()
            } | {name: weight.grad for name, weight in hf.named_parameters() if weight.grad is not None}


def replaced(hf):
    """The classes of modules whose ``forward`` is not their own -> the class that has it."""
    return {
        type(module).__name__: module.forward.__qualname__.split(".")[0] for module in hf.modules()
        if module.forward.__func__ is not type(module).forward
    }


def agree(hf):
    """Compare a model with its copy that has the kernels; return what was replaced."""
    copy = with_kernels(hf)
    torch.testing.assert_close(results(copy), results(hf), rtol=1e-4, atol=1e-4)
    return replaced(copy)


def test_norms_and_mlps():
    assert agree(tiny.model("qwen2")) == {"Qwen2RMSNorm": "LigerRMSNorm", "Qwen2MLP": "LigerSwiGLUMLP"}


def test_the_experts_of_a_mixture_keep_their_own_products():
    """Liger's wait for the device in every layer: ``compute_routing_metadata`` of release 0.8.5 reads a size."""
    assert agree(tiny.model("mixtral")) == {"MixtralRMSNorm": "LigerRMSNorm"}


def test_a_classifier_that_liger_does_not_know_has_a_decoder_that_it_knows():
    """Release 0.8.5 takes three classes of Gemma-3."""
    hf = AutoModelForSequenceClassification.from_config(tiny.config("gemma3", num_labels=1)).eval()
    assert agree(hf) == {"Gemma3RMSNorm": "LigerRMSNorm", "Gemma3MLP": "LigerGEGLUMLP"}


def test_norms_leave_the_gradient_of_their_output_alone(tmp_path):
    """GLM-4V adds the output of a norm to the residual: the sum gives both the same memory. Kernels of release 0.8.5
    that wrote into it had gradients that were up to six times their norm off."""
    hf = AutoModelForImageTextToText.from_pretrained(tiny_vision.save_model(tmp_path, "glm4v", tied=False)).eval()
    assert agree(hf)["Glm4vRMSNorm"] == "LigerRMSNorm"
