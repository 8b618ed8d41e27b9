"""Environments that rewrite the conversation: the response goes on behind another prompt, in another branch."""
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightrft.environments.base import EnvironmentSpec, Step, UnreadMedia
from lightrft.environments.chat_format import ChatFormat
from lightrft.environments.observations import plain_history
from lightrft.environments.play import Player
from lightrft.environments.pool import EnvironmentPool
from lightrft.environments.worker import plain
from lightrft.inference.generation import BatchGenerator
from lightrft.inference.tests.test_chat import opened
from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.hf.engine import HFEngine
from lightrft.rollout.scheduler import generate
from lightrft.tests.support import environments, runs, tiny, tool_models
from lightrft.tests.support.environment_ranks import gradients, ready
from lightrft.tests.support.forks import alone
from lightrft.tests.support.invariants import largest_gap
from lightrft.trainer.carried_groups import group_state, load_group
from lightrft.types import Episode, Prompt

TURNS, NEW, ENDS = 5, 64, tuple(range(30, 60))
PAGE = Path(__file__).parents[3] / "docs" / "environments.md"
PARAMS = SamplingParams(NEW, stop_token_ids=ENDS)


@pytest.fixture(name="tok", scope="module")
def fixture_tok():
    return tool_models.tokenizer()


@pytest.fixture(name="engine", scope="module")
def fixture_engine(tok):
    model = tiny.model("qwen3", vocab_size=len(tok), initializer_range=0.12, num_hidden_layers=1)
    model.set_attn_implementation("packed")
    return HFEngine(model, {tok.eos_token_id}, 1 << 24)


def started(tok, path=environments.__file__, name="Compacting"):
    return Player(EnvironmentPool(EnvironmentSpec(path, name), 1, 20.0), tok, ChatFormat(tok, "qwen3"), TURNS, 200)


@pytest.fixture(name="player", scope="module")
def fixture_player(tok):
    player = started(tok)
    yield player
    player.shutdown()


def groups(player, word="", role="sample"):
    """Two responses to each of four questions."""
    episodes = []
    for number, text in enumerate(["one", "two and", "3", "four"]):
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]
        asked, ids = player.form.prompt(messages, {})
        prompt = Prompt(f"row {number}", ids, asked, messages=messages, reference="7", columns={"word": word})
        episodes += Episode.group(prompt, number, [2 * number + 5, 2 * number + 6], role)
    return episodes


def play(player, engine, episodes, heard=None):
    going = [episode for episode in episodes if episode.open]
    with player.playing(going, NEW) as ask:
        generate(engine, going, PARAMS, ask, heard, hears_cuts=True)
    return episodes


def facts(episode):
    prompts = [replace(branch.prompt, media=(*branch.prompt.media, )) for branch in episode.branches]  # a list in JSON
    return [(prompt, branch.token_ids, branch.loss_mask, branch.seed)
            for prompt, branch in zip(prompts, episode.branches)], (episode.play.messages, episode.play.rewards,
                                                                    episode.finish_reason)  # yapf: disable


@pytest.fixture(name="straight", scope="module")
def fixture_straight(player, engine):
    return play(player, engine, groups(player))


def test_branches_have_the_prompts_of_their_histories_and_one_record(player, engine, straight, tok):
    """Each is the response that its prompt alone gives; a history cannot end the turn of the assistant in it."""
    numbers = {len(episode.branches) for episode in straight}
    assert len(numbers) > 1 and max(numbers) == 3
    for episode in straight:
        record, joined = episode.play, episode.joined
        assert record.turns == len(record.answers) <= TURNS and not record.failure
        drawn = [joined.token_ids[start:stop] for drawn, start, stop in joined.runs if drawn]
        assert record.answers == [tok.decode(ids[:-1] if ids[-1] == tok.eos_token_id else ids) for ids in drawn]
        ends = [stop - 1 for drawn, _, stop in joined.runs if drawn]
        assert record.rewards == [(at, 1.0 + number % 2) for number, at in enumerate(ends)]
        texts = [text[:2] for text in record.answers]
        for number, branch in enumerate(episode.closed, 1):
            after = episode.branches[number].prompt
            system, asked, answer, summary = after.messages
            assert [system, asked] == episode.branches[0].prompt.messages and answer["content"] == "< |im_end|>"
            assert summary["content"] == player.form.neutral(f"so far {' '.join(texts[:2 * number])}")
            assert (after.text, after.token_ids) == player.form.prompt(after.messages, {})
            assert (after.uid, after.reference, after.columns) == (branch.prompt.uid, "7", {"word": ""})
            assert summary in record.messages and answer not in record.messages
        for branch in episode.branches:
            one = alone(engine, branch, PARAMS)
            assert (one.token_ids, one.loss_mask) == (branch.token_ids, branch.loss_mask)
            assert one.logprobs == pytest.approx(branch.logprobs, abs=2e-6)


