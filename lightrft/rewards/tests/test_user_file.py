"""A user's reward file: each signature, and each way to fail."""
import time
from dataclasses import replace

import pytest

from lightrft.rewards.base import RewardInput
from lightrft.rewards.validation import check_references, probe
from lightrft.rewards.workers.user_file import outcomes_of
from lightrft.utils.errors import UserError

ITEMS = [
    RewardInput(f"p{i}:", text, reference=str(i), data_source="src", label="lab", columns={"level": i})
    for i, text in enumerate(["a", "bb", "bad", "dddd"])
]


@pytest.fixture
def scores(make_manager, tmp_path):
    """Score ``items`` with a file of this ``source``: (scores, manager)."""

    def run(source, items=ITEMS, function="", **options):
        file = tmp_path / "mine.py"
        file.write_text(source)
        manager = make_manager(f"{file}{function}", **options)
        return manager.collect(manager.submit(items)), manager

    return run


def totals(result):
    return [score.total for score in result[0]]


def test_queries_prompts_labels(scores):
    result = scores("def reward_func(queries, prompts, labels):\n"
                    "    return [len(q) - len(p) + 10 * int(l) for q, p, l in zip(queries, prompts, labels)]\n")
    assert totals(result) == [1.0, 12.0, 23.0, 34.0], "queries are prompt + response, labels the references"
    assert result[0][0].parts == {"reward_func": 1.0}, "the part is named after the function"


def test_a_dict_of_rewards_with_logs(scores):
    result = scores(
        "def reward_func(queries, prompts, labels, level, **kwargs):\n"
        "    return {'rewards': level, 'scores': [1] * len(level), 'extra_logs': {'twice': [2 * x for x in level]}}\n")
    assert result[0][3].parts == {"reward_func": 3.0, "reward_func/scores": 1.0, "reward_func/twice": 6.0}, result[0][3]


def test_a_tensor_may_come_back(scores):
    assert totals(
        scores("import torch\ndef reward_func(queries, prompts, labels):\n"
               "    return torch.arange(len(queries)) / 2\n")) == [0.0, 0.5, 1.0, 1.5], "a tensor is a list of numbers"


def test_compute_score(scores):
    result = scores(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': len(solution_str), 'acc': int(ground_truth), 'level': extra_info['level'], 'text': 'x'}\n"
    )
    assert totals(result) == [1.0, 2.0, 3.0, 4.0], result[0]
    assert result[0][2].parts == {"compute_score": 3.0, "compute_score/acc": 2.0, "compute_score/level":
                                  2.0}, "numbers are metrics"


def test_completions_sync_async_and_columns(scores):
    result = scores("async def f(prompts, completions, level, **kwargs):\n"
                    "    return [len(c) + l + len(kwargs['reference'][0]) for c, l in zip(completions, level)]\n")
    assert totals(result) == [2.0, 4.0, 6.0, 8.0], "columns arrive as lists"
    assert totals(scores("def f(completions, answer):\n    return [int(a) for a in answer]\n")) == [0.0, 1.0, 2.0,
                                                                                                    3.0], "by any name"


def test_completions_are_conversations_when_the_prompt_was(scores):
    items = [RewardInput("<user>hi", "yes", messages=[{"role": "user", "content": "hi"}])]
    assert totals(
        scores(
            "def f(prompts, completions):\n"
            "    said = completions[0][0]\n"
            "    ok = prompts[0][0]['content'] == 'hi' and said == {'role': 'assistant', 'content': 'yes'}\n"
            "    return [float(ok)]\n", items)) == [1.0], "messages in, messages out"


def test_the_function_is_chosen_by_name_and_weighted(scores):
    source = ("def helper(x):\n    return x\ndef short(completions):\n    return [helper(2.0)] * len(completions)\n"
              "def g(completions):\n    return 1 / 0\n")
    assert totals(scores(source, function=":short=0.5")) == [1.0] * 4, "path.py:function=weight"
    with pytest.raises(ValueError, match="cannot tell which function.*helper, short, g.*path.py:function"):
        scores(source)


@pytest.mark.parametrize("source, function, expected", [
    ("def f(completions:\n    pass\n", "", r"mine.py, line 1: .*Remedy"),
    ("import nothing_of_that_name\n", "",
     r"mine.py raises while it is imported(.|\n)*line 1(.|\n)*nothing_of_that_name"),
    ("raise SystemExit(3)\n", "", "raises while it is imported"),
    ("def f(completions):\n    return []\n", ":other", "mine.py has no function 'other'. Its functions: f"),
    ("\ndef f(x, y):\n    return x\n", "",
     r"mine.py, line 2: f\(x, y\) has none of the known signatures. Remedy: reward_func\("),
    ("import os\nos._exit(1)\n", "", "ended while it imported"),
    ("x = 1\n", "", "Its functions: none"),
])
def test_an_unfit_file_stops_before_training(scores, source, function, expected):
    with pytest.raises(ValueError, match=expected):
        scores(source, function=function)


