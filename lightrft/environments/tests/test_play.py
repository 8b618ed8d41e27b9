"""Whole rollouts with environments in workers: tokens, masks, rewards and causes, whatever the time that tools take."""
import json
import re
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lightrft.config.cli import parse_config
from lightrft.config.generate_schema import GenerateConfig
from lightrft.config.schema import RewardConfig
from lightrft.datasets.known_media import KnownMedia
from lightrft.environments.base import EnvironmentSpec
from lightrft.environments.chat_format import ChatFormat
from lightrft.environments.play import Player
from lightrft.environments.pool import EnvironmentPool
from lightrft.inference.generation import BatchGenerator, score_again
from lightrft.inference.media_columns import MediaColumns
from lightrft.inference.prompts import identity
from lightrft.rewards.manager import RewardManager
from lightrft.strategy.strategy import SingleProcessStrategy
from lightrft.tests.support import environments, runs, tool_models
from lightrft.tests.support.environment_ranks import gradients, lived, ready as trainer
from lightrft.tests.support.invariants import largest_gap
from lightrft.tests.support.threads import World
from lightrft.trainer.carried_groups import group_state, load_group
from lightrft.trainer.fast_exp_maker import FastExperienceMaker
from lightrft.trainer.overlapped_passes import PassThread
from lightrft.trainer.play_metrics import play_metrics
from lightrft.trainer.samples import reward_input
from lightrft.types import Episode, Prompt, Segment
from lightrft.utils.errors import UserError
from lightrft.utils.play import Play, Shown

no_picture = runs.no_picture
FILE = environments.__file__


