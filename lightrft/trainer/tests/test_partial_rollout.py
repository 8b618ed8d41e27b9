"""Oversampling: every prompt is trained once, whole and in time, with the log-probs of the weights that drew it."""
import json
import re
from dataclasses import replace

import pytest
import torch

from lightrft.tests.support import runs, tiny, tiny_task
from lightrft.tests.support.launch import finish
from lightrft.trainer.carried_groups import group_state, load_group
from lightrft.trainer.fast_exp_maker import FastExperienceMaker, NaiveExperienceMaker
from lightrft.trainer.prompt_source import PromptSource
from lightrft.types import Batch, Episode, Prompt, Segment
from lightrft.utils.errors import UserError

no_picture = runs.no_picture
BATCH, PROMPTS, SIZE = 4, 22, 3
OPTIONS = {
    "oversample": 1.5, "rollout_batch_size": BATCH, "n_samples_per_prompt": SIZE, "train_batch_size": BATCH * SIZE,
    "max_steps": 0, "generate_max_len": 24, "save_trajectories": True, "actor_learning_rate": 1e-2
}
VOLATILE = re.compile("time/|perf/|.*tokens_per_s$")


@pytest.fixture(name="home", scope="module")
def home_fixture(tmp_path_factory):
    folder = runs.write_home(tmp_path_factory.mktemp("home"))
    tiny_task.write_rows(folder / "train.jsonl", tiny_task.rows(PROMPTS))
    return folder


def trainer_of(home, folder, **options):
    cfg = runs.config_of(home, folder, **OPTIONS | options)
    return runs.trainer_of(cfg, runs.strategy_of(cfg))


def watched(home, folder, **options):
    """A run, the batches that it trained on, and the weights of every version."""
    made, batches, weights = trainer_of(home, folder, **options), [], {}
    complete, sync = made.maker.complete, made.sync_weights
    made.maker.complete = lambda episodes, *args: batches.append(Batch.of(episodes)) or complete(episodes, *args)

    def keep(version):
        weights[version] = runs.weights(made, "actor")
        return sync(version)

    made.sync_weights = keep
    made.fit()
    return runs.Run(made, folder), batches, weights


def sequences(exp):
    """Each sequence alone: tokens, log-probs, versions."""
    cu = exp.cu_seqlens.tolist()
    columns = exp.token_ids, exp.rollout_logprobs, exp.weight_versions
    return [[column[a:b].tolist() for column in columns] for a, b in zip(cu, cu[1:])]


def test_without_overlap_generation_stops_at_the_same_token(home, tmp_path):

    def first(kind):
        made = trainer_of(home, tmp_path / kind.__name__, oversample=2.0)
        made.maker.__class__ = kind
        made.sync_weights(0)
        rollout = made.source.make(0)
        return rollout.episodes, made.source.groups, rollout.metrics["rollout/partial/left_groups"]

    chosen, carried, left = first(FastExperienceMaker)
    assert (chosen, carried, left) == first(NaiveExperienceMaker) and left == BATCH
    assert any(episode.open for group in carried.values() for episode in group)


@pytest.mark.parametrize("oversample,max_staleness,episodes", [(1.25, 1, 1), (2.0, 1, 2), (2.0, 3, 2)])
def test_every_prompt_is_trained_once_and_as_if_generated_in_one_go(oversample, max_staleness, episodes, home,
                                                                    tmp_path):
    """The weights never change here, so that a response may be put together from any number of pieces."""
    options = {"num_episodes": episodes, "actor_learning_rate": 0.0, "oversample": oversample, "max_staleness":
               max_staleness}  # yapf: disable
    done, batches, _ = watched(home, tmp_path / "run", **options)
    steps = PROMPTS * episodes // BATCH
    assert [line["rollout/samples"]
            for line in done.lines] == [BATCH * SIZE] * steps == [exp.num_seqs for exp in batches]
    other = trainer_of(home, tmp_path / "other", oversample=1.0)
    other.sync_weights(0)
    other.prepared["actor"].model.eval()
    whole = Batch.of(other.maker.generate(other.loader.draw(steps * BATCH), "draw")[0])
    expected = {tuple(tokens): logprobs for tokens, logprobs, _ in sequences(whole)}
    found = [sequence for exp in batches for sequence in sequences(exp)]
    assert sorted(tuple(tokens) for tokens, *_ in found) == sorted(tuple(tokens) for tokens, *_ in sequences(whole))
    for tokens, logprobs, _ in found:
        assert logprobs == pytest.approx(expected[tuple(tokens)], abs=3e-5), "not a rounding of these sharp logits"
    assert sum(line["rollout/tokens"] for line in done.lines) == whole.loss_mask.sum()
    ages = [line["rollout/staleness/max"] for line in done.lines]
    assert max(ages) <= max_staleness and (oversample < 2 or max(ages) == max_staleness), f"staleness {ages}"
    assert done.lines[-1]["rollout/partial/left_groups"] == 0 and not done.trainer.source.groups
    assert done.trainer.loader.position == steps * BATCH, "prompts were drawn and not trained"


