"""Recipes, weights, algebra in workers, speed, and the probe before training."""
import subprocess
import sys
import threading
import time

import pytest

from lightrft.rewards import manager as manager_module
from lightrft.rewards.base import REWARDS, RewardInput
from lightrft.rewards.manager import Handle
from lightrft.rewards.spec import RECIPES
from lightrft.rewards.validation import RewardProbeError, check_spread, probe
from lightrft.utils.errors import UserError
from lightrft.utils.logging import get_logger

THOUGHT = r"<think>7+6+0=13,4+8+1=13</think>\boxed{%s}"

SLEEPER = """
import time

def compute_score(data_source, solution_str, ground_truth):
    time.sleep({seconds})
    return len(solution_str)
"""


def rows(count, label="", source="lightrft/quickstart"):
    return [RewardInput(f"{i}+1", THOUGHT % i, label=label, data_source=source, reference=str(i)) for i in range(count)]


def score(manager, items):
    return manager.collect(manager.submit(items))


def test_quickstart_batch_is_cheap_and_starts_no_worker(make_manager):
    manager = make_manager()
    items = rows(128)
    probe(manager, items[:1])
    best = min(_timed(manager, items) for _ in range(5))
    assert all(s.total == 1.0 and s.parts == {"exact": 1.0} for s in score(manager, items)), "all right"
    assert not manager.pool.pids, "no worker process"
    assert best < 3e-3, f"128 responses took {best * 1e3:.2f} ms"


def _timed(manager, items):
    start = time.thread_time()
    score(manager, items)
    return time.thread_time() - start


def test_recipe_by_label_then_by_data_source(make_manager):
    manager = make_manager()
    by_label, by_source, bare = score(manager, [
        RewardInput("", THOUGHT % 5, label="gsm8k_rule", data_source="lightrft/quickstart", reference="5"),
        RewardInput("", THOUGHT % 6, data_source="openai/gsm8k", reference="5"),
        RewardInput("", r"\boxed{5.0}", label="gsm8k_rule", reference="5"),
    ])
    assert by_label.total == pytest.approx(1.0) and by_label.parts == {"math": 1.0, "format": 1.0}, by_label
    assert by_source.total == pytest.approx(0.1), "only the format is right"
    assert bare.total == pytest.approx(0.9), "only the answer is right"


def test_unknown_recipe_is_an_error_that_names_the_known_ones(make_manager):
    manager = make_manager()
    with pytest.raises(ValueError, match="no reward recipe for label 'nope'.*gsm8k_rule.*--reward"):
        probe(manager, [*rows(1), RewardInput("", "", label="nope", data_source="x")])
    with pytest.raises(ValueError, match="no reward recipe"):
        manager.submit([RewardInput("", "", label="nope")])
    with pytest.raises(ValueError, match="^no reward recipe for label '' or data source ''. Remedy: name the reward"):
        manager.submit([RewardInput("", "")])


def test_reward_entries_replace_the_recipe_with_their_weights(make_manager):
    manager = make_manager("exact=2", "format=0.5")
    right, plain = score(manager,
                         [RewardInput("", THOUGHT % 5, reference="5"),
                          RewardInput("", r"\boxed{5}", reference="5")])
    assert (right.total, plain.total) == (2.5, 2.0), "weighted sums"


@pytest.mark.parametrize("entry, expected", [("exakt", "did you mean exact"), ("exact=much", "is no number"),
                                             ("exact:0.5", "behind its part and =.*exact=0.5"), ("0.5", "exact=0.5"),
                                             ("exact=nan", "is no number"), ("", "empty"),
                                             ("nowhere.py", "does not exist")])
def test_unfit_entries_are_refused_at_once(make_manager, entry, expected):
    with pytest.raises(ValueError, match=expected):
        make_manager(entry)


@pytest.mark.parametrize("entries, recipes, expected", [(("exact", "exact=2"), [], "names 'exact' twice"),
                                                        ((), ["a:exact=1+exact=2"], "names 'exact' twice"),
                                                        ((), ["a:exact", "a:math"], "'a' has a recipe already")])
