"""References as data sets write them: what built-in rewards accept, and the forms that are refused before a run."""
import numpy as np
import pytest

from lightrft.config.schema import DataConfig
from lightrft.config.reward_schema import RewardConfig
from lightrft.datasets.prompt_rows import to_prompts
from lightrft.datasets.rows import load_rows
from lightrft.rewards.base import RewardInput, REWARDS
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.references import accepted_answers
from lightrft.rewards.validation import check_references, probe, RewardProbeError
from lightrft.tests.support import field


def scores(part, reference, *answers):
    """Score answers in the form that a part reads."""
    form = "<answer>{}</answer>" if part == "answer" else r"\boxed{{{}}}"
    return REWARDS.get(part)([RewardInput("", form.format(answer), reference=reference) for answer in answers])


@pytest.mark.parametrize("part", ["exact", "math", "answer"])
@pytest.mark.parametrize("case", ["reference_object", "reference_json_text", "extra_info_json_text"])
def test_the_cases_of_the_field(part, case):
    if part == "math":
        pytest.importorskip("math_verify")
    records = to_prompts(load_rows(str(field.ROWS / f"{case}.jsonl")), DataConfig())
    for record in records[:2]:
        assert scores(part, record.reference, "Oslo", "Bergen") == [1, 0]


def test_objects_of_verl_as_texts_are_objects():
    records = to_prompts(load_rows(str(field.ROWS / "extra_info_json_text.jsonl")), DataConfig())
    assert [record.columns["extra_info"]["index"] for record in records] == [*range(16)]
    assert records[0].columns["reward_model"] == {"style": "rule", "ground_truth": "Oslo"}


@pytest.mark.parametrize("reference,accepted", [
    (None, []), ("", []), (float("nan"), []), ([None, " "], []), (42, ["42"]), (42.0, ["42", "42.0"]), (True, ["True"]),
    (["a", ["b", 1]], ["a", "b", "1"]), (np.array(["a", "b"]), ["a", "b"]), (b"Oslo", ["Oslo"]),
    ({"value": "Oslo", "aliases": ["Christiania", "Oslo"]}, ["Oslo", "Christiania"]),
    ({"text": ["a"], "answer_start": [3]}, ["a"]), ([{"text": "a"}, {"text": "b"}], ["a", "b"]),
    ({"target": None, "answer": np.array([1, 2])}, ["1", "2"]), ('{"target": ["a"]}', ["a", '{"target": ["a"]}']),
    ("['a', 'b']", ["a", "b", "['a', 'b']"]), ('"a"', ["a", '"a"']), ("[42]", ["42", "[42]"]),
])  # yapf: disable
def test_accepted_answers(reference, accepted):
    assert accepted_answers(reference) == accepted


@pytest.mark.parametrize("text", [
    "42", "[1, 2]", "[0, 1)", "(1, 2)", "{1, 2}", "[1, 2, 3]", "[]", "null", "true", '{"a": 1}', "[x, y]", "1e3",
    "[[1, 0], [0, 1]]", r"\{1, 2\}", '"', "[", "[1, 2", "{'a'}"
])  # yapf: disable
def test_plain_answers_that_look_like_json_stay_as_they_are(text):
    assert accepted_answers(text) == [text]
    assert scores("exact", text, text, "0") == [1, 0] and scores("math", text, text)[0] == 1


def test_an_interval_is_not_one_of_its_ends():
    pytest.importorskip("math_verify")
    assert scores("math", "[1, 2]", "[1, 2]", "[1,2]", "1", "2", "[1, 3]") == [1, 1, 0, 0, 0]
    assert scores("math", '["1/2", "0.5"]', r"\frac{1}{2}", "0.50", "2") == [1, 1, 0]
    assert scores("choice", '["B", "C"]', "c", "A") == [1, 0]


@pytest.fixture
def manager():
    """Return a function that makes the rewards of a run; they end with the test."""
    made = []

    def make(*reward):
        made.append(RewardManager(RewardConfig(reward=[*reward], reward_workers=1)))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


UNREADABLE = [({"inputs": ["1"]}, "an object of inputs, and its answer is looked for in target"), (b"\xff", "no UTF-8"),
              ("['a' 'b']", "a printed array without commas"), ({"target": []}, "holds no answer"),
              ([{"inputs": 1}], "an object of inputs")]  # yapf: disable


@pytest.mark.parametrize("reference,problem", UNREADABLE)
def test_an_unreadable_reference_is_an_error_with_its_row_before_the_run(manager, reference, problem):
    rows = [RewardInput("first", "", reference="Oslo"), RewardInput("second prompt", "", reference=reference)]
    with pytest.raises(RewardProbeError, match=f"'exact' cannot read .*second prompt.*{problem}.*--reference_key"):
        probe(manager("exact"), rows)
    (score, ) = manager("exact").score([RewardInput("", r"\boxed{a}", reference=reference)])
    assert score.total is None and score.error in ("reference_form", "no_reference")


def test_texts_of_tests_are_no_answers_to_mathematics(manager):
    row = RewardInput("", "", reference='{"inputs": ["1"], "outputs": ["2"]}')
    with pytest.raises(RewardProbeError, match="'math' cannot read .*a text of an object"):
        check_references(manager("math"), [row])
    check_references(manager("exact"), [row])


def test_functions_of_users_get_references_as_they_are(manager, tmp_path):
    file = tmp_path / "tests_passed.py"
    file.write_text(
        "def compute_score(solution_str, ground_truth):\n    return float(ground_truth['inputs'] == ['1'])\n")
    rewards, row = manager(str(file)), RewardInput("", "", reference={"inputs": ["1"]})
    probe(rewards, [row])
    assert rewards.score([row])[0].total == 1