def test_logprobs_are_those_of_the_weights_that_drew_each_token(home, tmp_path):
    done, batches, weights = watched(home, tmp_path, oversample=2.0, max_staleness=2, max_steps=6)
    model, seen = tiny.model(num_hidden_layers=1, initializer_range=0.5), set()
    for step, exp in enumerate(batches):
        assert torch.equal(exp.weight_versions >= 0, exp.loss_mask)
        for tokens, logprobs, versions in sequences(exp):
            for version in set(versions) - {-1}:
                model.load_state_dict(weights[version], strict=False)
                with torch.no_grad():
                    scores = model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
                naive = scores.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
                for t in (t for t, v in enumerate(versions) if v == version):
                    assert logprobs[t] == pytest.approx(naive[t - 1], abs=1e-4), (step, version)
            drawn = [version for version in versions if version >= 0]
            assert drawn == sorted(drawn) and drawn[-1] <= step
            seen.add(len(set(drawn)))
        line, age = done.lines[step], step - exp.weight_versions[exp.loss_mask].float()
        assert line["rollout/staleness/mean"] == pytest.approx(age.mean().item())
        assert line["rollout/stale_frac"] == pytest.approx((age > 0).float().mean().item())
        assert line["rollout/same_policy/abs_logp_mean"] < 1e-5, "tokens of other weights were taken for current ones"
        assert (line["rollout/mismatch/abs_logp_mean"] > 1e-3) == (line["rollout/stale_frac"] > 0)
    assert seen >= {1, 2}, "no response has tokens of two versions"


def test_appended_tokens_stay_masked_in_a_response_of_several_steps():
    """Cut off in the second of three turns; by a checkpoint in between too."""
    group = Episode.group(Prompt("u", [5, 6], "ab"), 0, [9])
    response, = group
    response.add([Segment([7], [-0.1], version=3)], "stop")
    response.give([20])
    response.add([Segment([8], [-0.2], version=3)], "abort")
    state = json.loads(json.dumps(group_state(group)))
    earlier = state | {"responses": [{"token_ids": [7, 20, 8], "logprobs": [-0.1, 0.0, -0.2], "finish_reason": "abort",
                                      "appended": [[1, 2]], "weight_versions": [3, -1, 3]}]}  # yapf: disable
    begun, (response, ) = response, load_group(state)
    assert load_group(earlier) == [replace(response, seed=0)], "a checkpoint of an earlier version"
    assert response.segments == begun.segments and response.seed == 9
    response.add([Segment([9], [-0.3], version=4)], "stop")
    response.give([21, 22])
    response.add([Segment([4], [-0.4], version=4)], "stop")
    sample = response
    assert sample.token_ids == [5, 6, 7, 20, 8, 9, 21, 22, 4]
    assert sample.loss_mask == [False, False, True, False, True, True, False, False, True]
    assert sample.weight_versions == [-1, -1, 3, -1, 3, 4, -1, -1, 4]
    assert sample.logprobs == [0, 0, -0.1, 0, -0.2, -0.3, 0, 0, -0.4] and not sample.open


def test_a_response_whose_environment_began_otherwise_keeps_its_prompt_in_a_checkpoint():
    group = Episode.group(Prompt("u", [5, 6], "ab"), 0, [9, 8, 7])
    group[1].prompt = Prompt("u", [5, 6, 7], "abc")
    assert load_group(group_state(group)) == group


