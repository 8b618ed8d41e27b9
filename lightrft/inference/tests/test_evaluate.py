"""Evaluation of models on the same prompts: real runs, options, and the rows that ship."""
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightrft.cli.evaluate import evaluate, main
from lightrft.config.cli import parse_config
from lightrft.config.evaluate_schema import EvaluateConfig
from lightrft.config.schema import Config, RewardConfig
from lightrft.config.tree import options
from lightrft.datasets.suites import load_suite, SUITES
from lightrft.inference import evaluation
from lightrft.inference.evaluation import model_names
from lightrft.inference.loading import LoadedModel
from lightrft.rewards.base import RewardInput
from lightrft.rewards.manager import RewardManager
from lightrft.tests.support import launch, tiny, tiny_task
from lightrft.tests.support.generate_flips import EVALUATE_FLIPS
from lightrft.tests.support.launch import ROOT
from lightrft.tests.support.runs import read_lines
from lightrft.utils import tables
from lightrft.trainer.trial import try_inputs
from lightrft.utils.errors import UserError

SMALL = {"generate_max_len": 8, "prompt_max_len": 64, "engine_kv_mib": 4}


@dataclass
class Run:
    """An evaluation that is over."""
    folder: Path

    @property
    def results(self):
        return read_lines(self.folder / "results.jsonl")

    @property
    def inputs(self):
        return [row["input"] for row in read_lines(self.folder / "model.jsonl")]

    @property
    def outputs(self):
        return [row["output"] for row in read_lines(self.folder / "model.jsonl")]


@pytest.fixture(name="home", scope="module")
def fixture_home(tmp_path_factory):
    folder = tiny_task.write_home(tmp_path_factory.mktemp("home"))
    tiny.save_model(folder / "other", initializer_range=0.1, seed=1)
    return folder


def run(home, save, **given):
    """One evaluation to its end, in this process."""
    parsed = parsed_of(home, save, **given)
    evaluate(parsed, exits=False)
    return Run(parsed.config.folder)


def parsed_of(home, save, **given):
    """The options of an evaluation."""
    values = {"pretrain": ["@home/model"], "eval_data": ["@home/test.jsonl"], "output_path": str(save / "out"),
              "score": ["@home/reward.py"], **SMALL, **given}  # yapf: disable
    text = json.dumps(values).replace("@home", str(home)).replace("@save", str(save))
    return parse_config([], defaults=json.loads(text), tree=EvaluateConfig)


@pytest.mark.parametrize("name", list(EVALUATE_FLIPS))
def test_flipping_an_option_changes_something(name, home, tmp_path):
    flip = EVALUATE_FLIPS[name]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    before = flip.watch(run(home, tmp_path / "a", **flip.base))
    after = flip.watch(run(home, tmp_path / "b", **{**flip.base, name: flip.value}))
    assert before != after, f"--{name} {flip.value} changes nothing that was looked at: {before}"


def test_every_option_is_shown_here_or_in_training():
    own = set(options(EvaluateConfig)) - set(options(Config))
    assert own <= set(EVALUATE_FLIPS) <= set(options(EvaluateConfig)), own ^ set(EVALUATE_FLIPS)


def test_models_are_compared_on_the_same_prompts(home, tmp_path, capsys):
    models = ["@home/model", "@home/other"]
    both = run(home, tmp_path, pretrain=models, n_samples=4, temperature=1.0, pass_k=[1, 4], maj_k=[4],
               accuracy_part="compute_score")
    said = capsys.readouterr().out
    assert re.search(r"^source +metric +model +prompts +value +minus model +better +worse +p$", said, re.MULTILINE)
    for name in ("model", "other"):
        line = rf"^sums +maj@4 +{name} +6 +0\.000 \[0\.00, 0\.39\]"
        assert re.search(line, said, re.MULTILINE), said
    assert re.search(r"^sums +reward +other +6 .*\] +[+-]0\.\d+ ", said, re.MULTILINE), said
    assert {row["model"] for row in both.results} == {"model", "other"}
    (gap, ) = [row for row in read_lines(both.folder / "differences.jsonl") if row["metric"] == "reward"]
    means = {row["model"]: row["value"] for row in both.results if row["metric"] == "reward"}
    assert gap["difference"] == pytest.approx(means["other"] - means["model"]) and gap["prompts"] == 6
    assert not list(both.folder.glob("*.parts"))


def test_a_part_that_no_reward_has_is_an_error(home, tmp_path):
    """Known at the start; the number of a function, once it has judged: the answers stay."""
    with pytest.raises(UserError, match=r"--accuracy_part compute_scor: .*did you mean compute_score\?"):
        run(home, tmp_path, accuracy_part="compute_scor")
    assert not (tmp_path / "out" / "model.parts").exists()
    with pytest.raises(UserError, match="--accuracy_part compute_scor: "):
        list(try_inputs(parsed_of(home, tmp_path, accuracy_part="compute_scor").config))
    with pytest.raises(UserError, match="--accuracy_part compute_score/acc: .*; they give: compute_score. "):
        run(home, tmp_path, accuracy_part="compute_score/acc")
    assert run(home, tmp_path, accuracy_part="compute_score").results


