"""Judges in the run: comparisons within a group, grades, whole runs, refusals."""
import json
import shutil
from dataclasses import replace

import pytest

from lightrft.config.cli import parse_config
from lightrft.config.options import ConfigError
from lightrft.config.schema import RewardConfig
from lightrft.config.serve_schema import ServeConfig
from lightrft.preflight.validate import validate
from lightrft.rewards.base import RewardInput
from lightrft.rewards.manager import RewardManager
from lightrft.tests.support import runs, tiny
from lightrft.tests.support.scorers import says
from lightrft.utils.errors import UserError

POINTS = {"Response 1 is better": (1.0, 0.0), "Response 2 is better": (0.0, 1.0), "Both are equally good": (0.5, 0.5)}


def item(response, prompt="3", **given):
    return RewardInput(prompt, response, [{"role": "user", "content": prompt}], **given)


def scores(path, items, **options):
    manager = RewardManager(RewardConfig(reward_pretrain=[str(path)], **{"judge_max_len": 60} | options))
    return manager.collect(manager.submit(items))


def ring(path, prompt, responses):
    """Rewards by Hugging Face alone, one comparison at a time; None where it gives no known answer."""
    points = [[] for _ in responses]
    for i, first in enumerate(responses):
        j = (i + 1) % len(responses)
        text = says(path, f"{prompt} {first} {responses[j]}").rpartition("<answer>")[2].partition("</answer>")[0]
        found = (0.5, 0.5) if first == responses[j] else POINTS.get(text.strip(), ())
        for k, point in zip((i, j), found):
            points[k].append(point)
    return [sum(each) / len(each) if each else None for each in points]


def test_responses_to_a_prompt_are_compared_with_each_other(judge):
    """Of several prompts in one queue; each response comes first once and second once. Equal ones are a tie."""
    group = [item(text) for text in ("a", "bb", "aaa", "b")]
    others = [item("b", "4"), item("aa", "4"), item("b", "5"), item("b", "5")]
    found = scores(judge, group + others)
    assert [score.total for score in found] == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.5, 0.5]
    assert found[1].parts == {"rm": 0.0, "rm/answered": 1.0, "rm/first": 0.0, "rm/second": 0.0}
    assert [score.total for score in scores(judge, group, reward_offload=True)] == [1.0, 0.0, 1.0, 0.0]


def test_a_single_response_is_compared_with_the_reference(judge):
    found = scores(judge, [item("aa", "1", reference="b"), item("b", "2", reference=["a"]), item("a", "3")])
    assert [score.total for score in found] == [1.0, 0.0, None] and found[2].error == "no_rival"
    rows = [replace(item("aa", "1", reference=answer), group_id=row) for row, answer in enumerate("bb")]
    assert scores(judge, rows)[1].total == 1.0, "two rows with one prompt are two groups"


def test_no_answer_is_no_reward(judge, tmp_path):
    """Neither where the judge is cut off, nor where the request leaves it no room."""
    pair = [item("a"), item("b")]
    cut = scores(judge, pair, judge_max_len=3)
    assert [(score.total, score.error) for score in cut] == [(None, "no_answer")] * 2
    assert cut[0].parts == {"rm": None, "rm/answered": 0.0}
    long = scores(judge, [item("a" * 600), item("b"), *pair])
    assert [score.error for score in long] == ["too_long", None, None, None]
    assert (long[1].parts["rm/answered"], "rm/second" in long[1].parts) == (0.5, False), "one comparison is left"
    shutil.copytree(judge, tmp_path / "marked")
    tiny.tokenizer(extra="<|extra|>").save_pretrained(tmp_path / "marked")  # a token more than the model has
    unknown = scores(tmp_path / "marked", [item("a<|extra|>"), item("b"), item("a", "4"), item("b", "4")])
    assert [score.error for score in unknown] == ["unknown_token", "unknown_token", None, None]