def test_latencies_change_nothing(tok, engine, straight, monkeypatch):
    monkeypatch.setenv("LATENCY", "0.3")
    slow = started(tok)
    found = play(slow, engine, groups(slow))
    slow.shutdown()
    assert [*map(facts, found)] == [*map(facts, straight)]
    for episode, other in zip(found, straight):
        assert episode.joined.logprobs == pytest.approx(other.joined.logprobs, abs=2e-6)


@pytest.mark.parametrize("otherwise", ["", "!"])
def test_branches_of_a_checkpoint_are_played_again(tok, engine, straight, monkeypatch, otherwise):
    """Once some responses are in a later branch the run stops, and another process goes on. Where an environment
    rewrites otherwise now, the response begins anew, with its first prompt and its first noise."""
    first = started(tok)
    episodes = groups(first)
    play(first, engine, episodes, lambda now: any(episode.closed and episode.open for episode in episodes))
    first.shutdown()
    left = [episode for episode in episodes if episode.open and episode.closed]
    assert left, "none has forked"
    by_group = [episodes[i:i + 2] for i in range(0, len(episodes), 2)]
    loaded = [each for group in by_group for each in load_group(json.loads(json.dumps(group_state(group))))]
    monkeypatch.setenv("OTHERWISE", otherwise)
    second = started(tok)
    play(second, engine, loaded)
    second.shutdown()
    for before, now, expected in zip(episodes, loaded, straight, strict=True):
        if before in left:
            assert now.play.restarts == bool(otherwise) and now.play.replays > 0
        if otherwise:  # the first summary differs, and what was before it not
            assert facts(now)[0][0] == facts(expected)[0][0]
            assert now.finish_reason != "abort"
        else:
            assert facts(now) == facts(expected)


def test_a_rollout_that_forks_is_trained(tmp_path):
    """Engine and trainer have the same log-probs in all branches, and a turn has its reward where it ends."""
    tool_models.save_model(tmp_path / "model", num_hidden_layers=1)
    rows = [{"prompt": [{"role": "user", "content": text}], "reference": "7"} for text in runs.PROMPTS]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    made = ready(tmp_path, tmp_path / "run", "Compacting", max_turns=TURNS, advantage_estimator="reinforce",
                 prompt_max_len=160, generate_max_len=70, max_epochs=2, stop=list("abcdefgh"))  # yapf: disable
    done = made.maker.make([made.loader.dataset[i] for i in range(4)], 0)
    whole = gradients(made, done)
    alone_in_passes = gradients(made, done, rows=1)
    made.environment.shutdown()
    made.maker.rewards.shutdown()
    forks = [len(episode.closed) for episode in done.episodes]
    assert len({*forks}) > 1 and max(forks) == 2 and not any(episode.play.failure for episode in done.episodes)
    assert done.metrics["env/forks/mean"] == sum(forks) / len(forks)
    assert (done.exp.rollout_logprobs - done.exp.old_logprobs)[done.exp.loss_mask].abs().max() < 1e-5
    assert largest_gap(whole, alone_in_passes) < 2e-6
    for i, episode in enumerate(done.episodes):
        exp = done.exp.select([i])
        assert exp.loss_mask.sum() == episode.drawn_len and exp.num_tokens == episode.joined.num_tokens
        ends = exp.step_rewards.nan_to_num().nonzero().flatten().tolist()
        assert ends == [at for at, _ in episode.play.rewards] and exp.loss_mask[ends].all()
        assert episode.reward == sum(reward for _, reward in episode.play.rewards)


def test_a_history_without_room_ends_the_response(player, engine):
    found = play(player, engine, groups(player, "long", "long"))
    asked = [episode for episode in found if episode.play.limit == "no_room"]
    assert asked and not any(episode.closed for episode in found)
    for episode in asked:
        assert (episode.finish_reason, episode.play.metrics) == ("length", {"cut_short": 1.0})
        assert episode.play.turns % 2 == 0 and not episode.play.failure


