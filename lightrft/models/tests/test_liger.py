"""Liger's kernels, in an environment with Triton; of what they refuse, a package of their name takes their place."""
import sys

import pytest
import torch

from lightrft.config.schema import ModelConfig
from lightrft.models.liger import apply_liger
from lightrft.models.loader import load_actor
from lightrft.tests.support import tiny
from lightrft.tests.support.sglang_environment import FOLDER, in_its_environment, PYTHON
from lightrft.utils.errors import UserError

PATCH = """
calls = []
_apply_liger_kernel_to_instance = lambda *given, **more: calls.append(given)
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
        (folder / "monkey_patch.py").write_text("MODEL_TYPE_TO_APPLY_LIGER_FN = {'qwen2': None}")
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


@pytest.mark.slow
def test_real_kernels_compute_what_transformers_computes():
    """Those of the release that is pinned, in Triton's interpreter; and this library's, of log-probs and of a decode
    step, what float64 does. And those of flash-linear-attention take the arguments that layers give them."""
    files = [f"{FOLDER}/{name}_interpreted.py" for name in ("liger", "head", "attention")]
    files.append("lightrft/models/tests/test_stateful.py::test_the_kernel_takes_the_arguments_of_the_layer")
    code, said = in_its_environment(PYTHON, "-m", "pytest", "-q", "--tb=short", *files, TRITON_INTERPRET="1")
    assert code == 0 and "33 passed" in said, said[-8000:]


@pytest.mark.slow
def test_own_kernels_compile_for_a_gpu():
    """In the types that a GPU takes, and with the memory that programs share on any."""
    code, said = in_its_environment(PYTHON, f"{FOLDER}/compiled_kernels.py")
    assert code == 0 and "5 compiled" in said, said[-8000:]


def test_a_family_without_kernels_runs_as_it_is(liger, capsys):
    liger(PATCH)
    apply_liger(tiny.model("llama"))
    assert not sys.modules["liger_kernel.transformers"].calls
    assert "Liger has no kernels for llama: the model's own code is used" in capsys.readouterr().err