def test_what_the_metrics_count(home, tmp_path):
    done, batches, _ = watched(home, tmp_path, max_steps=5)
    for step, (exp, line) in enumerate(zip(batches, done.lines)):
        versions = [{v for v in versions if v >= 0} for *_, versions in sequences(exp)]
        groups = [set().union(*versions[i:i + SIZE]) for i in range(0, len(versions), SIZE)]
        assert line["rollout/partial/samples"] == sum(len(each) > 1 for each in versions)
        assert line["rollout/partial/groups"] == sum(min(each) < step for each in groups)
        assert line["rollout/partial/left_groups"] == (2 if step < 4 else 0)
        later = sum((exp.weight_versions == step).sum().item() for exp in batches[step + 1:])
        assert line["rollout/tokens"] == (exp.weight_versions == step).sum() + later
        assert [row["uid"] for row in done.rollout(step + 1)[::SIZE]
                ] == [row["uid"] for row in done.rollout(step + 1)[2::SIZE]], "a group is torn"
    assert any(line["rollout/partial/left_tokens"] for line in done.lines)


def test_tokens_that_a_response_has_lost_are_not_taken_from_those_of_a_step(home, tmp_path):
    """As those of one whose environment has begun otherwise."""
    made, batches = trainer_of(home, tmp_path, oversample=2.0, max_steps=2), []
    advance, complete = made.maker.advance, made.maker.complete

    def lost(episodes, *args):
        for episode in episodes:
            episode.segments = [] if episode.open else episode.segments
        return advance(episodes, *args)

    made.maker.advance = lost
    made.maker.complete = lambda episodes, *args: batches.append(Batch.of(episodes)) or complete(episodes, *args)
    made.fit()
    before, last = runs.Run(made, tmp_path).lines
    assert before["rollout/partial/left_tokens"] and last["rollout/tokens"] == (batches[1].weight_versions == 1).sum()


