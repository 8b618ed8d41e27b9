"""InternVL, SmolVLM and Gemma-4, whose pictures and videos share a tower or a token, on two ranks."""
import json

import pytest

from lightrft.tests.support import media_families_on_ranks as program, tiny_vision
from lightrft.tests.support.launch import torchrun
from lightrft.tests.support.packages import needs_deepspeed

pytest.importorskip("torchvision")


@needs_deepspeed
@pytest.mark.dist
@pytest.mark.slow
def test_ranks_that_differ_have_the_gradients_of_one_process(tmp_path) -> None:
    """Of pictures and videos on one rank and text on the other, in one start for all families."""
    for name in program.NAMES:
        tiny_vision.save_model(tmp_path / name, name, tied=False)
    printed = torchrun(program.__name__, tmp_path, limit_s=300)
    assert json.loads(printed.splitlines()[-1]) == {"passed": ["fsdp", "zero3"]}