@pytest.mark.parametrize("body, error", [
    ("1 / 0 if {bad} else 1.0", "exception"),
    ("None if {bad} else 1.0", "none"),
    ("float('nan') if {bad} else 1.0", "not_finite"),
    ("float('inf') if {bad} else 1.0", "not_finite"),
    ("-1e20 if {bad} else 1.0", "not_finite"),
    ("'good' if {bad} else 1.0", "wrong_type"),
    ("__import__('sys').exit(1) if {bad} else 1.0", "exception"),
    ("__import__('time').sleep(9) if {bad} else 1.0", "timeout"),
])
def test_only_the_guilty_response_is_unscored(scores, caplog, body, error):
    one = "def compute_score(data_source, solution_str, ground_truth):\n    return " + body.format(
        bad="solution_str == 'bad'")
    many = "def f(completions):\n    return [" + body.format(bad="c == 'bad'") + " for c in completions]\n"
    for source in (one, many):
        caplog.clear()
        result, _ = scores(source, reward_timeout_s=1.0)
        assert [(s.total, s.error) for s in result] == [(1.0, None), (1.0, None), (None, error), (1.0, None)], source
        assert sum("left unscored" in record.message for record in caplog.records) == 1, "logged once"
        assert ("Where it is wrong, return 0.0" in caplog.text) == (error == "none")


def test_a_wrong_length_is_found_one_by_one(scores):
    result, manager = scores(
        "def reward_func(queries, prompts, labels):\n    return [1.0 for q in queries if 'bad' not in q]\n")
    assert [(s.total, s.error) for s in result] == [(1.0, None), (1.0, None), (None, "wrong_length"),
                                                    (1.0, None)], result


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_list_of_one_length_for_any_batch_is_no_reward(scores, length):
    result, _ = scores(f"def reward_func(queries, prompts, labels):\n    return [1.0] * {length}\n")
    assert [(s.total, s.error) for s in result] == [(None, "wrong_length")] * 4, result


def test_what_cannot_be_sent_to_a_worker_is_unscored(scores):
    items = [RewardInput("", "a", columns={"lock": lambda: 0})]
    result, manager = scores("def f(completions):\n    return [1.0] * len(completions)\n", items)
    assert [s.error for s in result] == ["internal"], result
    assert manager.collect(manager.submit(ITEMS))[0].total == 1.0, "the worker continues"


def test_none_for_the_whole_batch_is_unscored(scores):
    result, _ = scores("def reward_func(queries, prompts, labels):\n    pass\n")
    assert [s.error for s in result] == ["none"] * 4, result


def test_a_traceback_is_logged(scores, caplog):
    scores("def compute_score(data_source, solution_str, ground_truth):\n    raise KeyError('where')\n")
    assert "KeyError: 'where'" in caplog.text and "mine.py\", line 2" in caplog.text, caplog.text
    assert caplog.text.count(", line ") == 1, "frames that are not the user's"


def test_always_hanging_is_bounded(scores):
    start = time.perf_counter()
    result, _ = scores("import time\ndef compute_score(data_source, solution_str, ground_truth):\n    time.sleep(9)\n",
                       [RewardInput("", "")] * 60, reward_timeout_s=0.3)
    assert [s.error for s in result] == ["timeout"] * 60, result
    assert time.perf_counter() - start < 10.0, "60 responses of 0.3 s are not waited for one by one"


def test_one_failing_part_leaves_the_total_unscored(make_manager, tmp_path):
    (tmp_path / "none.py").write_text("def f(completions):\n    return [None, 1.0]\n")
    manager = make_manager("exact", tmp_path / "none.py")
    first, second = manager.collect(manager.submit([RewardInput("", r"\boxed{5}", reference="5")] * 2))
    assert first.total is None and first.parts == {"exact": 1.0, "f": None}, first
    assert second.total == 2.0, second