def test_rewards_belong_to_their_responses(home, tmp_path):
    done, batches, _ = watched(home, tmp_path, max_steps=4)
    tokenizer = done.trainer.tokenizer
    for number, exp in enumerate(batches, 1):
        for b, row in enumerate(done.rollout(number)):
            part = exp.select([b])
            text = tokenizer.decode(part.token_ids[part.loss_mask]).removesuffix(tokenizer.eos_token)
            assert (row["group_id"], row["index"], row["response"]) == (b // SIZE, b % SIZE, text)
            assert tokenizer.decode(part.token_ids[~part.loss_mask]) == row["prompt"]


def test_stale_tokens_are_corrected_against_the_policy_before_the_update(home, tmp_path):
    """One optimizer step: the old policy is the current one (ratio 1), the correction is current over behaviour."""
    done = runs.run(home, tmp_path, **OPTIONS | {"max_steps": 3, "rollout_correction": "tis"})
    assert all(line["policy/first_ratio_gap"] == 0 for line in done.lines)
    assert done.lines[0]["policy/correction_weight"] == pytest.approx(1, abs=1e-5)
    assert any(abs(line["policy/correction_weight"] - 1) > 1e-4 for line in done.lines[1:])


@pytest.mark.parametrize("more", [
    {"lora_rank": 2, "max_epochs": 2},
    {"advantage_estimator": "gae", "init_kl_coef": 0.1, "train_batch_size": 6},
    {"advantage_estimator": "remax", "rollout_correction": "bypass", "use_fire": True},
    {"stages": ["6:2", "24"], "overlong_buffer": True, "max_steps": 4, "mask_truncated": True},
])
def test_it_works_with_the_rest(more, home, tmp_path):
    done = runs.run(home, tmp_path, **OPTIONS | {"max_steps": 3} | more)
    assert len(done.lines) == more.get("max_steps", 3)
    assert any(line["rollout/partial/samples"] for line in done.lines)
    assert all(value.isfinite().all() for value in done.weights.values())


def stable(lines):
    return [{key: value for key, value in line.items() if not VOLATILE.match(key)} for line in lines]


def test_a_resumed_run_goes_on_with_what_was_under_way(home, tmp_path):
    options = OPTIONS | {"disable_ckpt": False, "oversample": 2.0, "max_staleness": 2}
    straight = runs.run(home, tmp_path / "a", **options)
    cut = trainer_of(home, tmp_path / "b", **options)
    cut.strategy.any_rank = lambda value: cut.step == 3 or value
    cut.fit()
    assert any(response.segments for group in cut.source.groups.values() for response in group if response.open)
    done = runs.run(home, tmp_path / "b", **options, load_checkpoint=True)
    assert stable(done.lines) == stable(straight.lines)
    assert all(torch.equal(value, straight.weights[name]) for name, value in done.weights.items())
    assert done.rollout(4) == straight.rollout(4)


class Game:
    """An object of a user's own class."""


def test_a_column_that_no_checkpoint_keeps_is_refused_before_the_first_step(home, tmp_path):
    """Resume would refuse it. Plain values pass, and so does an object in a run without checkpoints."""
    for column, saved in (({"a": [1, None]}, True), (Game(), False)):
        made = trainer_of(home, tmp_path, disable_ckpt=not saved, max_steps=2)
        made.source.loader.dataset = [replace(each, columns={"game": column}) for each in made.source.loader.dataset]
        made.fit()
    made = trainer_of(home, tmp_path, disable_ckpt=False, max_steps=2)
    made.source.loader.dataset = [replace(each, columns={"game": [Game()]}) for each in made.source.loader.dataset]
    with pytest.raises(UserError, match="'game' of row .* holds an object that is not read again.*--disable_ckpt"):
        made.fit()


def test_dynamic_sampling_refuses_a_reference_that_no_checkpoint_keeps(home, tmp_path):
    """Columns are not kept, so any may be there."""
    made = trainer_of(home, tmp_path, oversample=1.0, dynamic_sampling=True, disable_ckpt=False, max_steps=2)
    made.sync_weights(0)
    made.prepared["actor"].model.eval()
    rows = [replace(each, columns={"game": Game()}) for each in made.source.loader.dataset]
    made.source.loader.dataset = rows
    assert made.source.make(0).shards.size
    made.source.loader.dataset = [replace(each, reference=[Game()]) for each in rows]
    with pytest.raises(UserError, match="--dynamic_sampling keeps .*'reference' of row .* is not read again"):
        made.source.make(1)


def test_groups_that_no_longer_fit_are_told(home, tmp_path, capsys):
    made = trainer_of(home, tmp_path, max_steps=2)
    made.sync_weights(0)
    made.prepared["actor"].model.eval()
    made.source.make(0)
    state = made.source.state_dict()
    again = trainer_of(home, tmp_path).source
    again.load_state_dict(state)
    assert again.groups == made.source.groups and again.groups, "the state does not hold the groups"
    cases = [({"n_samples_per_prompt": 2, "train_batch_size": 8}, state, "of 3 samples carried over"),
             ({"oversample": 1.0}, state, "without --oversample the 2 unfinished groups"),
             ({"oversample": 1.0, "dynamic_sampling": True}, state, "without --oversample the 2 unfinished groups"),
             ({}, {"rows": [{}] * 6, "size": 3}, "without --dynamic_sampling the 6 samples")]  # yapf: disable
    for options, old, words in cases:
        source = trainer_of(home, tmp_path, **options).source
        capsys.readouterr()
        source.load_state_dict(old)
        told = capsys.readouterr().err
        assert words in told and "dropped" in told and not source.state_dict().get("open")


def test_it_is_off_by_default(home, tmp_path):
    made = trainer_of(home, tmp_path, oversample=1.0)
    assert type(made.source) is PromptSource and type(made.maker) is FastExperienceMaker


RANKS = tiny_task.OPTIONS | {
    "oversample": 1.6, "rollout_batch_size": 4, "max_steps": 0, "num_episodes": 2, "eval_steps": 0, "stop":
    list("abcdefghijklmnopqrstuvwxyz"), "eval_at_start": False, "use_tensorboard": False, "disable_ckpt": True,
    "best_metric": "none", "actor_learning_rate": 0.0, "generate_max_len": 30
}  # yapf: disable


def of_ranks(home, folder, ranks, **more):
    """Metrics and samples of a run whose weights never change."""
    options = RANKS | {
        "pretrain": home / "model", "prompt_data": home / "train.jsonl", "reward": home / "reward.py", "save_path":
        folder
    }  # yapf: disable
    finish(folder, options | more, ranks)
    lines = runs.read_lines(folder / "metrics.jsonl")
    assert len(lines) == 10 and any(line["rollout/partial/samples"] for line in lines)
    assert all(line["rollout/staleness/max"] <= 1 for line in lines)
    return lines, [row for path in (folder / "rollouts").iterdir() for row in map(json.loads, path.open())]


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_train_the_same_responses(tmp_path):
    """In another order, for each rank stops by itself; the weights never change, so the responses are the same."""
    home, found = tiny_task.write_home(tmp_path / "home"), {}
    for ranks in (1, 2):
        _, rows = of_ranks(home, tmp_path / f"ranks_{ranks}", ranks)
        found[ranks] = sorted((row["uid"], row["index"], row["response"], row["reward"]) for row in rows)
    assert found[1] == found[2]
