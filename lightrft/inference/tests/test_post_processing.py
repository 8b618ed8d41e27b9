"""Training rows from scored responses: schemas, ties, duplicates and unscored responses."""
from collections import Counter

import pytest

from lightrft.inference.post_processing import normalise_rewards, post_process
from lightrft.utils.errors import UserError

TEMPLATE = "{input} <rm_score>: {reward} "


def rows(*triples):
    return [{"input": prompt, "output": output, "reward": reward} for prompt, output, reward in triples]


SCORED = rows(("a", "x", 0.5), ("a", "y", 2.0), ("a", "z", -1.0), ("b", "x", 1.0), ("b", "y", 1.0), ("a", "y", 2.0),
              ("c", "x", 3.0), ("c", "y", None), ("d", "x", None), ("e", "x", float("nan")))  # yapf: disable


def test_rejection_sampling_takes_the_best_and_counts_ties():
    found, counts = post_process("rs", SCORED, TEMPLATE)
    assert found == rows(("a", "y", 2.0), ("b", "x", 1.0), ("c", "x", 3.0)), "the first of equals, in order of prompts"
    assert counts == Counter({"ties for the best response": 1, "repeated responses": 1, "unscored responses": 3})


@pytest.mark.parametrize("cut", ["length", "MAX_TOKENS", {"type": "length", "length": 8}])  # of engines and APIs
def test_truncated_responses_are_left_out_unless_they_are_asked_for(cut):
    scored = [row | {"finish_reason": reason} for row, reason in zip(SCORED[:3], ("stop", cut, "stop"))]
    (best, ), counts = post_process("rs", scored, TEMPLATE)
    assert best == scored[0] and counts["truncated responses left out"] == 1
    (best, ), counts = post_process("rs", scored, TEMPLATE, keep_truncated=True)
    assert best == scored[1] and not counts["truncated responses left out"]


def test_pairs_have_a_better_and_a_worse_response():
    found, counts = post_process("iter_dpo", SCORED, TEMPLATE)
    assert found == [{"prompt": "a", "chosen": "y", "chosen_reward": 2.0, "rejected": "z", "rejected_reward": -1.0}]
    assert counts["prompts without a pair: equal rewards"] == counts["prompts without a pair: one response"] == 1


def test_a_pair_needs_rewards_that_tell_its_responses_apart():
    """A reward model whose rewards of a prompt hardly differ orders noise."""
    scored = rows(("a", "x", 1.06), ("a", "y", 1.05), ("b", "x", 1.0), ("b", "y", 0.5), ("c", "x", 1.0),
                  ("c", "y", -1.0))
    found, counts = post_process("iter_dpo", scored, TEMPLATE, min_gap=0.5)
    assert [pair["prompt"] for pair in found
            ] == ["b", "c"] == [pair["prompt"] for pair in post_process("iter_dpo", scored[2:], TEMPLATE)[0]]
    assert counts == {"prompts without a pair: rewards closer than --min_reward_gap": 1}
    with pytest.raises(UserError, match="no row is left of 2 responses .1 prompts without a pair: rewards closer than"):
        post_process("iter_dpo", scored[:2], TEMPLATE, min_gap=0.5)


def test_pairs_whose_first_response_is_best_or_worst():
    for order in (0.0, 1.0, 2.0), (2.0, 1.0, 0.0):
        group = rows(*(("a", f"r{reward:.0f}", reward) for reward in order))
        (pair, ), _ = post_process("iter_dpo", group, TEMPLATE)
        assert (pair["chosen"], pair["rejected"]) == ("r2", "r0")


def test_conditional_sft_puts_rewards_into_prompts():
    found, _ = post_process("csft", SCORED, TEMPLATE)
    assert found[0] == {"input": "a <rm_score>: 0.50 ", "output": "x", "reward": 0.5}
    assert [row["output"] for row in found] == ["x", "y", "z", "x", "y", "x"]
    (row, ), _ = post_process("csft", rows(("{reward}?", "x", 1.0)), "[{reward}] {input}")
    assert row["input"] == "[1.00] {reward}?", "a prompt that looks like the template stays as it is"
    (row, ), _ = post_process("csft", rows(("a <rm_score>: 5.00 ", "x", 1.0)), TEMPLATE, " <rm_score>: 5.00 ")
    assert row["input"] == "a <rm_score>: 1.00 ", "the wish of a model of conditional SFT is replaced"


def test_rewards_are_normalised_over_all_scored_rows():
    found = [row["reward"] for row in normalise_rewards(rows(("a", "x", 1.0), ("b", "x", 3.0), ("c", "x", None)))]
    assert found == [pytest.approx(-(0.5**0.5)), pytest.approx(0.5**0.5), None]
    with pytest.raises(UserError, match="the 2 rewards are all equal"):
        normalise_rewards(rows(("a", "x", 1.0), ("b", "x", 1.0)))


def test_prompts_with_media_are_told_apart_by_their_row():
    seen = [{"input": "<image>?", "prompt": [{"role": "user", "content": "?"}], "images": [f"{i}.png"],
             "prompt_id": f"0:{i}", "output": "x", "reward": 1.0} for i in range(2)]  # yapf: disable
    found, _ = post_process("rs", seen, TEMPLATE)
    assert [row["images"] for row in found] == [["0.png"], ["1.png"]] and found[0]["prompt"] == seen[0]["prompt"]
    with pytest.raises(UserError, match="the prompts are chats, with media"):
        post_process("csft", seen, TEMPLATE)


@pytest.mark.parametrize("name,kept", [("rs", ["x", "y"]), ("csft", ["x", "z", "y"]), ("iter_dpo", ["x"])])
def test_responses_without_text_are_left_out_and_counted(name, kept):
    """Trainers refuse such rows, so one of them would end a loop: the worst, or the first of equals."""
    scored = rows(("a", "x", 1.0), ("a", "z", 0.5), ("a", " \n", 0.0), ("b", "", 1.0), ("b", "y", 1.0))
    found, counts = post_process(name, scored, TEMPLATE)
    assert [row.get("output", row.get("chosen")) for row in found] == kept and counts["empty responses"] == 2
    assert name != "iter_dpo" or found[0]["rejected"] == "z"


@pytest.mark.parametrize("name,told", [("rs", "3 unscored"), ("iter_dpo", "3 unscored"), ("csft", "3 unscored")])
def test_nothing_left_is_an_error(name, told):
    with pytest.raises(UserError, match=f"no row is left of 3 responses .{told}"):
        post_process(name, rows(*(("a", letter, None) for letter in "xyz")), TEMPLATE)
