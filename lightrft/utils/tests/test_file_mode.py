"""Files have the mode that the umask says, whoever writes them."""
import ast
import os
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightrft.tests.support.launch import ROOT
from lightrft.utils.file_mode import give_modes, save_tensors


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def umask(request):
    """The umask of this process, which the test changes."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(file):
    return stat.S_IMODE(file.stat().st_mode)


def test_the_umask_decides(tmp_path, umask):
    save_tensors({"a": torch.ones(2)}, tmp_path / "own.safetensors", {"format": "pt"})
    assert load_file(tmp_path / "own.safetensors")["a"].equal(torch.ones(2))
    assert mode(tmp_path / "own.safetensors") == 0o666 & ~umask
    save_file({"a": torch.ones(2)}, tmp_path / "other.safetensors")
    (tmp_path / "other.safetensors").chmod(0o600)
    give_modes(tmp_path)
    assert {mode(file) for file in tmp_path.iterdir()} == {0o666 & ~umask} and len([*tmp_path.iterdir()]) == 2


def test_tensors_are_written_by_one_function():
    """Also no temporary file with a mode of its own."""
    for file in (ROOT / "lightrft").rglob("*.py"):
        text = file.read_text()
        if "tests" in file.parts or not any(word in text for word in ("save_file", "mkstemp", "NamedTemporary")):
            continue
        names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        assert file.name == "file_mode.py" or not names & {"save_file", "mkstemp", "NamedTemporaryFile"}, file
