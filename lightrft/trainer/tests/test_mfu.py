"""The utilisation figure against its definition."""
import pytest

from lightrft.trainer.run_log import mfu


def test_mfu_is_six_flops_per_parameter_and_token():
    assert mfu(parameters=10**9, tokens=1000, seconds=2.0, peak_flops=1e13) == pytest.approx(6e12 / 2e13)


def test_mfu_halves_when_the_update_takes_twice_as_long_or_twice_the_ranks():
    one = mfu(10**6, 100, 1.0, 1e10)
    assert mfu(10**6, 100, 2.0, 1e10) == mfu(10**6, 100, 1.0, 2e10) == pytest.approx(one / 2)
