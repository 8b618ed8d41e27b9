"""Learning-rate factors: warm-up, shapes and ends."""
import pytest

from lightrft.config.schema import TrainConfig
from lightrft.trainer.optimizer_step import lr_schedule, schedule_of


def factors(*args, steps):
    schedule = lr_schedule(*args)
    return [schedule(step) for step in range(steps)]


def test_warm_up_is_linear_and_never_zero():
    assert factors("constant", 10, 0.3, 0.0, steps=5) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert factors("constant", 10, 0.0, 0.0, steps=3) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("total,ratio,steps", [(100, 0.07, 7), (100, 0.03, 3), (10, 0.01, 1), (10, 0.25, 3)])
def test_warm_up_steps_are_rounded_up_exactly(total, ratio, steps):
    """100 * 0.07 is 7.000000000000001 in floating point."""
    schedule = lr_schedule("constant", total, ratio, 0.0)
    assert schedule(steps - 1) < 1.0 == schedule(steps)


def test_shapes():
    assert factors("linear", 4, 0.0, 0.5, steps=6) == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0])
    cosine = factors("cosine_with_min_lr", 4, 0.0, 0.2, steps=6)
    assert cosine == pytest.approx([1.0, 0.2 + 0.4 * (1 + 2**-0.5), 0.6, 0.2 + 0.4 * (1 - 2**-0.5), 0.2, 0.2])


def test_all_warm_up_and_one_step():
    assert factors("linear", 2, 1.0, 0.0, steps=2) == pytest.approx([1 / 3, 2 / 3])
    assert factors("cosine_with_min_lr", 1, 0.0, 0.1, steps=1) == [1.0]


def test_options_reach_the_schedule():
    cfg = TrainConfig(lr_scheduler="cosine_with_min_lr", lr_warmup_ratio=0.5, lr_min_ratio=0.3)
    schedule = schedule_of(cfg, 4)
    assert [schedule(step) for step in (0, 2, 4)] == pytest.approx([1 / 3, 1.0, 0.3])