def test_the_same_part_or_recipe_twice_is_refused(make_manager, entries, recipes, expected):
    with pytest.raises(ValueError, match=expected):
        make_manager(*entries, reward_recipe=recipes)


ALGEBRA = [(r"2\sqrt{3}", r"\sqrt{12}", 1.0), (r"2\sqrt{3}", r"\sqrt{13}", 0.0), ("50", r"50\%", 1.0),
           ("1024", "2^{10}", 1.0), (r"\{1,2\}", r"\{2,1\}", 1.0), ("(1,2)", "(2,1)", 0.0), ("x+1", "1+x", 1.0),
           ("x=5", "5", 1.0), ("5", "5x", 0.0), ("1/3", "0.333333", 1.0), ("[0,1)", "[0,1]", 0.0),
           ("1000", "1{,}000", 1.0), (r"90^\circ", "90", 1.0), ("12", "1,2", 0.0),
           (r"\frac{\pi}{4}", r"\arctan(1)", 1.0), ("5", "garbage ++ {", 0.0), ("-x^2", "x^2", 0.0)]


def test_algebra_is_graded_in_a_worker_off_the_main_thread(make_manager):
    pytest.importorskip("math_verify")
    manager = make_manager("math", reward_workers=2, reward_timeout_s=20.0)
    items = [RewardInput("", rf"\boxed{{{answer}}}", reference=reference) for reference, answer, _ in ALGEBRA]
    got = []
    thread = threading.Thread(target=lambda: got.extend(score(manager, items)))
    thread.start()
    thread.join(60.0)
    assert [(*case[:2], s.total) for case, s in zip(ALGEBRA, got)] == ALGEBRA
    assert manager.pool.pids, "it ran in a worker process"


def test_a_hanging_expression_costs_itself_only(make_manager):
    pytest.importorskip("math_verify")
    manager = make_manager("math", reward_timeout_s=1.5)
    score(manager, [RewardInput("", r"\boxed{\sqrt{4}}", reference="x")])
    answers = [r"\sqrt{12}", "9^{9^{9^{9^9}}}", r"\sqrt{13}", r"2\sqrt{3}+0"]
    start = time.perf_counter()
    handle = manager.submit([RewardInput("", rf"\boxed{{{answer}}}", reference=r"2\sqrt{3}") for answer in answers])
    submitted = time.perf_counter() - start
    scores = manager.collect(handle)
    assert submitted < 0.5, f"submit must return at once, took {submitted:.3f} s"
    assert [s.total for s in scores] == [1.0, None, 0.0, 1.0], scores
    assert scores[1].error in ("timeout", "exception"), scores[1]


def test_a_long_wait_is_reported_with_the_open_answers(make_manager, tmp_path, monkeypatch, caplog):
    file = tmp_path / "slow.py"
    file.write_text(SLEEPER.format(seconds=0.4))
    manager = make_manager(file, "exact")
    monkeypatch.setattr(manager_module, "WARN_S", 0.1)
    score(manager, [RewardInput("", "a", reference="a")])
    expected = [record.message for record in caplog.records if "slower than generation" in record.message]
    assert expected and all("missing answers: 1 of compute_score." in text and "--reward_workers (1)" in text
                            for text in expected)
    caplog.clear()
    score(manager, [])
    assert not caplog.records, "nothing was waited for"


def test_responses_begin_one_by_one_and_a_group_is_scored_in_its_order(make_manager, tmp_path):
    """What judges a response alone is asked at once, what compares the group when it is finished."""
    file, lists = tmp_path / "one.py", tmp_path / "lists.py"
    file.write_text(SLEEPER.format(seconds=0))
    lists.write_text("def rank(prompts, completions, **columns):\n    return [sorted(completions).index(text) "
                     "for text in completions]\n")
    manager = make_manager("exact=100", f"{file}=10", lists)
    items = [RewardInput("p", rf"\boxed{{{answer}}}", reference="2") for answer in "321"]
    together, handle = score(manager, items), Handle()
    for row in (2, 0, 1):
        manager.begin([(handle, row, items[row])])
        assert [job.part for job in handle.jobs][-1] == "compute_score"
    assert manager.begins_early(items[:1]) and manager.compares(items[:1]) and len(handle.jobs) == 3
    manager.finish(handle)
    assert handle.jobs[-1].part == "rank" and handle.jobs[-1].rows == [0, 1, 2]
    assert manager.collect(handle) == together and [s.total for s in together] == [92.0, 191.0, 90.0], together
    assert not make_manager("exact").begins_early(items[:1])


