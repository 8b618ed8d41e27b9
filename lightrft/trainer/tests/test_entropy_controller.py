"""Fixed and adaptive coefficients of the entropy bonus, alone and in a run."""
import math

import pytest

from lightrft.config.schema import AlgorithmConfig
from lightrft.tests.support import runs
from lightrft.trainer.controllers import EntropyController, get_entropy_controller

no_picture = runs.no_picture

TARGET = {"entropy_target": 0.2, "entropy_step": 1e-4, "entropy_coef_max": 0.005}


def test_fixed_without_a_target():
    controller = get_entropy_controller(AlgorithmConfig(entropy_coef=0.1))
    controller.update(5.0)
    assert controller.coef == 0.1


def test_reference_numbers():
    controller = get_entropy_controller(AlgorithmConfig(**TARGET))
    assert controller.coef == 0.0
    for entropy, value, active in zip((.25, .19, .15, .21, .1), (0, 1e-4, 2e-4, 1e-4, 2e-4), (0, 1, 1, 0, 1)):
        controller.update(entropy)
        assert controller.value == pytest.approx(value, abs=1e-12) and controller.active == active
        assert controller.coef == pytest.approx(value * active, abs=1e-12)


def test_it_stays_in_its_range_and_at_the_target():
    controller = EntropyController(0.0049, 0.2, 1e-3, 0.005)
    assert controller.coef == 0.0, "off until an entropy was measured"
    for entropy, value in ((0.1, 0.005), (0.1, 0.005), (0.2, 0.005), (0.3, 0.004)):
        controller.update(entropy)
        assert controller.value == pytest.approx(value) and controller.active == (entropy <= 0.2)


@pytest.mark.parametrize("entropy", [math.nan, math.inf])
def test_the_entropy_of_a_skipped_step_changes_nothing(entropy):
    controller = EntropyController(0.001, 0.2)
    controller.update(0.1)
    before = controller.state_dict()
    controller.update(entropy)
    assert controller.state_dict() == before


def test_state_goes_on():
    first, second = EntropyController(0.0, 0.2), EntropyController(0.0, 0.2)
    first.update(0.1)
    second.load_state_dict(first.state_dict())
    assert second.coef == first.coef != 0
    fixed = EntropyController(0.3)
    fixed.load_state_dict(EntropyController(0.0, 0.2).state_dict())
    assert fixed.coef == 0.3, "the option has no effect on a resumed run"


def test_a_run_adapts_the_bonus_and_resumes_it(home, tmp_path):
    """Target above the entropy: the bonus grows, from the second step on."""
    options = {"entropy_target": 50.0, "entropy_step": 0.05, "entropy_coef_max": 0.12, "disable_ckpt": False,
               "save_steps": 1, "async_save": False}  # yapf: disable
    straight = runs.run(home, tmp_path / "a", max_steps=4, **options)
    coefs = [line["policy/entropy_coef"] for line in straight.lines]
    assert coefs == pytest.approx([0, 0.05, 0.1, 0.12])
    runs.run(home, tmp_path / "b", max_steps=2, **options)
    resumed = runs.run(home, tmp_path / "b", max_steps=4, load_checkpoint=True, **options)
    assert [line["policy/entropy_coef"] for line in resumed.lines] == coefs
    assert all((value == straight.weights[name]).all() for name, value in resumed.weights.items())


def test_above_the_target_there_is_no_bonus(home, tmp_path):
    options = {"entropy_target": 0.01, "entropy_coef": 0.005, "max_steps": 3}
    low, none = (runs.run(home, tmp_path / name, **values)
                 for name, values in (("a", options), ("b", {"max_steps": 3, "drop_zero_advantage": False})))
    assert [line["policy/entropy_coef"] for line in low.lines] == [0, 0, 0]
    assert low.metrics["policy/entropy"] > 0.01 and "policy/entropy_coef" not in none.metrics
    assert all((value == none.weights[name]).all() for name, value in low.weights.items())
