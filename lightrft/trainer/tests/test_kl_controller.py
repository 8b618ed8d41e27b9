"""Fixed and adaptive KL coefficients."""
import math

import pytest

from lightrft.config.schema import AlgorithmConfig
from lightrft.trainer.controllers import KLController, get_kl_controller


def test_fixed_without_a_target():
    controller = get_kl_controller(AlgorithmConfig(init_kl_coef=0.1))
    controller.update(5.0, 1000)
    assert controller.value == 0.1


@pytest.mark.parametrize("kl,factor", [(0.1, 1.0), (0.11, 1 + 0.1 * 64 / 1000), (9.0, 1 + 0.2 * 64 / 1000),
                                       (0.0, 1 - 0.2 * 64 / 1000), (0.09, 1 - 0.1 * 64 / 1000)])
def test_moves_towards_the_target_by_at_most_a_fifth_of_the_horizon(kl, factor):
    controller = get_kl_controller(AlgorithmConfig(init_kl_coef=0.5, kl_target=0.1, kl_horizon=1000))
    controller.update(kl, 64)
    assert controller.value == pytest.approx(0.5 * factor)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_the_kl_of_a_skipped_step_does_not_poison_the_coefficient(kl):
    controller = KLController(0.5, 0.1, 1000)
    controller.update(kl, 64)
    assert controller.value == 0.5


def test_state_goes_on():
    first, second = KLController(0.5, 0.1, 100), KLController(0.1, 0.1, 100)
    first.update(1.0, 10)
    second.load_state_dict(first.state_dict())
    assert second.value == first.value != 0.5
    fixed = KLController(0.3)
    fixed.load_state_dict(first.state_dict())
    assert fixed.value == 0.3, "the option has no effect on a resumed run"