def test_probe_accepts_every_built_in_recipe(make_manager):
    manager = make_manager(reward_timeout_s=20.0)
    references = {label: "B" if recipe[0][0] == "choice" else "5" for label, recipe in RECIPES.items()}
    del references["reasoning_gym_rule"]  # it reads rows of its package alone, as in test_reasoning_gym.py
    probe(manager, [RewardInput("q", "", label=label, reference=known) for label, known in references.items()])
    probe(manager, [RewardInput("q", "", label="math_rule", reference=reference) for reference in (r"\frac{x}{2}", )])
    probe(manager, [RewardInput("q", "", label="gsm8k_rule", reference="yes")])


def test_probe_refuses_a_reward_that_prefers_the_wrong_answer(make_manager):
    with pytest.raises(RewardProbeError,
                       match="known-good.*scores -1.*known-bad.*reference '5'|reference '5'.*known-good.*scores -1"):
        probe(make_manager("exact=-1"), [RewardInput("q", "", reference="5")])


@pytest.mark.parametrize("wanted,warned", [("5", False), ("six", True)])
def test_probe_tries_the_answer_alone_on_functions(wanted, warned, tmp_path, make_manager, capsys):
    (tmp_path / "own.py").write_text("def score(data_source, solution_str, ground_truth, extra_info=None):\n"
                                     f"    return float(solution_str == {wanted!r})\n")
    probe(make_manager(f"{tmp_path}/own.py:score"), [RewardInput("q", "", reference="5")])
    assert ("no higher (0) than the known-bad" in capsys.readouterr().err) is warned


@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_rank_logs_what_a_function_raises_in_the_probe(rank, tmp_path, make_manager, capsys, monkeypatch):
    """Every rank probes the same rows. A failure of the run, of rows of its own, is logged by each."""
    monkeypatch.setenv("RANK", rank)
    (tmp_path / "own.py").write_text("def score(data_source, solution_str, ground_truth, extra_info=None):\n"
                                     "    raise TypeError(solution_str)\n")
    row = RewardInput("q", "", reference="5")
    get_logger()
    with pytest.raises(RewardProbeError, match="no answer"):
        probe(make_manager(f"{tmp_path}/own.py:score"), [row])
    assert ("TypeError" in capsys.readouterr().err) is (rank == "0")
    make_manager(f"{tmp_path}/own.py:score").score([row])
    assert "TypeError" in capsys.readouterr().err


def test_probe_refuses_rows_that_cannot_be_scored(make_manager):
    with pytest.raises(RewardProbeError, match="no answer to the row.*no_reference"):
        probe(make_manager("exact"), [RewardInput("q", "")])


@pytest.mark.parametrize("reward,most", [(("exact", ), 1), (("math=0.5", "format=0.25"), 0.75), (("exact=-2", ), 2)])
def test_a_spread_that_no_group_can_have(reward, most, make_manager):
    manager, asked = make_manager(*reward), rows(2)
    check_spread(manager, asked, most - 0.01)
    for zero_spread in (most, 5):
        with pytest.raises(UserError, match=f"--zero_spread {zero_spread}: .* at most {most}.*a little below {most}"):
            check_spread(manager, asked, zero_spread)


def test_the_spread_of_other_rewards_is_not_known(make_manager, tmp_path):
    (tmp_path / "own.py").write_text("def reward_func(queries, prompts, labels):\n    return [9.0] * len(queries)\n")
    check_spread(make_manager("exact", tmp_path / "own.py"), rows(1), 5.0)
    check_spread(make_manager("exact"), [], 5.0)


