"""``--oversample`` beside engines, whose packages need not be installed here; the rest is in problems.py."""
import pytest

from lightrft.config.schema import Config, RolloutConfig
from lightrft.preflight.engine_rules import oversample_problems


@pytest.mark.parametrize("values", [{"engine_tp_size": 2, "use_fire": True}, {"stages": ["no stage"]}])
def test_what_is_no_problem_of_oversampling(values):
    config = Config(rollout=RolloutConfig(oversample=1.25, engine_type="vllm", **values))
    assert not list(oversample_problems(config))
