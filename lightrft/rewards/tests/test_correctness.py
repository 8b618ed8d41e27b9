"""Which part of a reward says that an answer is right."""
import pytest

from lightrft.rewards.correctness import Correctness

F = {"format": 1.0}


@pytest.mark.parametrize("answers,right", [
    ([{"math": 1.0, **F}, {"math": 0.5, **F}], [True, False]),
    ([{"exact": 0.0, **F}], [False]),
    ([{"answer": 1.0, "tags": 0.0}], [True]),
    ([{"choice": 0.0, "mine": 1.0}], [False]),
    ([{"accuracy": 1.0, "math": 0.0}, {"accuracy": 0.3, "math": 1.0}], [True, False]),
    ([{"mine": 1.0, **F}, {"mine": 0.0, **F}], [True, False]),
    ([{"mine": 1.0, **F}, {"mine": 0.5, **F}], [None, None]),
    ([{"mine": 1.0}, {"mine": -1.0}], [None, None]),
    ([{"mine": 1.0, "other": 0.0}], [None]),
    ([{"mine": 1.0, "other": 0.0}, {"mine": 1.0, "other": 0.2}], [True, True]),
    ([{"mine": -1.0, "mine/acc": 0.0}, {"mine": 1.0, "mine/acc": 1.0}, {"mine": -1.0}], [False, True, False]),
    ([{"a": 0.5, "a/acc": 1.0, "b/acc": 0.0, "b": 0.5}], [None]),
    ([F], [None]),
    ([{"rm": 1.0}], [None]),
])
def test_names_numbers_and_values_say_what_is_right(answers, right):
    rule = Correctness(others=["rm"])
    rule.observe(answers)
    assert [rule.is_right(parts) for parts in answers] == right


def test_a_penalty_is_no_accuracy():
    rule, answer = Correctness(), {"mine": 1.0, "long": 0.0}
    rule.observe([answer])
    assert rule.is_right(answer, {"mine": 0.5, "long": -0.1}) is True
    assert rule.is_right({"long": 1.0}, {"long": -0.1}) is None


def test_the_option_names_a_part_or_a_number_of_it():
    answers = [{"mine": 0.4, "mine/boxed": 1.0, "math": 0.0}, {"mine": 1.0, "math": 0.0}, {"math": 1.0}]
    for part, right in (("mine/boxed", [True, False, True]), ("mine", [False, True, True]), (None, [False, False,
                                                                                                    True])):
        rule = Correctness(part)
        rule.observe(answers)
        assert [rule.is_right(parts) for parts in answers] == right, "rows with a rule of their own keep it"


def test_values_are_remembered_and_the_remedy_names_the_parts():
    rule = Correctness("boxd")
    rule.observe([{"mine": 1.0, **F}])
    assert rule.is_right({"mine": 1.0}) is True
    rule.observe([{"mine": 0.5, **F}])
    assert rule.is_right({"mine": 1.0}) is None, "a later evaluation has shown that it grades"
    text = rule.remedy([{"mine": 1.0, **F}])
    assert text.startswith("--accuracy_part boxd is none of them") and "(format, mine)" in text and '"acc"' in text