def test_names_of_models_are_the_ends_of_their_paths():
    assert model_names(["/a/run1/hf", "/a/run2/hf"]) == ["run1-hf", "run2-hf"]
    assert model_names(["org/model", "/x/other"]) == ["model", "other"]


@pytest.mark.parametrize("name", SUITES)
def test_the_rows_that_ship_have_the_published_format(name):
    """And answers that their own rule accepts; a wrong one it does not."""
    if name != "gpqa":
        pytest.importorskip("math_verify")
    _, records = load_suite(f"{name}={ROOT / 'examples' / 'evaluation' / f'{name}.jsonl'}", True, True)
    rewards = RewardManager(RewardConfig())
    try:
        for record in records:
            asked = [RewardInput("", f"\\boxed{{{said}}}", label=record.label, reference=record.reference)
                     for said in (record.reference, "x" if name != "gpqa" else "E")]  # yapf: disable
            assert [score.total for score in rewards.collect(rewards.submit(asked))] == [1.0, 0.0]
    finally:
        rewards.shutdown()


def test_suites_are_evaluated_by_name(home, tmp_path):
    """Every suite has its own numbers and its own rule, whatever scores the other rows."""
    pytest.importorskip("math_verify")
    shipped = [f"{name}={ROOT / 'examples' / 'evaluation' / f'{name}.jsonl'}" for name in ("gsm8k", "gpqa")]
    found = run(home, tmp_path, eval_suite=shipped, prompt_max_len=480)
    assert {row["source"]: row["prompts"] for row in found.results if row["metric"] == "pass@1"} == {
        "all": 12, "sums": 6, "gsm8k": 4, "gpqa": 2}  # yapf: disable


@pytest.mark.parametrize("given,told", [
    ({"n_samples": 2}, "greedy answers to one prompt are all the same"),
    ({"pass_k": 2}, "--pass_k 2: needs 2 answers per prompt"),
    ({"maj_k": 3, "n_samples": 2, "temperature": 1}, "--maj_k 3: needs 3 answers"),
    ({"pretrain": "a/b,a/b"}, "--pretrain a/b: is given twice"),
    ({"pretrain": "/tmp,/tmp/../tmp/"}, "--pretrain /tmp /tmp/../tmp/: is given twice"),
    ({"pretrain": "./absent"}, "--pretrain ./absent: no such folder"),
    ({"eval_data": "none"}, "--eval_data is missing"),
    ({"eval_suite": "math50=x"}, "unknown suite 'math50'"),
])  # yapf: disable
def test_options_that_do_not_fit_are_refused(given, told, home, tmp_path, capsys):
    flags = {"pretrain": home / "model", "eval_data": home / "test.jsonl", "output_path": tmp_path / "out"}
    with pytest.raises(SystemExit) as done:
        main(launch.flags(flags | given))
    assert done.value.code == 2 and told in capsys.readouterr().err


def test_rows_without_a_reward_name_the_option(home, tmp_path):
    with pytest.raises(ValueError, match="no reward recipe for label .* for example --score math"):
        run(home, tmp_path, score=[])


def test_an_evaluation_without_any_score_fails_and_keeps_the_answers(home, tmp_path, monkeypatch):
    """Until the reward answers; a reward that is edited meanwhile is another one."""
    reward = tmp_path / "reward.py"
    reward.write_text("import os\ndef reward(prompts, completions, **columns):\n    os._exit(1)\n")
    given = {"score": [str(reward)], "reward_workers": 1}
    with pytest.raises(UserError, match="model: 6 of 6 responses are unscored .6 worker_died.*model.parts keeps"):
        run(home, tmp_path, **given)
    assert len(read_lines(tmp_path / "out" / "model.jsonl")) == 6
    monkeypatch.setattr(LoadedModel, "start", lambda self: pytest.fail("the engine is started"))
    with pytest.raises(UserError, match="6 of 6 responses are unscored"):
        run(home, tmp_path, **given)
    reward.write_text("def reward(prompts, completions, **columns):\n    return [1.0] * len(completions)\n")
    with pytest.raises(UserError, match="the content of .*reward.py"):
        run(home, tmp_path, **given)


@pytest.mark.parametrize("sources,width,gone", [(["own"], 80, {"source", "prompts"}), (["own"], 200, set()),
                                                (["own", "other"], 75, {"prompts", "better", "worse"})])
def test_a_narrow_terminal_shows_whole_numbers(sources, width, gone, monkeypatch):
    monkeypatch.setattr(tables, "screen", lambda: (width, False))
    interval = {"low": 0.25, "high": 0.75}
    rows = [{"source": source, "metric": "pass@1", "model": model, "prompts": 200} for source in sources
            for model in ("first", "second")]  # yapf: disable
    found = [{**row, "value": 0.5, **interval} for row in rows]
    apart = {"baseline": "first", "difference": 0.25, "better": 106, "worse": 6, "p": 1e-9, **interval}
    head, *lines = evaluation.table(found, [{**row, **apart} for row in rows if row["model"] == "second"])
    assert max(map(len, [head, *lines])) <= width and "…" not in "".join(lines)
    assert {"source", "prompts", "better", "worse"} - set(head.split()) == gone, head
    assert "+0.250 [0.25, 0.75]" in lines[1] and "1e-09" in lines[1] and len(lines) == len(rows)
