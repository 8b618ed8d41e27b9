"""The samples that the report shows, token by token."""
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightrft.rewards.base import Outcome
from lightrft.tests.support import runs, tiny
from lightrft.tests.support.runs import no_picture  # noqa: F401  (a fixture)
from lightrft.trainer import sample_recorder
from lightrft.trainer.sample_recorder import Response, TokenTexts
from lightrft.types import Episode, Prompt, Segment
from lightrft.utils.play import Play
from lightrft.utils.score import Score

OPTIONS = {"max_steps": 5, "rollout_batch_size": 6, "n_samples_per_prompt": 10, "train_batch_size": 60,
           "save_trajectories": True, "num_trajectories_to_save": 0, "disable_ckpt": False, "save_steps": 2,
           "async_save": False, "eval_n_samples": 2, "eval_temperature": 1.0, "eval_steps": 1, "eval_at_start": True,
           "stop": []}  # yapf: disable


def judge(item):
    return Outcome(None, "slow") if item.response[:1] < "5" else runs.letters(item)


@pytest.fixture(name="done", scope="module")
def fixture_done(tmp_path_factory, no_picture):  # noqa: F811
    home = runs.write_home(tmp_path_factory.mktemp("home"))
    save = tmp_path_factory.mktemp("runs") / "mine"
    config = runs.config_of(home, save, eval_data=[str(home / "test.jsonl")], **OPTIONS)
    return runs.run(home, save, runs.Judge(config.reward, judge), eval_data=[str(home / "test.jsonl")], **OPTIONS)


def records(folder, kind):
    return [record for record in runs.read_lines(folder / "samples.jsonl") if record["kind"] == kind]


def test_a_record_is_the_rollout_of_its_step(done):
    found = records(done.folder, "training")
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5]
    unscored = 0
    for record in found:
        rollout = {(row["uid"], row["index"]): row for row in done.rollout(record["step"])}
        assert [len(group["samples"]) for group in record["groups"]] == [8] * 4
        for group in record["groups"]:
            for sample in group["samples"]:
                row = rollout[group["uid"], sample["index"]]
                text = "".join(sample["text"]).removesuffix("<|im_end|>")
                text, expected = (re.sub("\ufffd+", "\ufffd", each) for each in (text, row["response"]))
                assert (text, group["prompt"], group["reference"]) == (expected, row["prompt"], row["reference"])
                assert (sample["reward"], sample["error"]) == (row["reward"], row["error"])
                assert sample["advantages"] == pytest.approx(row["advantage"], abs=1e-4), "one for all of its tokens"
                assert len(sample["text"]) == len(sample["logprobs"]) == sample["tokens"]
                assert max(sample["logprobs"]) <= 0
                unscored += sample["reward"] is None
    assert unscored, "unscored samples are shown as such"


def test_the_same_prompts_come_again(done):
    """All prompts are in every batch here: the training prompts with the lowest hashes are, too."""
    for kind in ("training", "held-out"):
        found = [sorted(group["uid"] for group in record["groups"]) for record in records(done.folder, kind)]
        assert len(found) >= 5 and found.count(found[0]) == len(found), kind
    assert [record["step"] for record in records(done.folder, "held-out")] == [0, 1, 2, 3, 4, 5]
    answers = [group["samples"] for record in records(done.folder, "held-out") for group in record["groups"]]
    assert all(len(samples) == 2 and "advantages" not in samples[0] for samples in answers)


def test_a_resumed_run_records_what_a_straight_one_does(done, tmp_path_factory):
    before = (done.folder / "samples.jsonl").read_text(encoding="utf-8")
    newest = done.folder / "checkpoints" / "step_000005"
    newest.rename(newest.with_name("gone"))
    home = done.trainer.config.model.pretrain.removesuffix("/model")
    config = done.trainer.config
    options = OPTIONS | {"load_checkpoint": True, "eval_data": config.data.eval_data}
    runs.run(Path(home), done.folder, runs.Judge(config.reward, judge), **options)
    assert (done.folder / "samples.jsonl").read_text(encoding="utf-8") == before


def test_a_long_response_is_cut_in_the_middle():
    ids, texts = list(range(4, 94)), TokenTexts(tiny.tokenizer())

    def response(advantages, *segments, total=1.0):
        return Response(Episode(Prompt("u", [3, 4], ""), 0, 0, [*segments], score=Score(total)), advantages)

    whole = response([i / 10 for i in range(90)], Segment(ids, [-0.5] * 90))
    row = whole.row(texts, 11)
    assert row["cut"] == [5, 80] and row["tokens"] == 90
    assert row["text"] == [*"!\"#$%", *"vwxyz"] and len(row["logprobs"]) == 10
    assert row["advantages"] == [0.0, 0.1, 0.2, 0.3, 0.4, 8.5, 8.6, 8.7, 8.8, 8.9]
    assert "cut" not in whole.row(texts, 100)
    runs_of_tokens = Segment(ids[:1], [-0.5]), Segment(ids[1:2], [0.0], drawn=False), Segment(ids[2:3], [-0.25])
    appended = response([2.0, 0.0, 2.0], *runs_of_tokens)
    assert appended.row(texts, 8)["advantages"] == 2.0 and appended.row(texts, 8)["logprobs"] == [-0.5, None, -0.25]
    assert response([], total=None).row(texts, 8)["text"] == []


