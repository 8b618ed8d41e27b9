"""``--oversample`` beside engines, whose packages need not be installed here; the rest is in problems.py."""
import re

import pytest

from lightrft.config.oversample_rules import oversample_problems
from lightrft.config.schema import Config, RolloutConfig


@pytest.mark.parametrize("values,words", [
    ({"engine_tp_size": 2}, "--engine_tp_size 2.*nearest valid value: --engine_tp_size 1"),
    ({"use_fire": True}, "--use_fire; use --engine_type hf"),
    ({"stages": ["no stage"]}, ""),
    ({}, ""),
])
def test_engines(values, words):
    config = Config(rollout=RolloutConfig(oversample=1.25, engine_type="vllm", **values))
    found = " ".join(oversample_problems(config))
    assert found.startswith("--oversample 1.25") == bool(words)
    assert re.search(words, found)