@pytest.mark.parametrize("word,error", [("both", "has a history and messages beside it"),
                                        ("ends", "ends with one of the assistant")])  # yapf: disable
def test_histories_that_are_none_are_faults_of_the_environment(player, engine, word, error, monkeypatch):
    told = []
    monkeypatch.setattr(player, "log_once", told.append)
    found = play(player, engine, groups(player, word, word))
    assert told and all(error in failure.detail for failure in told)
    assert sum(episode.play.failure == "exception" for episode in found) == len(told)


def test_a_row_of_generate_has_the_prompt_of_the_first_branch(player, engine):
    """Its output begins behind that."""
    episode = next(each for each in play(player, engine, groups(player, "one", "one")) if each.closed)
    made = BatchGenerator(None, None, player.tokenizer, None, 1, 0, None)
    assert made.row(episode)["input"] == episode.closed[0].prompt.text != episode.prompt.text


def test_a_chat_goes_on_with_what_its_environment_has_written(tmp_path):
    model = tool_models.save_model(tmp_path / "model", num_hidden_layers=1, initializer_range=0.12)
    chat = opened(model, environment=f"{environments.__file__}:Compacting", max_turns=TURNS, generate_max_len=110,
                  stop=[chr(97 + number) for number in range(26)], prompt_max_len=400)  # yapf: disable
    lengths = []
    for text in ("one", "two"):
        written = "".join(chat.ask(text))
        (summary, ) = [
            number for number, message in enumerate(chat.messages) if message["content"].startswith("so far")
        ][-1:]
        assert chat.messages[0] == {"role": "user", "content": "one"} and chat.messages[summary]["content"] in written
        assert chat.messages[summary - 1] == {"role": "assistant", "content": "< |im_end|>"}
        lengths.append(len(chat.messages) - summary)
    chat.model.environment.shutdown()
    assert max(lengths) <= 3, "a branch has two turns, and what was said before is not repeated"


@pytest.mark.skipif(not PAGE.exists(), reason="installed without its repository")
def test_the_environment_of_the_page(tok, engine, tmp_path):
    (code, ) = [block for block in re.findall("^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"),
                                              re.MULTILINE | re.DOTALL) if "history=" in block]  # yapf: disable
    (tmp_path / "compact.py").write_text(code, encoding="utf-8")
    player = started(tok, str(tmp_path / "compact.py"), "")
    found = play(player, engine, groups(player))
    player.shutdown()
    (forked, *_) = [episode for episode in found if episode.closed]
    notes = player.form.neutral(f"So far: {'. '.join(text[:20] for text in forked.play.answers[:2])}")
    assert forked.branches[1].prompt.messages[1:] == [forked.closed[0].prompt.messages[1],
                                                      {"role": "user", "content": notes}]  # yapf: disable


@pytest.mark.parametrize("value,error", [
    ("a text", TypeError), ([], ValueError), ([{"role": "narrator", "content": "a"}], TypeError),
    ([{"role": "assistant", "content": "a", "tool_calls": ["add"]}, {"role": "user", "content": "b"}], TypeError),
    ([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}], UnreadMedia)])  # yapf: disable
def test_what_is_no_history(value, error):
    with pytest.raises(error):
        plain_history(value)


@pytest.mark.parametrize("arguments", ["no json", "[1]", "", None, [1]])
def test_a_call_in_a_history_whose_arguments_are_no_object_is_a_fault_of_the_environment(arguments):
    """The chat template would end the run."""
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    with pytest.raises(TypeError, match="a call of a tool in a history is"):
        plain_history([{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "b"}])


def test_a_history_may_have_the_form_of_openai():
    """Turns that call tools have no content, and arguments are a text."""
    user = {"role": "user", "content": "b"}
    turns = [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add", **given}}], **content}
             for given, content in (({"arguments": '{"a": 1}'}, {"content": None}), ({}, {}))]  # yapf: disable
    first, second, last = plain_history([*turns, user])
    assert first == {"role": "assistant", "content": "", "tool_calls": [
        {"id": "1", "function": {"name": "add", "arguments": {"a": 1}}}]}  # yapf: disable
    assert (second["content"], second["tool_calls"][0]["function"]["arguments"], last) == ("", {}, user)


def test_a_history_keeps_calls_thoughts_and_the_media_of_its_row():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turn = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
    result = {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"}
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}
    assert plain(Step(history=[asked, turn | {"odd": 1}, result]))["history"] == [asked, turn, result]
    assert plain(Step("a"))["history"] is None
