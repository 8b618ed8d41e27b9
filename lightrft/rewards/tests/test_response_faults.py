"""Responses that are to blame for the failure of their reward: 0 instead of unscored."""
import pytest

from lightrft.rewards.base import RewardInput
from lightrft.rewards.timeouts import GroupBudget, NOT_TRIED, RewardBudget

PROGRAM = """
import asyncio, os, time
{fault}

def check(text):
    if text == "fault":
        raise ResponseFault("no program")
    if text == "bug":
        raise KeyError("bug")
    if text == "crash":
        os._exit(3)
    if text == "hang":
        time.sleep(60)
    return float(text == "right")


def compute_score(data_source, solution_str, ground_truth):
    return check(solution_str)


async def lists(completions, **columns):
    async def one(text):
        return check(text)
    return await asyncio.gather(*map(one, completions), return_exceptions=True)


def raising(completions, **columns):
    return [check(text) for text in completions]
"""
IMPORTED, OWN = "from lightrft import ResponseFault", "class ResponseFault(ValueError):\n    pass"
TEXTS = ("right", "wrong", "fault", "bug")


@pytest.fixture
def score(make_manager, tmp_path):
    """Score responses to one prompt with a function of the program: (total, error, fault) of each."""

    def run(texts, function="compute_score", fault=OWN, **options):
        file = tmp_path / "program.py"
        file.write_text(PROGRAM.replace("{fault}", fault))
        manager = make_manager(f"{file}:{function}", **options)
        scores = manager.score([RewardInput("p", text) for text in texts])
        return [(one.total, one.error, one.fault) for one in scores]

    return run


@pytest.mark.parametrize("fault", [IMPORTED, OWN])
@pytest.mark.parametrize("function", ["compute_score", "lists"])
def test_a_response_fault_is_0_and_any_other_exception_is_unscored(score, caplog, function, fault):
    """A function of lists returns the exception in the place of the number."""
    expected = [(1.0, None, None), (0.0, None, None), (0.0, None, "response_fault"), (None, "exception", None)]
    assert score(TEXTS, function, fault) == expected
    assert "is to blame and got 0 by reward " + function in caplog.text and "no program" in caplog.text


def test_a_function_of_lists_that_raises_it_says_nothing_about_the_others(score):
    assert score(TEXTS[:3], "raising") == [(None, "exception", None)] * 3
    assert score(["fault"], "raising") == [(0.0, None, "response_fault")], "a group of one"


@pytest.mark.parametrize("faults", ["timeout", "worker_died"])
def test_time_outs_and_dead_workers_are_unscored_unless_the_option_names_them(score, faults):
    crash, hang = ((0.0, None, cause) if cause == faults else (None, cause, None)
                   for cause in ("worker_died", "timeout"))
    expected = [(1.0, None, None), crash, hang, (0.0, None, None)]
    assert score(("right", "crash", "hang", "wrong"), reward_timeout_s=1.0, response_faults=[faults]) == expected


def test_a_response_is_to_blame_only_if_it_had_all_of_the_time():
    """Without the option a group that always hangs gets less time. What was not tried is to blame for nothing."""
    group = GroupBudget(RewardBudget(10.0, patient=True))
    group.timeouts = 20
    assert group.deadline_s() == 10.0 and not NOT_TRIED.fault
    group.reward.lose(80.0)
    assert group.deadline_s() == 0.0, "the reward is given up"
