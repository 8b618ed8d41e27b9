"""Extraction and exact comparison of answers."""
import time

import pytest

from lightrft.rewards.rules import (exact_score, exact_verdict, FAST, format_score, math_score, plain_number,
                                    reference_answers)
from lightrft.rewards.base import RewardInput
from lightrft.rewards.spec import recipe_for
from lightrft.utils.marked_answers import boxed_answers, extract_answer


@pytest.mark.parametrize("response, answer", [
    (r"\boxed{1} then \boxed{2}", "2"),
    (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{1} and a cut-off \boxed{3", "1"),
    ("3 + 2\n#### 5\n", "5"),
    ("#### 1. Compute the sum\nthe answer is five", None),
    (r"\boxed{3} <answer>4</answer>", "4"),
    (r"<answer> \boxed{3} </answer>", "3"),
    (r"#### 7 or rather \boxed{8}", "8"),
    (r"\boxed 5$", "5"),
    ("the answer is 5", None),
])
def test_last_complete_answer_wins(response, answer):
    assert extract_answer(response) == answer, response


@pytest.mark.parametrize("reference, answer, verdict", [
    ("5", "5.0", True),
    ("5", "6", False),
    ("5", "-5", False),
    ("-3", "- 3", True),
    ("0.5", ".5", True),
    ("1/2", r"\dfrac{1}{2}", True),
    (r"\frac{2}{4}", "0.5", True),
    ("1000", "1,000", True),
    ("1000", r"1{,}000", None),
    ("12", "1,2", None),
    ("5", r"5 \text{ cm}", True),
    ("5", "5 dollars", True),
    ("5", "6 dollars", False),
    ("5", r"\$5.", True),
    ("5", "5 x", None),
    ("5", "5x", None),
    ("1/3", "0.333333", None),
    ("1/3", "0.33", False),
    ("yes", r"\text{Yes}", True),
    ("A", "b", False),
    ("B", "b", True),
    (r"2\sqrt{3}", r"\sqrt{12}", None),
    ("1/0", "1", None),
    ("7", "-", None),
    ("7", "9" * 5000, None),
])
def test_plain_answers_are_decided_exactly(reference, answer, verdict):
    assert exact_verdict(answer, reference) is verdict, (reference, answer)


def test_degenerate_responses_take_linear_time():
    start = time.perf_counter()
    for text in (r"\boxed{" * 5000, "<answer>" * 5000, "#### 1 " * 5000, r"\boxed{" + "1 a" * 10000 + "}", "{" * 30000):
        item = RewardInput("", "<think></think>" + text, reference="5")
        [rule(item) for rule in (exact_score, format_score, math_score)]
    assert time.perf_counter() - start < 1.0, "a broken response must not hold up the trainer"


def test_references_in_every_shape():
    assert reference_answers(5) == ["5"], "a number"
    assert reference_answers(["9", 10]) == ["9", "10"], "several accepted answers"
    assert reference_answers("2+3=5\n#### 5") == ["5"], "a raw GSM8K solution"
    assert reference_answers(r"so \boxed{x+1}") == ["x+1"], "a MATH solution"
    assert reference_answers(None) == [], "nothing"


def test_plain_number_ignores_what_is_no_number():
    assert [plain_number(text) for text in ("", ".", "1e3", "x", "1/0")] == [None] * 5, "not plain numbers"


@pytest.mark.parametrize("prompt, response, score", [
    ("", r"<think>a</think>\boxed{1}", 1.0),
    ("", r"<think>\boxed{2}</think> so \boxed{1}", 1.0),
    ("", r"\boxed{1}<think>a</think>", 0.0),
    ("", r"<think>a</think>\boxed{1}\boxed{2}", 0.0),
    ("", r"<think>a<think>b</think>\boxed{1}", 0.0),
    ("", r"<think>a</think></think>\boxed{1}", 0.0),
    ("", r"a</think>\boxed{1}", 0.0),
    ("<assistant><think>\n", r"a</think>\boxed{1}", 1.0),
    ("", r"<think>a</think>\boxed{1", 0.0),
    ("", "1", 0.0),
])
def test_format_wants_one_thought_then_one_box(prompt, response, score):
    assert format_score(RewardInput(prompt, response)).value == score, response


def test_exact_is_string_equality_of_the_last_box():
    right = RewardInput("", r"\boxed{0633} \boxed{ 633 }", reference=633)
    assert exact_score(right).value == 1.0, "outer blanks do not matter"
    assert exact_score(RewardInput("", r"\boxed{0633}", reference="633")).value == 0.0, "another string"
    assert exact_score(RewardInput("", "633", reference="633")).value == 0.0, "not boxed"
    assert boxed_answers(r"\boxed{1} \boxed{2") == ["1"], "only complete boxes"
    several = RewardInput("", r"\boxed{two}", reference=["2", "two"])
    assert exact_score(several).value == 1.0, "one of several accepted answers"
    assert FAST["choice"](RewardInput("", r"\boxed{b}", reference=["A", "B"])).value == 1.0
    assert exact_score(RewardInput("", r"\boxed{3}", reference=["2", "two"])).value == 0.0


def test_the_prompts_own_example_earns_nothing():
    prompt = r"Think within <think> </think>, then answer, like <think>x</think>\boxed{5}. What is 2 + 3?"
    item = RewardInput(prompt, "garbage", reference="5")
    assert [rule(item).value for rule in (exact_score, format_score, math_score)] == [0.0] * 3, "garbage is worth 0"


def test_no_reference_is_unscored_not_zero():
    item = RewardInput("", r"\boxed{1}")
    assert [rule(item).error for rule in (exact_score, math_score)] == ["no_reference"] * 2, "nothing to compare with"


@pytest.mark.parametrize("said, think, accuracy, form", [
    ("<answer>A high tone.</answer>", False, 1.0, 1.0),
    ("<answer>A high tone.</answer>", True, 1.0, 0.0),
    ("<think>it is high\n</think>\n<answer>a  high tone</answer>", True, 1.0, 1.0),
    ("<answer>a dog</answer>", False, 0.0, 1.0),
    ("a high tone", False, 0.0, 0.0),
])  # yapf: disable
def test_answers_in_tags(said, think, accuracy, form):
    item = RewardInput("q", said, label="avqa_rule", reference="a high tone", columns={"extra_info": {"think": think}})
    assert [FAST[name](item).value for name, _ in recipe_for(item)] == [accuracy, form]
