"""Spans add up and never count a second twice."""
import pytest

from lightrft.utils.timer import Timer


class Clock:

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_nested_spans_are_exclusive_and_sum_up():
    clock = Clock()
    timer = Timer(["eval"], clock)
    clock.now = 1.0
    with timer("rollout"):
        clock.now = 3.0
        with timer("reward"):
            clock.now = 7.0
            with timer("rollout"):
                clock.now = 8.0
        clock.now = 9.0
    clock.now = 9.5
    expected = {
        "time/eval_s": 0.0, "time/rollout_s": 4.0, "time/reward_s": 4.0, "time/other_s": 1.5, "time/step_s": 9.5
    }
    assert timer.metrics() == expected
    assert timer.metrics() == dict.fromkeys(expected, 0.0), "names stay, seconds do not"


def test_the_gauge_is_read_at_the_end_of_every_span():
    timer, readings = Timer(), iter([3.0, 2.0, 5.0, 1.0])
    timer.gauge = lambda: next(readings)
    with timer("rollout"):
        with timer("reward"):
            pass
    with timer("rollout"):
        pass
    levels = {name: value for name, value in timer.metrics().items() if name.startswith("perf/")}
    assert levels == {"perf/mem/reward_gib": 3.0, "perf/mem/rollout_gib": 5.0}


def test_a_span_that_is_open_at_the_end_of_a_step_is_cut():
    clock = Clock()
    timer = Timer(clock=clock)
    with timer("log"):
        clock.now = 2.0
        assert timer.metrics()["time/log_s"] == 2.0
        clock.now = 5.0
        assert timer.seconds("log") == 3.0
    assert timer.metrics() == {"time/log_s": 3.0, "time/other_s": 0.0, "time/step_s": 3.0}


def test_the_phase_changes_with_every_span_and_survives_errors():
    timer = Timer()
    assert timer.current == "idle"
    with timer("update"):
        first = timer.phase()
        assert first.startswith("update")
    with pytest.raises(ValueError), timer("update"):
        assert timer.phase() != first, "a new span is progress"
        raise ValueError
    assert timer.current == "idle"


def test_an_exception_on_its_way_out_is_where_it_was_raised():
    timer = Timer()
    with pytest.raises(KeyError), timer("update"), timer("forward"):
        raise KeyError
    assert timer.phase() == "forward (span 2)"
    with timer("rollout"):
        assert timer.phase() == "rollout (span 3)"
    assert timer.phase() == "idle (span 3)", "an old exception is remembered"
