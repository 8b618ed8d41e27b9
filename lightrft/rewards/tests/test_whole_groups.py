"""Functions of lists: one event loop for all calls of a worker, and whole groups in each call."""
from pathlib import Path

import pytest

from lightrft.rewards.base import RewardInput, REWARDS
from lightrft.tests.support import field

COMPARES = Path(field.__file__).parent / "rewards" / "compares_async.py"
GROUPS = [RewardInput(prompt, "x" * length) for prompt in "pq" for length in (1, 4, 2, 3)]
LONGEST = [0.0, 1.0, 0.0, 0.0] * 2

SYNC = """
def lists(texts):
    if any("bad" in text for text in texts):
        raise KeyError("bad")
    return [float(len(text) == max(map(len, texts))) for text in texts]


"""
COMPARING = {
    "reward_func": "def f(queries, prompts, labels):\n    return lists([q[1:] for q in queries])\n",
    "async reward_func": "async def f(queries, prompts, labels):\n    return lists([q[1:] for q in queries])\n",
    "completions": "def f(completions, **columns):\n    return lists(completions)\n",
    "compute_score of lists": "def compute_score(data_sources, solution_strs, ground_truths, extra_infos=None):\n"
                              "    return [{'score': x, 'n': len(e)} for x, e in zip(lists(solution_strs), "
                              "extra_infos)]\n",
}  # yapf: disable


@pytest.fixture
def file_of(tmp_path):
    """Write a reward file; return its path."""

    def write(source):
        file = tmp_path / "mine.py"
        file.write_text(source)
        return file

    return write


def outcomes(manager, items):
    return [(score.total, score.error) for score in manager.score(items)]


def test_an_async_reward_with_a_semaphore_of_the_module_compares_each_group_in_every_call(make_manager):
    """Each call is a step of training."""
    manager = make_manager(COMPARES)
    for _ in range(3):
        assert [score.total for score in manager.score(GROUPS[:4])] == LONGEST[:4]


@pytest.mark.parametrize("form", COMPARING)
def test_a_batch_that_raises_is_tried_by_groups_and_never_in_parts(make_manager, file_of, caplog, form):
    manager = make_manager(file_of(SYNC + COMPARING[form]))
    spoilt = [*GROUPS[:3], RewardInput("p", "bad"), *(RewardInput("q", item.response) for item in GROUPS[4:])]
    assert outcomes(manager, spoilt) == [(None, "exception")] * 4 + [(value, None) for value in LONGEST[4:]]
    logged = [record.getMessage() for record in caplog.records if "left unscored" in record.getMessage()]
    assert len(logged) == 1 and "all 4 responses of the group" in logged[0] and "Remedy: let it return" in logged[0]
    assert logged[0].count(", line ") == 2 and "lists" in logged[0], "the frames are the user's"


def test_a_registered_reward_of_reward_inputs_may_be_async_and_gets_whole_groups(make_manager):

    async def longest(batch):
        if any(item.response == "bad" for item in batch):
            raise KeyError("bad")
        return [float(len(item.response) == max(len(other.response) for other in batch)) for item in batch]

    REWARDS.register("longest_for_test")(longest)
    items = [*GROUPS[:4], RewardInput("q", "bad")]
    assert outcomes(make_manager("longest_for_test"),
                    items) == [(value, None) for value in LONGEST[:4]] + [(None, "exception")]


@pytest.mark.parametrize("body", ["time.sleep(60)", "os._exit(3)"])
def test_a_group_that_hangs_or_kills_its_worker_is_not_called_in_parts(make_manager, file_of, body):
    manager = make_manager(
        file_of(f"import os, time\n{SYNC}def f(prompts, completions):\n    if 'bye' in completions:\n        {body}\n"
                "    return lists(completions)\n"), reward_timeout_s=2.0, response_faults=["timeout", "worker_died"])
    items = [*GROUPS[:3], RewardInput("p", "bye"), *GROUPS[4:]]
    expected = "timeout" if "sleep" in body else "worker_died"
    assert outcomes(manager, items) == [(None, expected)] * 4 + [(value, None) for value in LONGEST[4:]]


def test_a_group_larger_than_a_call_is_one_call(make_manager, file_of):
    manager = make_manager(
        file_of("def f(completions, **columns):\n    return [len(completions)] * len(completions)\n"), reward_workers=2)
    items = [RewardInput("p", "x")] * 130 + [RewardInput("q", "x")] * 3 + [RewardInput("q", "x", media=("m", ))] * 70
    assert [score.total for score in manager.score(items)] == [130.0] * 130 + [3.0] * 3 + [70.0] * 70


LOOP = """
import asyncio
loop, seen, left = asyncio.get_event_loop(), set(), asyncio.Event()


async def endless(file):
    try:
        await asyncio.sleep(600)
    finally:
        open(file, "a").write("cleaned up ")


async def f(completions, **columns):
    seen.add(id(asyncio.get_running_loop()))
    task = asyncio.create_task(endless({file!r}))
    left.task = task
    await asyncio.sleep(0)
    if completions[0] == "raise":
        raise KeyError
    return [float(len(seen) == 1 and asyncio.get_running_loop() is loop)]
"""


def test_the_loop_is_that_of_the_import_for_the_whole_life_of_the_worker_and_closed_with_it(
        make_manager, file_of, tmp_path):
    """A client may be made at import, and be closed at the end; tasks of a call that raised end at once."""
    log = tmp_path / "log"
    manager = make_manager(file_of(LOOP.replace("{file!r}", repr(str(log)))))
    texts = ("a", "b", "raise", "c")
    totals = [manager.score([RewardInput("p", text)])[0].total for text in texts]
    assert totals == [1.0, 1.0, None, 1.0] and log.read_text() == "cleaned up "
    manager.shutdown()
    assert log.read_text() == "cleaned up " * 4
