"""pass@k and reward@k, and that an evaluation leaves no trace in the training."""
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lightrft.rewards.base import Outcome
from lightrft.tests.support import field, runs
from lightrft.trainer.evaluator import pass_at_k, wilson_interval
from lightrft.trainer.trial import try_inputs
from lightrft.utils.curve import panels
from lightrft.utils.errors import UserError
from lightrft.utils.run_summary import RunSummary

no_picture = runs.no_picture
RIGHT_OR_WRONG = Path(field.__file__).parent / "rewards" / "right_or_wrong.py"


def trainer(home, folder, score=runs.letters, **options):
    return runs.ready(home, folder, score, eval_data=[str(home / "test.jsonl")], **options)


@pytest.mark.parametrize("k,expected", [(1, [0, 0.125, 0.5, 1]), (4, [0, 0.5, 0.985714, 1])])
def test_pass_at_k_reference_numbers(k, expected):
    assert [pass_at_k(8, c, k) for c in (0, 1, 4, 8)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("n,c,k", [(5, 2, 3), (4, 1, 4), (6, 3, 2)])
def test_pass_at_k_counts_subsets(n, c, k):
    from itertools import combinations
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("mean,prompts,low,high", [(0.8, 10, 0.4902, 0.9433), (0, 30, 0, 0.1135), (1, 30, 0.8865, 1)])
def test_intervals_reference_numbers(mean, prompts, low, high):
    assert wilson_interval(mean, prompts) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize("samples", [1, 8])
def test_intervals_cover_the_true_mean(samples):
    """Of 30 prompts that differ in difficulty, as AIME's: about 95 % for one sample each, more for several."""
    draw, covered = np.random.default_rng(0), 0
    for _ in range(1000):
        rates = draw.binomial(samples, draw.beta(0.5, 1.0, 30)) / samples
        low, high = wilson_interval(rates.mean(), 30)
        covered += low <= 1 / 3 <= high
    assert covered >= (930 if samples == 1 else 960), covered


def test_accuracy_is_the_share_of_right_answers_whatever_the_weights(home, tmp_path, capfd):
    """With the weights 0.9 and 0.09 no total is 1. A reward that grades has no accuracy, until the option names one."""
    (tmp_path / "graded.py").write_text("def compute_score(data_source, solution_str, ground_truth):\n"
                                        "    return {'score': 0.5, 'boxed': 1.0}\n")
    names = ("pass@1", "reward@1")

    def held_out(reward, **options):
        run = runs.run(home, tmp_path / f"{reward[0].rpartition('/')[2]}{len(options)}", reward=reward, eval_steps=-1,
                       eval_data=[str(home / "test.jsonl")], **options)
        return [run.metrics.get(f"eval/all/{name}") for name in names], capfd.readouterr().err, run

    (accuracy, mean), said, _ = held_out([f"{RIGHT_OR_WRONG}=0.9", "format=0.09"])
    assert accuracy == pytest.approx(mean / 0.9) and "Remedy" not in said
    graded, said, run = held_out([f"{tmp_path}/graded.py=0.9", "format=0.09"])
    assert graded == [None, pytest.approx(0.45)]
    assert said.count("no part of the reward says which answers are right") == 1 and "--accuracy_part" in said
    assert "held-out reward" in said and not re.search("reward +held-out +length", said), "the table"
    card = (run.folder / "hf" / "README.md").read_text()
    assert "pass@" not in card and "| eval/all/reward@1 |" in card
    assert [title for title, _ in panels(run.lines) if "held-out" in title] == ["held-out reward"]
    assert [change.name for change in RunSummary.of(run.lines).changes][0] == "eval/all/reward@1"
    named, said, _ = held_out([f"{tmp_path}/graded.py=0.9", "format=0.09"], accuracy_part="compute_score/boxed")
    assert named == [1.0, pytest.approx(0.45)] and "Remedy" not in said


def test_a_resumed_run_knows_that_a_part_has_graded(home, tmp_path):
    """The first evaluation sees 0.5, the second one 0 and 1 alone: the straight run has no accuracy, nor has the
    resumed one; a run that has seen nothing else has one."""
    options = dict(eval_data=[str(home / "test.jsonl")], eval_steps=1, disable_ckpt=False, save_steps=1)
    config = runs.config_of(home, tmp_path, **options)
    graded = runs.Judge(config.reward, lambda item: Outcome(0.5))
    binary = runs.Judge(config.reward, lambda item: Outcome(float(item.reference in "02")))
    runs.run(home, tmp_path / "run", graded, **options)
    for name, resumed in (("run", True), ("new", False)):
        later = runs.run(home, tmp_path / name, binary, **options, max_steps=2, load_checkpoint=resumed).metrics
        assert later["eval/all/reward@1"] == 0.5 and ("eval/all/pass@1" in later) is not resumed


GRADED = "def compute_score(data_source, solution_str, ground_truth):\n    return {'score': 0.5, 'boxed': 1.0}\n"


@pytest.mark.parametrize("part,said", [
    ("compute_scor", r"gives it \(did you mean compute_score\?\); they give: compute_score, format"),
    ("compute_score/boxd", r"compute_score/boxed\?\); they give: compute_score, compute_score/boxed, format")
])  # yapf: disable
def test_a_part_that_no_reward_has_ends_the_run_when_the_names_are_known(home, tmp_path, part, said):
    """Parts at the start, numbers of functions with the first call: the probe, or an evaluation without one."""
    (tmp_path / "graded.py").write_text(GRADED)
    options = dict(reward=[f"{tmp_path}/graded.py", "format"], eval_data=[str(home / "test.jsonl")], eval_steps=1,
                   accuracy_part=part)  # yapf: disable
    with pytest.raises(UserError, match=f"--accuracy_part {part}: .*{said}"):
        runs.build(home, tmp_path / "probed", **options, reward_probe=True)
    with pytest.raises(UserError, match=f"--accuracy_part {part}: .*{said}"):
        runs.ready(home, tmp_path / "run", **options).evaluator.run()
    config = runs.config_of(home, tmp_path / "plan", **options)
    with pytest.raises(UserError, match=f"--accuracy_part {part}: .*{said}"):
        list(try_inputs(config))


def test_metrics_per_source(home, tmp_path):
    """Row i is right in its samples j < i (of 4), so sources differ: even = rows 0, 2, odd = rows 1, 3."""
    calls, groups = {}, {}

    def score(item):
        groups.setdefault(item.group_id, []).append(item.reference)
        calls[item.prompt] = calls.get(item.prompt, -1) + 1
        return Outcome(float(calls[item.prompt] < int(item.reference)))

    made = trainer(home, tmp_path, score, eval_n_samples=4, eval_temperature=1.0, eval_pass_k=[1, 2])
    metrics, _ = made.evaluator.run()
    expected = {"all/pass@1": 6 / 16, "even/pass@1": 2 / 8, "odd/pass@1": 4 / 8, "odd/pass@2": (1 / 2 + 1) / 2,
                "even/pass@2": (0 + 5 / 6) / 2, "all/reward@4": 6 / 16, "odd/reward@4": 4 / 8, "odd/unscored": 0,
                "odd/judge": 4 / 8}  # yapf: disable
    assert {key: metrics[f"eval/{key}"] for key in expected} == pytest.approx(expected)
    assert 1 <= metrics["eval/all/len"] <= 12
    assert groups == {row: [str(row)] * 4 for row in range(4)}, "rewards know the rows apart"
    assert (metrics["eval/odd/pass@2/low"], metrics["eval/odd/pass@2/high"]) == wilson_interval(3 / 4, 2)
    assert (metrics["eval/all/prompts"], metrics["eval/odd/prompts"]) == (4, 2)


def test_suites_are_judged_by_their_own_rule_whatever_the_reward_is(home, tmp_path):
    """Two suites and a file in one evaluation; the run's reward is for training and the file."""
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n")
    choices = {"Correct Answer": "a", **{f"Incorrect Answer {n}": str(n) for n in (1, 2, 3)}}
    (tmp_path / "gpqa.jsonl").write_text("".join(json.dumps(choices | {"Question": q}) + "\n" for q in "xy"))
    made = runs.run(home, tmp_path / "run",
                    eval_suite=[f"{name}={tmp_path}/{name}.jsonl" for name in ("gsm8k", "gpqa")],
                    eval_data=[str(home / "test.jsonl")], reward=["format"], eval_steps=-1, prompt_max_len=400)
    metrics = made.metrics
    assert {"eval/gsm8k/math", "eval/gpqa/choice", "eval/odd/format", "reward/format/mean"} <= set(metrics)
    assert not {"eval/gsm8k/format", "eval/gpqa/format", "eval/odd/math", "reward/math/mean"} & set(metrics)
    assert [metrics[f"eval/{name}/prompts"] for name in ("gsm8k", "gpqa", "all")] == [1, 2, 7]
    assert metrics["eval/gpqa/pass@1/low"] == 0 < metrics["eval/gpqa/pass@1/high"] < 1


def test_unscored_responses_are_left_out_and_told(home, tmp_path):
    made = trainer(home, tmp_path, lambda item: Outcome(None, "down") if item.reference == "1" else Outcome(1.0))
    metrics, _ = made.evaluator.run()
    assert metrics["eval/odd/pass@1"] == 1 == metrics["eval/odd/reward@1"] == metrics["eval/all/pass@1"]
    assert metrics["eval/odd/unscored"] == 1 == metrics["eval/all/unscored"] == metrics["eval/odd/unscored/down"]
    assert metrics["eval/even/unscored"] == 0 and "eval/even/unscored/down" not in metrics


def test_pass_at_k_skips_groups_with_fewer_than_k_scored(home, tmp_path):
    """Row 0 has one scored (right) response of 4, row 2 three of which one is right."""
    calls = {}

    def score(item):
        number = calls[item.prompt] = calls.get(item.prompt, -1) + 1
        judged = number < {"0": 1, "2": 3}.get(item.reference, 0)
        return Outcome(float(number == 0)) if judged else Outcome(None, "down")

    made = trainer(home, tmp_path, score, eval_n_samples=4, eval_temperature=1.0, eval_pass_k=[1, 2, 4])
    metrics, _ = made.evaluator.run()
    assert metrics["eval/even/pass@1"] == pytest.approx((1 + 1 / 3) / 2) and metrics["eval/even/reward@4"] == 2 / 4
    assert metrics["eval/even/pass@2"] == pytest.approx(2 / 3) and "eval/even/pass@4" not in metrics
    told = {"eval/odd/len", "eval/odd/prompts", "eval/odd/unscored", "eval/odd/unscored/down"}
    assert {name for name in metrics if name.startswith("eval/odd")} == told, "nothing was scored"


def test_evaluations_repeat_and_follow_the_weights(home, tmp_path):
    made = trainer(home, tmp_path, eval_n_samples=2, eval_temperature=1.0, print_samples=2)
    first, answers = made.evaluator.run()
    assert (first, answers) == made.evaluator.run()
    shown = [(answer.sample.prompt.text, answer.index) for answer in answers]
    assert shown == [(prompt, index) for prompt in runs.PROMPTS[:4] for index in (0, 1)], "what the report shows"
    assert all(answer.sample.score == answer.score for answer in answers)
    made.evaluator.config.log.report = False
    printed = made.evaluator.run()[1]
    assert printed == [answers[0], answers[2]], "what is printed: an answer to each of --print_samples prompts"
    with torch.no_grad():
        for parameter in made.prepared["actor"].model.parameters():
            parameter.mul_(1.5)
    assert made.evaluator.run()[0] != first


def test_an_evaluation_touches_no_training_state(home, tmp_path):
    options = {"reward_running_norm": True, "eval_n_samples": 2, "eval_temperature": 1.0, "init_kl_coef": 0.1,
               "kl_target": 0.1}  # yapf: disable
    made = trainer(home, tmp_path, **options)
    made.maker.rewards.shutdown = made.engine.shutdown = lambda: None
    made.fit()

    def state():
        extra = made.extra_state()
        del extra["tripwires"], extra["correctness"]  # they watch the evaluations, and only tell
        own = {name: value.clone() for name, value in made.strategy.state_dict(made.prepared["actor"]).items()}
        return own, extra, torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    before = state()
    assert made.maker.calculator.moments.count == 8
    assert made.evaluate()["eval/all/len"] > 0
    after = state()
    assert all(torch.equal(value, after[0][name]) for name, value in before[0].items())
    assert before[1] == after[1] and torch.equal(before[2], after[2]) and before[3:] == after[3:]
    assert made.engine.weight_version == 1


def test_training_is_the_same_with_and_without_evaluations(home, tmp_path):
    options = {"max_steps": 3, "reward_running_norm": True, "init_kl_coef": 0.1}
    plain = runs.run(home, tmp_path / "plain", **options)
    often = runs.run(home, tmp_path / "often", eval_data=[str(home / "test.jsonl")], eval_steps=1, eval_at_start=True,
                     eval_n_samples=2, eval_temperature=0.7, **options)
    assert all(torch.equal(value, often.weights[name]) for name, value in plain.weights.items())
    assert [line["step"] for line in often.lines] == [0, 1, 2, 3] and len(plain.lines) == 3
    assert [line["reward/mean"] for line in often.lines[1:]] == [line["reward/mean"] for line in plain.lines]
    assert all("eval/all/reward@2" in line for line in often.lines)