def test_a_language_model_grades_by_the_template(judge, tmp_path):
    """The same weights without the entry of ``lightrft grm``: the number that the pattern finds counts."""
    shutil.copytree(judge, tmp_path / "plain")
    tiny.change_json(tmp_path / "plain" / "config.json", generative_reward_model=None)
    (tmp_path / "ask.txt").write_text("{prompt} {response} b")
    given = {"judge_template": str(tmp_path / "ask.txt"), "judge_score": r"Response (\d)"}
    found = scores(tmp_path / "plain", [item("a"), item("aa")], **given)
    assert [score.total for score in found] == [1.0, 1.0]
    (tmp_path / "ask.txt").write_text("3 b {response}")
    assert scores(tmp_path / "plain", [item("a")], **given)[0].parts == {"rm": 2.0}
    assert scores(tmp_path / "plain", [item("a")], **given | {"judge_score": r"Score: (\d)"})[0].error == "no_score"


def test_a_run_with_a_judge_has_its_verdicts(judge, scorers, tmp_path):
    """Beside another part, which the recipe of a data source leaves out; with evaluations."""
    home = runs.write_home(tmp_path)
    done = runs.run(home, tmp_path / "run", reward_pretrain=[f"better={judge}", f"rm={scorers[0]}"], judge_max_len=60,
                    reward=["better", "rm=0.5"], reward_recipe=["odd:better=1"], save_trajectories=True,
                    generate_max_len=4, n_samples_per_prompt=3, train_batch_size=12,
                    eval_data=[str(home / "test.jsonl")], eval_steps=-1, temperature=0.5)
    rows = done.rollout(1)
    judged = {}
    for row in rows:
        judged.setdefault(row["prompt"], []).append(row)
    expected = {prompt: ring(judge, prompt, [row["response"] for row in group]) for prompt, group in judged.items()}
    for prompt, group in judged.items():
        assert [row["parts"]["better"] for row in group] == expected[prompt], prompt
        for row in group:
            odd = "rm" not in row["parts"]
            assert row["reward"] is None or row["reward"] == pytest.approx(row["parts"]["better"] +
                                                                           (0 if odd else 0.5 *
                                                                            row["parts"]["rm"])), row
    known = [value for values in expected.values() for value in values if value is not None]
    assert done.metrics["reward/better/mean"] == pytest.approx(sum(known) / len(known))
    assert 0 <= done.metrics["reward/better/answered/mean"] <= 1
    assert done.metrics["eval/all/prompts"] == 4


@pytest.mark.parametrize("given,said", [
    ({"judge_template": "ask.txt"}, "--judge_template ask.txt: no model of --reward_pretrain is a language model"),
    ({"normalize_reward": True}, "is a generative reward model, which has no mean and std"),
    ({"advantage_estimator": "remax"}, "remax subtracts the reward of a response outside the group"),
    ({"reward_shard": True}, "--reward_shard: --strategy single on 1 rank shards no weights"),
])
def test_options_that_do_not_fit_a_judge(judge, given, said):
    values = {"pretrain": judge, "prompt_data": ["memory:x"], "reward_pretrain": [judge], **given}
    with pytest.raises(ConfigError) as found:
        validate(parse_config([], defaults=values).config, 1)
    assert said in str(found.value)


def test_kinds_are_told_apart(judge, scorers):
    with pytest.raises(ConfigError, match="--judge_max_len 9: no model of --reward_pretrain is a generative one"):
        validate(parse_config([], defaults={"reward_pretrain": [scorers[0]], "judge_max_len": 9}).config, 1)
    with pytest.raises(ConfigError, match="has no effect without --reward_pretrain; add it, or drop --judge_max_len"):
        validate(parse_config([], defaults={"judge_max_len": 9}).config, 1)
    with pytest.raises(ConfigError, match="has no mean and std of rewards in its config.json"):
        given = {"reward_pretrain": [scorers[0]], "normalize_reward": True}
        validate(parse_config([], defaults=given, tree=ServeConfig).config, 1)
    with pytest.raises(ConfigError, match="it is a generative model, and this command serves"):
        validate(parse_config([], defaults={"reward_pretrain": [judge]}, tree=ServeConfig).config, 1)
    with pytest.raises(UserError, match="--judge_max_len 512: .* has 512 positions for a request and its answer"):
        scores(judge, [], judge_max_len=512)
    assert json.loads((open(f"{judge}/config.json")).read())["generative_reward_model"]["system_prompt"] is None