@pytest.fixture(name="home", scope="module")
def fixture_home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    tool_models.save_model(home / "model", num_hidden_layers=1)
    rows = [{"prompt": [{"role": "user", "content": text}], "reference": "7"} for text in runs.PROMPTS]
    (home / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return home


def rollout(made, step=0):
    return made.maker.make([made.loader.dataset[i] for i in range(4)], step)


def shut(made):
    made.environment.shutdown()
    made.maker.rewards.shutdown()


def seeds(done):
    return {(episode.group_id, episode.prompt.messages[-1]["content"]) for episode in done.episodes}


def test_timing_changes_nothing_and_nobody_waits(home, tmp_path, monkeypatch):
    """Whatever the latencies, responses are the same, and so are the packs of overlapped passes and the gradients; the
    rewards of turns are on their last drawn tokens."""
    found, packs, grads, sent, flush = [], [], [], [], PassThread.flush
    monkeypatch.setenv("TOGETHER", "8")  # responses, so none is answered if one waits for another
    monkeypatch.setattr(PassThread, "flush", lambda self: sent.append((*(each.key for each in self._open), )) or
                        flush(self))  # yapf: disable
    for latency in ("", "0.3", "0.6"):
        monkeypatch.setenv("LATENCY", latency)
        made = trainer(home, tmp_path / (latency or "0"), "Sleeper", advantage_estimator="reinforce", max_epochs=2,
                       overlap_passes=True, env_workers=1, max_tokens_per_micro_batch=400)  # yapf: disable
        sent.clear()
        found.append(rollout(made))
        packs.append({*sent})
        grads.append(gradients(made, found[-1]))
        if not latency:
            made.engine.wake()
            again = rollout(made, 1)
            assert len(seeds(again)) == 4 and not seeds(again) & seeds(found[0]), "another seed in each step"
        shut(made)
    first, *others = found
    assert len(seeds(first)) == 4, "one seed for all samples of a group"
    assert packs[0] == packs[1] == packs[2] and any(len(pack) > 1 for pack in packs[0])
    assert max(largest_gap(grads[0], other) for other in grads[1:]) < 5e-7
    assert not any(episode.play.failure for done in found for episode in done.episodes), "one waited for another"
    for done in others:
        for one, other in zip(first.episodes, done.episodes, strict=True):
            assert (one.token_ids, one.loss_mask, one.play.rewards) == (other.token_ids, other.loss_mask,
                                                                        other.play.rewards)
            assert one.logprobs == pytest.approx(other.logprobs, abs=2e-6)
            assert one.reward == other.reward == sum(reward for _, reward in one.play.rewards)
    assert (first.exp.rollout_logprobs - first.exp.old_logprobs).abs().max() < 1e-5
    for i, episode in enumerate(first.episodes):
        exp, ends = first.exp.select([i]), [at for at, _ in episode.play.rewards]
        assert exp.step_rewards.nan_to_num().nonzero().flatten().tolist() == ends and exp.loss_mask[ends].all()
        assert not exp.loss_mask[[at + 1 for at in ends if at + 1 < exp.num_tokens]].any(), "not the last of its turn"
        assert ends[-1] == exp.loss_mask.nonzero()[-1].item(), "a turn that was cut has a reward too"
    assert len({len(episode.play.rewards) for episode in first.episodes}) > 1


def test_a_failed_environment_leaves_its_response_unscored_and_rewards_read_what_was_drawn(home, tmp_path):
    seen = []
    made = trainer(home, tmp_path, "Failing", reward=["exact", "environment=0.5"], max_turns=2)
    done = rollout(made)
    shut(made)
    for episode in done.episodes:
        play, score = episode.play, episode.score
        failed = len(play.messages[0]["content"]) % 2 == 0
        assert play.failure == ("exception" if failed else "")
        assert score.error == ("exception" if failed else None) and (score.total is None) == failed
        if not failed:
            assert "\\boxed{7}" in episode.text or play.limit == "no_room"
            assert score.parts["exact"] == 0, "the answer is the environment's"
            assert score.total == 0.5 * play.reward
        item = reward_input(episode.prompt, episode.text, play)
        seen += item.turns
        assert "boxed" not in item.response
    metrics, plays = done.metrics, [episode.play for episode in done.episodes]
    assert {message["role"] for message in seen} == {"assistant", "user"}
    assert metrics["env/exception"] == sum(play.failure != "" for play in plays) == metrics["reward/unscored"] > 0
    for cause in ("max_turns", "no_room"):
        assert metrics[f"env/{cause}"] == sum(play.limit == cause for play in plays)
    assert metrics["env/max_turns"] > 0 and max(play.turns for play in plays) == 2
    assert metrics["env/turns/mean"] == pytest.approx(sum(play.turns for play in plays) / len(plays))
    drawn = [sum(episode.loss_mask) for episode in done.episodes]
    whole = [episode.response_len for episode in done.episodes]
    assert metrics["rollout/response_len/mean"] == pytest.approx(sum(drawn) / len(drawn)) and drawn != whole
    assert metrics["rollout/whole_len/mean"] == pytest.approx(sum(whole) / len(whole))
    assert metrics["rollout/whole_len/max"] == max(whole)
    assert torch.isfinite(done.exp.advantages).all()


def test_a_hint_that_is_too_long_costs_the_responses_of_its_row_and_a_text_prompt_is_told(home, tmp_path, capfd):
    made = trainer(home, tmp_path / "a", "Sleeper", prompt_max_len=45, generate_max_len=40)
    done = rollout(made)
    shut(made)
    long = [episode for episode in done.episodes if episode.play.failure]
    assert 0 < len(long) < len(done.episodes) and len({episode.group_id for episode in long}) > 1
    for episode in done.episodes:
        failed = episode in long
        assert (episode.score.error, episode.play.failure) == (("no_room_at_start", ) * 2 if failed else (None, ""))
        assert len(episode.prompt.messages) == 2 - failed and len(episode.prompt.token_ids) <= 45
    metrics = done.metrics
    assert metrics["env/no_room_at_start"] == metrics["reward/unscored"] == len(long) and not metrics["env/exception"]
    (uid, size), = re.findall(r"\(no_room_at_start\).*\nthe prompt '(.*)' with the messages of reset\(\) has (.*) token"
                              "s, and --prompt_max_len is 45. Raise it", capfd.readouterr().err)  # yapf: disable
    assert uid == long[0].prompt.uid and int(size) > 45, "the first one is told"
    (home / "text.jsonl").write_text(json.dumps({"prompt": "one"}) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="is a text. Write prompts as messages"):
        trainer(home, tmp_path / "b", "Failing", prompt_data=[str(home / "text.jsonl")], rollout_batch_size=1,
                train_batch_size=2)  # yapf: disable


@pytest.fixture(name="player", scope="module")
def fixture_player():
    tok = tool_models.tokenizer()
    player = Player(EnvironmentPool(EnvironmentSpec(FILE, "Faulty"), 1, 20.0), tok, ChatFormat(tok, "qwen3"), 8, 96)
    yield player
    player.shutdown()


def chat_prompt(player):
    messages = [{"role": "user", "content": "go"}]
    text, ids = player.form.prompt(messages, {})
    return Prompt("u", ids, text, messages=messages)


def played(player, episodes, text="a"):
    """Draw a turn of each episode; the answers of its environment."""
    drawn = player.tokenizer.encode(text, add_special_tokens=False) + [player.tokenizer.eos_token_id]
    with player.playing(episodes, 240) as ask:
        for episode in episodes:
            episode.add([Segment(drawn, [0.0] * len(drawn), version=0)], "stop")
        for episode, turn in zip(episodes, ask(episodes), strict=True):
            episode.give(turn.result())
            episode.finish_reason = "abort"
    return [episode.play.messages[-1]["content"] for episode in episodes]


@pytest.mark.parametrize("otherwise", [False, True], ids=["answers in the same way", "answers otherwise"])
@pytest.mark.parametrize("left_here", [True, False], ids=["on another rank meanwhile", "of an earlier process"])
def test_turns_of_a_response_from_a_checkpoint_are_played_again(player, left_here, otherwise):
    """Also where the first response of the group is finished, and where an earlier session of it is still there. If an
    answer differs, the response begins again, with the prompt and the seed of its group."""
    group = Episode.group(chat_prompt(player), 7, [5, 6], role=f"{left_here} {otherwise}")
    first, again = played(player, group)
    assert first == again and again.endswith(" 1"), "one seed, and the first turn of the environment"
    opened = group[0].prompt.messages
    assert len(opened) == 2 and int(opened[1]["content"].removeprefix("seed ")) < 2**31, "as NumPy takes it"
    if not left_here:
        player._sessions.clear()
    _, moved = load_group(json.loads(json.dumps(group_state(group))))
    moved.role, before = group[1].role, [*group[1].token_ids]
    if otherwise:
        next(segment for segment in moved.segments if not segment.drawn).token_ids[0] += 1
    assert played(player, [moved]) == [again if otherwise else again.removesuffix("1") + "2"]
    assert (moved.prompt.messages, moved.prompt.token_ids) == (opened, group[0].prompt.token_ids)
    play, turns = moved.play, moved.play.turns
    assert (play.restarts, play.replays, turns, play.reward) == ((1, 0, 1, 0.5) if otherwise else (0, 1, 2, 1.0))
    assert moved.token_ids[:len(before)] == before, "its tokens"
    assert played(player, [moved])[0].endswith(f" {turns + 1}"), "a session that is here goes on"


def test_a_response_that_goes_on_at_another_rank_has_no_session_here(player):
    """Its pictures are known there."""
    stays, moves = (Episode.group(chat_prompt(player), number, [5], role="moved") for number in range(2))
    played(player, [*stays, *moves])
    moves[0].play.shown = [Shown("image:moved", environments.PIXEL)]

    def exchange(strategy):
        first = strategy.rank == 0
        maker = SimpleNamespace(strategy=strategy, environment=player if first else None, media=KnownMedia())
        maker.keep_shown = partial(FastExperienceMaker.keep_shown, maker)
        received = FastExperienceMaker.exchange(maker, [stays, moves] if first else [[], []])
        assert first or maker.media["image:moved"].kind == "image"
        return [each.key for each in received]

    assert World(2).run(exchange) == [[stays[0].key], [moves[0].key]]
    assert stays[0].key in player._sessions and moves[0].key not in player._sessions


@pytest.mark.parametrize("place", ["reset", "step"])
def test_a_picture_in_an_observation_ends_the_run_with_the_remedy(player, place):
    drawn, asked = "picture" if place == "step" else "a", chat_prompt(player)
    if place == "reset":
        asked = replace(asked, columns={"hint": "picture"})
    with pytest.raises(UserError, match="answered with image, and observations are texts without --env_images. Add "):
        played(player, Episode.group(asked, 3, [5], role=place), drawn)


def test_a_conversation_whose_environment_could_not_begin_can_be_asked_again(player):
    """The same key as before, after an error of the opening."""
    asked = chat_prompt(player)
    with pytest.raises(UserError, match="reset.. gave messages, and the prompt 'u' is a text"):
        played(player, Episode.group(replace(asked, messages=[]), 0, [5], role="chat"))
    assert played(player, Episode.group(asked, 0, [5], role="chat"))


@pytest.mark.parametrize("place", ["reset", "step"])
def test_messages_that_the_template_refuses_fail_their_response(player, place, monkeypatch):
    tok = tool_models.tokenizer()
    tok.chat_template = ("{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
                         "{{ raise_exception('system comes first') }}{% endif %}{% endfor %}" + tok.chat_template)
    strict, told = Player(player.pool, tok, ChatFormat(tok, "no family"), 8, 96), []
    monkeypatch.setattr(strict, "log_once", told.append)
    drawn = tok.encode("system" if place == "step" else "a", add_special_tokens=False) + [tok.eos_token_id]
    asked = replace(chat_prompt(strict), columns={"hint": "system" if place == "reset" else ""})
    (episode, ) = Episode.group(asked, 0, [5], role=f"strict {place}")
    with strict.playing([episode], 240) as ask:
        episode.add([Segment(drawn, [0.0] * len(drawn), version=0)], "stop")
        (turn, ) = ask([episode])
        assert turn is None or turn.result() is None
        episode.finish_reason = "stop"
    assert episode.play.failure == "exception"
    assert ["system comes first" in failure.detail for failure in told] == [True]


def test_environments_live_on_across_steps_and_are_played_again_from_a_checkpoint(home, tmp_path):
    """With --oversample."""
    trained, lines = [], []
    for name in ("straight", "resumed"):
        made = trainer(home, tmp_path / name, "Faulty", runs.build, oversample=2.0, max_steps=3, max_turns=4,
                       disable_ckpt=False, save_steps=1, load_checkpoint=name == "resumed")  # yapf: disable
        trained.append(lived(made))
        lines.append(runs.read_lines(tmp_path / name / "metrics.jsonl"))
        if name == "straight":
            shutil.copytree(tmp_path / name, tmp_path / "resumed")
            for step in ("2", "3"):
                shutil.rmtree(tmp_path / "resumed" / "checkpoints" / f"step_00000{step}", ignore_errors=True)
    straight, resumed = trained
    versions = [{segment.version for segment in episode.segments if segment.drawn} for episode in straight]
    assert any(len(each) > 1 for each in versions) and not any(episode.play.restarts for episode in straight)
    assert lines[0][0]["rollout/partial/left_samples"] > 0 and len(resumed) == 2 * len(straight) // 3
    replays = sum(episode.play.replays for episode in resumed)
    assert replays == sum(each["env/replays"] for each in lines[1]) > 0
    assert not any(each["env/restarts"] for each in (*lines[0], *lines[1]))
    assert not any(episode.play.replays for episode in straight)
    assert any(0 in {segment.version for segment in episode.segments} for episode in resumed), "tokens of step 1"
    hints = [{episode.prompt.messages[-1]["content"] for episode in seen} for seen in trained]
    assert hints[1] <= hints[0], "another seed"


@pytest.mark.parametrize("failure", ["timeout", ""])
def test_a_response_that_is_scored_again_is_judged_with_what_its_environment_did(player, tmp_path, failure):
    """Not as a text in which the environment has written the answer; nor where the environment failed."""
    prompt, strategy, saved = chat_prompt(player), SingleProcessStrategy(), []
    (episode, ) = Episode.group(prompt, 0, [5], role=f"again {failure}")
    played(player, [episode])
    episode.play.failure, episode.text = failure, "a\\boxed{7}"
    row = BatchGenerator(strategy, None, player.tokenizer, None, 1, 0, MediaColumns(None, tmp_path)).row(episode)
    files = SimpleNamespace(unscored={0: [json.loads(json.dumps(row)) | {"unscored": "unreachable"}]},
                            add=lambda number, rows: saved.extend(rows))  # yapf: disable
    rewards = RewardManager(RewardConfig(reward=["exact", "environment"]))
    score_again(strategy, [replace(prompt, reference="7")], files, rewards)
    rewards.shutdown()
    assert saved[0]["reward_parts"] == {"exact": 0.0, "environment": 0.5}
    assert saved[0].get("unscored", "") == failure


def test_rows_of_another_environment_are_not_resumed(home, tmp_path):
    """Its file may have changed under the same name."""
    file = tmp_path / "environment.py"
    given = {"pretrain": str(home / "model"), "prompt_data": [str(home / "train.jsonl")],
             "environment": f"{file}:Failing"}  # yapf: disable
    config = parse_config([], defaults=given, tree=GenerateConfig).config
    identities = []
    for text in ("first", "second"):
        file.write_text(f'"""{text}"""', encoding="utf-8")
        identities.append(identity(config, (), [], config.as_config()))
    first, second = identities
    assert [name for name in first if first[name] != second[name]] == ["the content of --environment"]


def test_numbers_of_an_environment_do_not_count_as_those_of_the_library():
    plays = [
        Play(turns=2, metrics={"turns": 9.0, "responses": 5.0, "max_turns": 7.0, "score": -1.0, "images": 6.0}),
        Play(limit="max_turns", shown=[Shown("image:a", "")] * 3)
    ]
    episodes = [Episode(Prompt("u", [1], ""), 0, i, play=play) for i, play in enumerate(plays)]
    assert "env/forks/mean" not in play_metrics(episodes, SingleProcessStrategy())
    episodes[0].add([Segment([2], [-1.0])])
    episodes[0].fork(Prompt("u", [3], ""))
    metrics = play_metrics(episodes, SingleProcessStrategy())
    assert metrics["env/forks/mean"] == 0.5
    assert (metrics["env/turns/mean"], metrics["env/max_turns"], metrics["env/timeout"]) == (1, 1, 0)
    assert metrics["env/images/mean"] == 1.5
    assert (metrics["env/responses/mean"], metrics["env/max_turns/mean"], metrics["env/score/mean"]) == (2.5, 3.5, -0.5)
