"""Worker processes: they die with their parent, are replaced, and bound what a hanging reward costs."""
import io
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from lightrft.rewards.timeouts import Backlog, GroupBudget, RewardBudget
from lightrft.rewards.base import Outcome, RewardInput
from lightrft.rewards.manager import Handle
from lightrft.rewards.workers import pool as pool_module
from lightrft.rewards.workers.pool import calls
from lightrft.rewards.workers.prints import LabelledLines, MOST_BYTES, MOST_LINES
from lightrft.rewards.workers.worker import _bundles
from lightrft.tests.support.processes import alive, wait_until

PARENT = """
import sys, time
from lightrft.config.schema import RewardConfig
from lightrft.rewards.base import Outcome, RewardInput
from lightrft.rewards.manager import RewardManager
manager = RewardManager(RewardConfig(reward=[sys.argv[1]], reward_timeout_s=60.0))
manager.submit([RewardInput("", "busy")])
time.sleep(0.5)
print(*manager.pool.pids, flush=True)
time.sleep(60)
"""


def test_workers_die_with_a_killed_parent_even_inside_c_code(tmp_path):
    file = tmp_path / "busy.py"
    file.write_text("def reward_func(queries, prompts, labels):\n    print('asked', len(queries))\n"
                    "    return [9 ** (9 ** 9)]\n")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(file)], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)  # yapf: disable
    printed = next(line for line in parent.stderr if "asked" in line)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert printed in [f"[reward worker {pid}] asked 1\n" for pid in pids], "standard output is the trainer's own"
    assert pids and all(map(alive, pids)), "the worker computes"
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not any(map(alive, pids))), "the worker outlived its parent"


def test_what_a_worker_prints_is_labelled_and_bounded(capfd):
    stream = io.TextIOWrapper(LabelledLines("[worker]"), "utf-8", "replace", write_through=True)
    print("half\ud83d", 1, end="", file=stream)
    thread = threading.Thread(target=print, args=("of another thread", ), kwargs={"file": stream})
    thread.start()
    thread.join()
    print("\n", "x" * 2 * MOST_BYTES, file=stream, sep="")
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["[worker] of another thread", "[worker] half? 1", f"[worker] {'x' * MOST_BYTES} ..."]
    print("\n" * 2 * MOST_LINES, file=stream)
    *_, last, end = lines = capfd.readouterr().err.splitlines()
    assert (len(lines), last) == (MOST_LINES - 2, "[worker] ")
    assert end == f"[worker] has printed {MOST_LINES} lines: further ones are left out"


def test_shutdown_ends_the_workers_and_what_they_were_at(make_manager, tmp_path):
    file = tmp_path / "slow.py"
    file.write_text("import time\ndef reward_func(queries, prompts, labels):\n    time.sleep(60)\n")
    manager = make_manager(file)
    handle, pids = manager.submit([RewardInput("", "a")]), manager.pool.pids
    time.sleep(0.3)
    start = time.perf_counter()
    manager.shutdown()
    scores = manager.collect(handle)
    assert time.perf_counter() - start < 5.0, "no waiting for the reward"
    assert [score.error for score in scores] == ["worker_died"], scores
    assert scores[0].total is None and not any(map(alive, pids)), scores


def test_a_worker_that_was_killed_while_idle_is_replaced(make_manager, tmp_path):
    file = tmp_path / "fine.py"
    file.write_text("def compute_score(data_source, solution_str, ground_truth):\n    return len(solution_str)\n")
    manager = make_manager(file)
    for _ in range(2):
        for pid in manager.pool.pids:
            os.kill(pid, signal.SIGKILL)
        scores = manager.collect(manager.submit([RewardInput("", "ab"), RewardInput("", "c")]))
        assert [s.total for s in scores] == [2.0, 1.0], scores


@pytest.mark.parametrize("length", [1, 1 << 20])
def test_a_worker_that_stands_still_between_tasks_is_replaced_after_the_time_limit(make_manager, tmp_path, caplog,
                                                                                   monkeypatch, length):
    """It costs ``reward_timeout_s`` and not the limit of an import; a long message would also fill its pipe."""
    monkeypatch.setattr(pool_module, "LOAD_LIMIT_S", 600.0)
    file = tmp_path / "fine.py"
    file.write_text("def compute_score(data_source, solution_str, ground_truth):\n    return len(solution_str)\n")
    manager = make_manager(file, reward_timeout_s=0.5)
    for pid in manager.pool.pids:
        os.kill(pid, signal.SIGSTOP)
    assert [s.total for s in manager.score([RewardInput("", "a" * length)])] == [length]
    assert length > 1 or "stood still" in caplog.text and "--reward_timeout_s" in caplog.text


def test_a_response_that_kills_the_worker_is_left_out_alone(make_manager, tmp_path):
    """Processes that the reward has started end with it."""
    file, child = tmp_path / "crash.py", tmp_path / "child"
    body = ("    if 'die' in {}:\n"
            f"        open({str(child)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))\n"
            "        os._exit(3)\n")
    file.write_text("import os, subprocess\ndef compute_score(data_source, solution_str, ground_truth):\n" +
                    body.format("solution_str") + "    return 1.0\ndef whole(queries, prompts, labels):\n" +
                    body.format("''.join(queries)") + "    return [1.0] * len(queries)\n")
    for entry in (file, f"{file}:whole"):
        manager = make_manager(entry)
        scores = manager.collect(manager.submit([RewardInput(text, text) for text in ("a", "die", "b")]))
        assert [(s.total, s.error) for s in scores] == [(1.0, None), (None, "worker_died"), (1.0, None)], scores
        assert wait_until(lambda: not alive(int(child.read_text()))), "what the reward has started"


