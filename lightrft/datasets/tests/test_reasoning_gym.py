"""Questions of reasoning-gym by name: the same in every run, others for evaluation, and scored by their own scorer."""
import pytest

from lightrft.datasets.reasoning_gym import reasoning_gym_rows
from lightrft.datasets.rows import DataError, load_rows
from lightrft.rewards.reasoning_gym import reasoning_gym
from lightrft.utils.errors import UserError

pytest.importorskip("reasoning_gym")
SUMS = "reasoning_gym:chain_sum?size=20&max_terms=3"


def test_questions_are_the_same_in_every_run_and_others_in_evaluation():
    train, held_out = load_rows(SUMS), load_rows(SUMS, "eval")
    assert train.rows == load_rows(SUMS).rows and len(train) == 20 and train.where(4) == f"{SUMS}, row 5"
    assert not {row["prompt"] for row in train.rows} & {row["prompt"] for row in held_out.rows}
    assert load_rows(f"{SUMS}&seed=1").rows[0]["prompt"] == train.rows[1]["prompt"]


def test_an_answer_is_scored_by_the_scorer_of_its_data_set():
    row = load_rows("reasoning_gym:countdown?size=1").rows[0]

    def score(text, role="assistant"):
        said = [{"role": "assistant", "content": row["reference"]}, {"role": role, "content": text}]
        return reasoning_gym(row["data_source"], text, row["reference"], row["extra_info"], said)

    answer = row["reference"]
    assert score(answer) == score(f"<think>1</think>{answer}") == score(f"so <answer>{answer}</answer>") == 1.0
    assert max(score("1 + 1"), score(f"<answer>1</answer>{answer}"), score(answer, "tool")) < 0.1
    row = load_rows("reasoning_gym:prime_factorization?size=1").rows[0]
    assert score("no number") == 0.0 and score(row["reference"]) == 1.0, "its scorer raises an error at a wrong answer"
    with pytest.raises(UserError, match="one of 'gsm8k' has no extra_info.entry"):
        reasoning_gym("gsm8k", "1", "1", {}, [])


@pytest.mark.parametrize("entry, words", [
    ("chain_sun", "no data set 'chain_sun' .did you mean chain_sum"),
    ("chain_sum?sise=3", "no option 'sise' .did you mean size"),
    ("chain_sum?size=many", "does not take .*'size': 'many'"),
    ("chain_sum?min_terms=7&max_terms=3", "max_terms must be >= min_terms"),
    ("chain_sum?size", "'size' is no list of options"),
])  # yapf: disable
def test_what_is_wrong_with_an_entry_is_told(entry, words):
    with pytest.raises(DataError, match=words):
        reasoning_gym_rows(f"reasoning_gym:{entry}", "train")
