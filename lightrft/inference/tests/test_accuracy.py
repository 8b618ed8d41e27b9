"""pass@k, avg@k, maj@k and paired differences against naive counts."""
from itertools import combinations, product

import pytest

from lightrft.config.reward_schema import RewardConfig, SUITE_LABEL
from lightrft.inference import accuracy
from lightrft.inference.accuracy import (differences, final_answer, group_answers, maj_at_k, measures, parts_of,
                                         results, sign_test)
from lightrft.inference.generation import scored
from lightrft.rewards.base import RewardInput
from lightrft.rewards.correctness import Correctness
from lightrft.rewards.manager import RewardManager
from lightrft.trainer.evaluator import wilson_interval


def naive_majority(said, correct, k):
    """Every subset, every tie broken in every way."""
    shares = []
    for subset in combinations(range(len(said)), k):
        votes = [said[i] for i in subset if said[i] is not None]
        top = [answer for answer in set(votes) if votes.count(answer) == max(map(votes.count, votes))]
        rights = [sum(correct[i] for i in subset if said[i] == answer) / votes.count(answer) for answer in top]
        shares.append(sum(rights) / len(rights) if rights else 0.0)
    return sum(shares) / len(shares)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_maj_at_k_counts_subsets(k):
    for said in product("ab", "ab", "abc", ["c", None], ["a", None]):
        correct = [answer == "a" for answer in said]
        assert maj_at_k(correct, said, k) == pytest.approx(naive_majority(said, correct, k)), said


def test_many_subsets_are_sampled_always_alike_and_near_the_true_mean():
    said = ["a"] * 14 + ["b"] * 10
    correct = [answer == "a" for answer in said]
    found = maj_at_k(correct, said, 7)
    assert found == maj_at_k(correct, said, 7)
    from math import comb
    exact = sum(comb(14, i) * comb(10, 7 - i) for i in range(4, 8)) / comb(24, 7)
    assert found == pytest.approx(exact, abs=4 * (exact * (1 - exact) / accuracy.SUBSETS)**0.5)


def test_equal_answers_are_one_answer():
    same = ["\\boxed{0.5}", "so \\boxed{\\frac{1}{2}}", "#### 1/2", "<answer>0.50</answer>"]
    assert {final_answer(text) for text in same} == {"1/2"}
    assert final_answer("no idea") is None and final_answer("\\boxed{B}") != final_answer("\\boxed{C}")


def test_answers_that_are_a_choice_vote_by_their_letter():
    """In every form that the rule scores, in the rows of a run with the suite's own recipe."""
    said = ["The answer is B.", "\\boxed{b}", "\\boxed{(B) a quark}", "Answer: C", "no idea"]
    rewards = RewardManager(RewardConfig())
    try:
        scores = rewards.score([RewardInput("", text, label=f"{SUITE_LABEL}gpqa", reference="B") for text in said])
    finally:
        rewards.shutdown()
    graded = [{"prompt_id": "1", "output": text, "tokens": 1, **scored(score)} for text, score in zip(said, scores)]
    found = group_answers(graded, Correctness())["1"]
    assert found.said == ["B", "B", "B", "C", None]
    assert maj_at_k(found.correct, found.said, 5) == 1.0


def rows(source, uid, *rewards):
    return [{"prompt_id": uid, "data_source": source, "output": f"\\boxed{{{reward}}}", "tokens": 4, "reward": reward}
            for reward in rewards]  # yapf: disable


FIRST = group_answers(rows("x", "1", 1.0, 0.0) + rows("x", "2", 0.0, 0.0) + rows("y", "3", 1.0, None), Correctness())
OTHER = group_answers(rows("x", "1", 1.0, 1.0) + rows("x", "2", 1.0, 0.0) + rows("y", "3", 0.0, 0.0), Correctness())
WANTED = measures(2, [1, 2], [2])


def test_results_by_source_leave_out_what_is_unscored():
    found = {(row["source"], row["metric"]): row for row in results(FIRST, WANTED)}
    assert {key: found[key]["value"] for key in found if key[0] == "x"} == {
        ("x", "pass@1"): 0.25, ("x", "pass@2"): 0.5, ("x", "avg@2"): 0.25, ("x", "maj@2"): 0.25, ("x", "reward"): 0.25,
        ("x", "tokens"): 4, ("x", "unscored"): 0}  # yapf: disable
    assert found["all", "avg@2"]["value"] == pytest.approx((0.5 + 0 + 1) / 3) and found["all", "unscored"]["value"] == 1
    assert found["all", "pass@2"]["prompts"] == 2, "a prompt with one scored answer has no pass@2"
    assert ("y", "pass@2") not in found
    assert (found["x", "avg@2"]["low"], found["x", "avg@2"]["high"]) == wilson_interval(0.25, 2)


def test_without_a_part_that_says_what_is_right_there_is_only_the_mean_reward():
    rule, graded = Correctness(), rows("x", "1", 1.0, 0.5)
    rule.observe(parts_of(row) for row in graded)
    found = {row["metric"]: row["value"] for row in results(group_answers(graded, rule), WANTED)}
    assert found == {"reward": 0.75, "tokens": 4, "unscored": 0}


def test_differences_are_paired_by_prompt():
    found = {(row["source"], row["metric"]): row for row in differences(FIRST, OTHER, WANTED)}
    row = found["all", "avg@2"]
    assert row["difference"] == pytest.approx((0.5 + 0.5 - 1.0) / 3)
    assert (row["better"], row["worse"], row["prompts"]) == (2, 1, 3) and row["p"] == 1.0
    deviation = (sum(gap**2 for gap in (0.5, 0.5, -1.0)) / 2)**0.5
    assert row["high"] == pytest.approx(1.959964 * deviation / 3**0.5)
    assert found["x", "avg@2"]["low"] is None, "two equal gaps have no spread"


@pytest.mark.parametrize("better,worse,p", [(0, 0, 1), (1, 1, 1), (5, 0, 2 / 32), (9, 1, 22 / 1024), (1, 9, 22 / 1024)])
def test_sign_test_reference_numbers(better, worse, p):
    assert sign_test(better, worse) == pytest.approx(p)