def test_a_group_that_always_hangs_costs_no_other_one_its_time(make_manager, tmp_path):
    file = tmp_path / "hang.py"
    file.write_text("import time\ndef compute_score(data_source, solution_str, ground_truth):\n"
                    "    time.sleep(60 if solution_str == 'hang' else 0)\n    return 1.0\n")
    manager = make_manager(file, reward_timeout_s=0.5)
    handles = [Handle(), Handle()]
    for row in range(5):  # in turns, so that they travel together
        manager.begin([(handles[0], row, RewardInput("", "hang")), (handles[1], row, RewardInput("", "fine"))])
    assert {s.error for s in manager.collect(handles[0])} == {"timeout"}
    assert [s.total for s in manager.collect(handles[1])] == [1.0] * 5
    assert [handle.budgets["compute_score"].timeouts >= 5 for handle in handles] == [True, False]


def test_calls_take_whole_groups():
    assert calls([], 1) == [] and calls(list("aabbcc"), 2) == [2, 2, 2] == calls(list("aabbcc"), 1)
    assert calls(list("aabbcc"), 3) == [4, 2] and calls(list("aabbcc"), 6) == [6]
    assert calls(["a"] * 60 + ["b"] * 8, 64) == [60, 8] and calls(["a"] * 130 + ["b"], 64) == [130, 1]


def test_who_is_free_takes_a_share_of_what_waits():
    backlog = Backlog(2)
    backlog.put(range(7), "a")
    backlog.put("xy", "b")
    taken = [backlog.take(3) for _ in range(6)]
    assert taken == [[0, 1, 2], ["x"], [3, 4], ["y"], [5], [6]], "the kinds come in turns"
    backlog.put([8], "a")
    backlog.close()
    assert backlog.take(3) == [8] and backlog.take(3) == []
    with pytest.raises(RuntimeError, match="shut down"):
        backlog.put([9], "a")


def test_nothing_is_asked_of_workers_that_have_ended(make_manager, tmp_path):
    file = tmp_path / "fine.py"
    file.write_text("def compute_score(data_source, solution_str, ground_truth):\n    return 1.0\n")
    for manager in (make_manager(file), make_manager(remote_rm_url=["http://127.0.0.1:9/rm"])):
        manager.shutdown()
        with pytest.raises(RuntimeError, match="have been shut down"):
            manager.submit([RewardInput("", "a")])


def test_the_budget_of_a_group_shrinks_and_ends():
    reward = RewardBudget(10.0)
    group = GroupBudget(reward)
    limits = []
    for timeouts in range(18):
        group.timeouts = timeouts
        limits.append(group.deadline_s())
    assert limits == [10.0] * 3 + [1.0] * 13 + [0.0] * 2, limits


def test_a_reward_without_answers_ends_the_budget_of_every_group_until_it_answers():
    reward = RewardBudget(10.0)
    groups = [GroupBudget(reward) for _ in range(8)]
    for group in groups:
        assert group.deadline_s() == 10.0, "each may be the first that is answered"
        reward.lose(10.0)
    assert [group.deadline_s() for group in groups] == [0.0] * 8
    groups[0].answered()
    assert [group.deadline_s() for group in groups] == [10.0] * 8


def test_a_reward_that_always_hangs_is_given_up_for_all_groups_and_tried_again_in_the_next_step(make_manager, tmp_path):
    file, asked = tmp_path / "hang.py", tmp_path / "asked"
    asked.touch()
    file.write_text("import time\ndef compute_score(data_source, solution_str, ground_truth):\n"
                    f"    print(solution_str, file=open({str(asked)!r}, 'a'), flush=True)\n"
                    "    time.sleep(60 if solution_str == 'hang' else 0)\n    return 1.0\n")
    manager = make_manager(file, reward_timeout_s=0.3)
    handles = [manager.submit([RewardInput(f"p{group}", "hang")] * 2) for group in range(16)]
    assert {score.error for handle in handles for score in manager.collect(handle)} == {"timeout"}
    assert 0 < len(asked.read_text().split()) <= 10, "8 limits of one worker, for 32 responses"
    assert [score.error for score in manager.collect(manager.submit([RewardInput("", "fine")] * 2))] == [None] * 2


def test_workers_do_not_import_the_training_script_and_share_the_work(make_manager, tmp_path):
    file = tmp_path / "who.py"
    file.write_text(
        "import os, sys, time\ndef compute_score(data_source, solution_str, ground_truth):\n    time.sleep(0.05)\n"
        "    return {'score': os.getpid(), 'torch': int('torch' in sys.modules)}\n")
    manager = make_manager(file, reward_workers=2)
    scores = manager.collect(manager.submit([RewardInput("", "")] * 40))
    assert {s.total for s in scores} == set(manager.pool.pids) and len(manager.pool.pids) == 2, "both workers scored"
    assert {s.parts["compute_score/torch"] for s in scores} == {0.0}, "a worker has no torch"


def test_outcomes_travel_together_unless_they_take_their_time():
    good = Outcome(1.0)

    def scored():
        yield from [good] * 3
        yield None  # what follows may take long: the parent is to have all before it
        yield good
        time.sleep(0.02)
        yield good
        yield good

    assert [len(bundle) for bundle in _bundles(scored())] == [3, 2, 1]
    assert list(_bundles(iter([]))) == []