def test_a_registered_reward_of_a_plugin_runs_in_a_worker(make_manager, tmp_path, monkeypatch):
    (tmp_path / "my_plugin.py").write_text("import os\ndef pid(batch):\n    return [os.getpid() for _ in batch]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_plugin
    REWARDS.register("pid_for_test")(my_plugin.pid)
    manager = make_manager("pid_for_test")
    assert score(manager, rows(3))[0].total == manager.pool.pids[0], "scored by the worker"


def test_a_reward_travels_to_the_workers_by_value_if_it_can(make_manager):
    REWARDS.register("lambda_for_test")(lambda batch: [0.5] * len(batch))
    assert score(make_manager("lambda_for_test"), rows(3))[0].total == 0.5
    lock = threading.Lock()
    REWARDS.register("lock_for_test")(lambda batch: [float(lock.locked())] * len(batch))
    with pytest.raises(ValueError, match="cannot be sent to a worker process.*inside of the function"):
        make_manager("lock_for_test")


def test_a_registered_name_calls_the_rule():
    items = rows(2)
    assert [REWARDS.get(name)(items) for name in ("exact", "format", "math")] == [[1.0, 1.0]] * 3, "all right"


def test_worker_side_imports_no_torch():
    pytest.importorskip("math_verify")
    code = ("import sys; import lightrft.rewards.workers.worker, lightrft.rewards.rules, lightrft.rewards.manager; "
            "import math_verify; "
            "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0, "torch or numpy was imported"


def test_an_unknown_reward_is_told_with_the_nearest_one(make_manager):
    with pytest.raises(UserError, match=r"unknown reward 'exatc' \(did you mean exact\?\); known: .*exact, format, .*"):
        make_manager("exatc")
    for name in ("accuracy", "acuracy"):
        with pytest.raises(UserError, match=rf"unknown reward '{name}' \(here: math\); known: "):
            make_manager(name)


def test_backslashes_of_a_message_are_those_of_the_answer(make_manager):
    with pytest.raises(RewardProbeError) as error:
        probe(make_manager("exact=-1"), [RewardInput("a\nb", "", reference=r"\frac{1}{2}")])
    assert r"\boxed{\frac{1}{2}}' scores -1" in str(error.value) and r"reference '\frac{1}{2}'" in str(error.value)
    assert r"prompt 'a\nb'" in str(error.value) and "\n" not in str(error.value)


def test_a_missing_recipe_names_the_option_of_the_label(make_manager):
    with pytest.raises(UserError, match=r"--label_key \(the row has topic, level\)"):
        make_manager().parts_of(RewardInput("q", "", columns={"topic": "a", "level": 3}))


MAIN = """
from lightrft.config.schema import RewardConfig
from lightrft.rewards.base import REWARDS, RewardInput
from lightrft.rewards.manager import RewardManager

BONUS = 2.0

def twice(text):
    return BONUS * len(text)

@REWARDS.register("mine")
def mine(batch):
    return [twice(item.response) for item in batch]

@REWARDS.register("theirs")
def theirs(prompts, completions, **columns):
    return [twice(text) + 1 for text in completions]

class Grader:
    def __call__(self, batch):
        return [0.5] * len(batch)

REWARDS.register("grader")(Grader())
manager = RewardManager(RewardConfig(reward=["mine", "theirs", "grader"]))
print([score.parts for score in manager.collect(manager.submit([RewardInput("p", "abc")]))])
manager.shutdown()
"""


def test_a_reward_that_is_registered_in_the_program_itself(tmp_path):
    """Its helpers and constants travel with it, and it may have a signature of a reward file."""
    (tmp_path / "my_run.py").write_text(MAIN)
    done = subprocess.run([sys.executable, str(tmp_path / "my_run.py")], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "[{'mine': 6.0, 'theirs': 7.0, 'grader': 0.5}]", done.stderr
