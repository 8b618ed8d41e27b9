"""``--overlap_passes`` is refused where it cannot hold, and where there is nothing to overlap."""
import pytest

from lightrft.config.schema import Config
from lightrft.preflight.engine_rules import overlap_problems

LORA = {"init_kl_coef": 0.1, "lora_rank": 4}


def problems(world_size=1, **values):
    config = Config()
    for name, value in {"overlap_passes": True, "train_batch_size": 1024, **values}.items():
        group = next(group for group in vars(config).values() if name in vars(group))
        setattr(group, name, value)
    return list(overlap_problems(config, world_size))


@pytest.mark.parametrize("values,words", [
    ({"dynamic_sampling": True}, "--dynamic_sampling carries groups over"),
    ({"oversample": 1.5}, "--oversample carries groups over"),
    ({"offload_during_rollout": True}, "--offload_during_rollout takes off the device"),
    ({"engine_tp_size": 2, "engine_type": "vllm"}, "--engine_tp_size 2"),
    ({"teacher_offload": True}, "--teacher_offload takes off the device"),
    (LORA, "add --engine_type vllm"),
])
def test_what_contradicts_it(values, words):
    found, = problems(**{"init_kl_coef": 0.1} | values)
    assert found.startswith("--overlap_passes true: ") and words in found


def test_ranks_that_divide_a_tower_agree_on_its_passes():
    found, = problems(2, init_kl_coef=0.1, cache_features=True)
    assert "--cache_features" in found and problems(1, init_kl_coef=0.1, cache_features=True) == []


@pytest.mark.parametrize("values,passes", [
    ({}, False), ({"max_epochs": 2}, True), ({"max_epochs": 2, "rollout_correction": "bypass"}, False),
    ({"train_batch_size": 128}, True), ({"init_kl_coef": 0.1}, True),
    ({"teacher_model": "t"}, True), ({"advantage_estimator": "gae"}, True),
    ({"high_entropy_token_ratio": 0.2}, True), (LORA | {"engine_type": "vllm"}, True),
])  # yapf: disable
def test_it_needs_passes(values, passes):
    assert [text for text in problems(**values) if "has no effect" in text] == problems(**values)
    assert bool(problems(**values)) != passes


def test_without_it_nothing_is_wrong():
    assert problems(overlap_passes=False, dynamic_sampling=True) == [] == problems(2, **LORA)