def test_probe_of_a_user_file(make_manager, tmp_path, capsys, monkeypatch):
    row = RewardInput("q", "", reference="5")
    (tmp_path / "flat.py").write_text("def f(completions):\n    return [1.0] * len(completions)\n")
    probe(make_manager(tmp_path / "flat.py"), [row])
    assert "no higher" in capsys.readouterr().err, "a warning only: it may judge something else than the answer"
    monkeypatch.setenv("RANK", "1")
    probe(make_manager(tmp_path / "flat.py"), [row])
    assert "no higher" not in capsys.readouterr().err, "every rank finds it: one says it"
    (tmp_path / "broken.py").write_text("def f(completions):\n    raise KeyError('where')\n")
    with pytest.raises(ValueError, match="could be scored: exception.*Remedy"):
        probe(make_manager(tmp_path / "broken.py"), [row])


def test_scores_alone_and_constants_as_logs():
    outcomes = outcomes_of({"scores": [1, True], "extra_logs": {"k": 3}}, 2)
    assert [(o.value, o.extra) for o in outcomes] == [(1.0, {"k": 3.0}), (1.0, {"k": 3.0})], outcomes


@pytest.mark.parametrize("source, function", [
    ("def f(queries, prompts, /, labels, *, level, unknown=3):\n"
     "    return [l - l + len(q) > len(p) for q, p, l in zip(queries, prompts, level)]", ""),
    ("def f(*args, queries, **kwargs):\n    return [not args and len(kwargs['level']) > 0] * len(queries)", ""),
    ("def f(data_source, solution_str, ground_truth, /, extra_info={}, *, tokenizer=None):\n    return 1.0", ""),
    ("class R:\n    def __call__(self, completions, level):\n        return [1.0] * len(level)\n"
     "reward = R()", ":reward"),
    ("from dataclasses import dataclass\n@dataclass\nclass R:\n    size: float\n"
     "    async def __call__(self, queries):\n        return [self.size] * len(queries)\nreward = R(1.0)", ":reward"),
    ("from functools import partial\ndef f(queries, size):\n    return [size] * len(queries)\n"
     "reward = partial(f, size=1.0)", ":reward"),
])  # yapf: disable
def test_parameters_are_filled_whatever_their_kind(scores, source, function):
    """By position, by keyword, in ``**kwargs``; of functions, of objects (also without a hash) and of partials."""
    assert totals(scores(source, function=function)) == [1.0] * 4


CONTRACTS = ("reward_func(queries, prompts, labels)", "reward_fn(model_reward_list, labels, queries, refs, label_map)",
             "compute_score(data_source, solution_str, ground_truth", "f(prompts, completions, **columns)")


@pytest.mark.parametrize("source, function, said", [
    ("def compute_score(solution_str, ground_truth, tokenizer):\n    return 1.0", "",
     r"nothing can fill the parameter tokenizer; columns of a row are in extra_info"),
    ("def f(solution_strs, ground_truths, *, mode, level):\n    return [1.0]", "", "the parameter mode, level"),
    ("def f(*queries):\n    return [1.0]", "", "none of the known signatures"),
    ("def f(**kwargs):\n    return [1.0]", "", "none of the known signatures"),
    ("class R:\n    def __call__(self, queries):\n        return [1.0]", ":R", "R is a class. Remedy: name an object"),
    ("f = print", ":f", "none of the known signatures"),
])
def test_a_function_that_nothing_can_call_is_refused_at_load(scores, source, function, said):
    with pytest.raises(UserError, match=said) as error:
        scores(source, function=function)
    assert "is a class" in said or all(each in str(error.value) for each in CONTRACTS)


@pytest.mark.parametrize("head", ["reward(model_x, queries)", "f(model_x, /, completions, **columns)",
                                  "f(model_reward_list, queries, *, model_x)"])  # yapf: disable
def test_a_parameter_that_no_row_has_is_refused_before_training(scores, head):
    """A column that some rows have is enough; it is None for the others."""
    source = f"def {head}:\n    return [float(value == 'a') for value in model_x]\n"
    result, manager = scores(source, [replace(ITEMS[0], columns={"model_x": "a"}), ITEMS[1]])
    assert totals((result, manager)) == [1.0, 0.0]
    check_references(manager, [ITEMS[1], replace(ITEMS[0], columns={"model_x": "a"})])
    for check in (check_references, probe):
        with pytest.raises(UserError,
                           match="nothing can fill the parameter model_x.*the rows have the columns level") as error:
            check(manager, ITEMS)
        assert all(each in str(error.value) for each in CONTRACTS)


def test_a_reward_that_reads_the_environments_of_trl_is_told_where_it_belongs(scores):
    _, manager = scores("def f(completions, environments, **columns):\n    return [e.n for e in environments]\n", [])
    with pytest.raises(UserError, match="give their class a method get_reward\\(\\), and take --reward environment"):
        check_references(manager, ITEMS)