def test_a_record_says_who_wrote_its_tokens():
    """And the rewards of turns, on tokens that are shown; what is cut has none."""
    roles = ["assistant", "tool", "user", "assistant", "environment", "assistant"]
    play = Play([{"role": role, "content": ""} for role in roles], rewards=[(3, 0.5), (7, -1.0), (9, 2.0)],
                limit="max_turns", turns=3, calls=1)  # yapf: disable
    runs_of_tokens = [Segment(ids, [-0.5] * len(ids), drawn) for ids, drawn in
                      (([5, 6], True), ([7, 8, 9], False), ([10], True), ([11], False), ([12], True))]  # yapf: disable
    episode = Episode(Prompt("u", [3, 4], ""), 0, 0, runs_of_tokens, score=Score(1.0), play=play)
    texts, entropies = TokenTexts(tiny.tokenizer()), [i / 8 for i in range(8)]
    row = Response(episode, [1.0] * 8, entropies).row(texts, 100)
    assert row["given"] == [[2, 5, "tool, user"], [6, 7, "environment"]]
    assert row["rewards"] == [[1, 0.5], [5, -1.0], [7, 2.0]]
    assert row["environment"] == {"turns": 3, "calls": 1, "ended": "max_turns"}
    assert row["entropies"] == [0.0, 0.12, None, None, None, 0.62, None, 0.88]
    row = Response(episode, []).row(texts, 4)
    assert (row["cut"], row["given"], row["rewards"]) == ([2, 4], [[2, 3, "environment"]], [[1, 0.5], [3, 2.0]])


def test_a_record_of_a_fork_shows_all_branches():
    """The prompt that an environment wrote anew is a run of its own, with what it told, or "rewritten"."""
    roles = ["assistant", "assistant", "user", "assistant"]
    play = Play([{"role": role, "content": ""} for role in roles], rewards=[(3, 0.5), (11, 2.0)])
    episode = Episode(Prompt("u", [3, 4], ""), 0, 0, score=Score(1.0), play=play)
    for prompt, ids in (([3, 5, 5], [6, 7]), ([3, 8], [9]), ([], [6])):
        episode.add([Segment(ids, [-0.5] * len(ids))], "stop")
        episode.fork(replace(episode.prompt, token_ids=prompt)) if prompt else None
    row = Response(episode, [2.0] * 9).row(TokenTexts(tiny.tokenizer()), 100)
    assert row["tokens"] == 9 and row["given"] == [[2, 5, "rewritten"], [6, 8, "user"]]
    assert row["rewards"] == [[1, 0.5]] and row["advantages"] == 2.0
    assert [logprob is None for logprob in row["logprobs"]] == [0, 0, 1, 1, 1, 0, 1, 1, 0]


@pytest.mark.parametrize("text", ["naïve 😀 漢字", "  two\n\n", "<|im_end|>x", "é" * 5])
def test_the_texts_of_tokens_join_to_the_response(text):
    tokenizer = tiny.tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = TokenTexts(tokenizer)(tokenizer.encode("a")[0], ids)
    assert "".join(found) == text and len(found) == len(ids)
    damaged = TokenTexts(tokenizer)(tokenizer.encode("a")[0], tokenizer.encode("é")[:1] + tokenizer.encode("b"))
    assert "".join(damaged).endswith("b"), "a character that never ends hides nothing"


def test_records_are_bounded_in_number_and_size(done, monkeypatch):
    recorder = done.trainer.recorder
    recorder.next["training"] = 0
    due = [step for step in range(1, 1001) if recorder._due("training", step, 1000)]
    assert due[:3] == [1, 33, 65] and due[-1] == 1000 and len(due) <= sample_recorder.RECORDS + 2
    held_out = {"text": [" longish"] * sample_recorder.TOKENS, "logprobs": [-10.123] * sample_recorder.TOKENS}
    training = held_out | {"advantages": [-10.1234] * sample_recorder.TOKENS,
                           "entropies": [10.12] * sample_recorder.TOKENS}  # yapf: disable
    size = sum(len(json.dumps(line)) + 4 * sample_recorder.CHARACTERS for line in (training, held_out))
    assert (sample_recorder.RECORDS + 2) * size < 20e6, "with every token's advantage its own"
