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


class Device:
    """A device that needs ``work`` seconds for what the host queues, one piece after the other."""

    def __init__(self, clock):
        self.clock, self.free_at, self.waits = clock, 0.0, 0

    def queue(self, seconds):
        self.free_at = max(self.free_at, self.clock.now) + seconds

    def event(self):
        return DeviceEvent(self)


class DeviceEvent:

    def __init__(self, device):
        self.device = device

    def record(self):
        self.at = max(self.device.free_at, self.device.clock.now)

    def synchronize(self):
        self.device.waits += 1
        self.device.clock.now = max(self.device.clock.now, self.at)

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


def test_a_span_ends_with_the_work_of_the_device():
    """The host queues forward and backward in no time; the phases still are what the device needs, and add up."""
    clock = Clock()
    device, timer = Device(clock), Timer(clock=clock)
    timer.follow(device.event)
    for step in range(2):
        with timer("forward"):
            clock.now += 0.25
            device.queue(2.0)
        with timer("backward"):
            device.queue(4.0)
            with timer("reward"):
                clock.now += 0.5  # on the host, while the device works
        with timer("log"):
            clock.now += 8.0  # the device has long been done
        waits = device.waits
        found = timer.metrics()
        assert device.waits == waits + 1, "the host waits where seconds are read, and nowhere else"
        assert found["time/forward_s"] == pytest.approx(2.25) and found["time/backward_s"] == pytest.approx(4.0)
        assert found["time/reward_s"] == 0.0 and found["time/log_s"] == pytest.approx(2.5)
        spans = sum(value for name, value in found.items() if name != "time/step_s")
        assert spans == pytest.approx(found["time/step_s"]) == pytest.approx(8.75)


def test_a_timer_may_follow_the_device_later():
    clock = Clock()
    device, timer = Device(clock), Timer(clock=clock)
    with timer("load"):
        clock.now = 3.0
        timer.follow(device.event)
        device.queue(1.0)
    assert timer.seconds("load") == pytest.approx(4.0)
