"""Environments that rewrite the conversation: the response goes on behind another prompt, in another branch."""
import json
from dataclasses import replace

import pytest

from lightrft.environments.base import EnvironmentSpec, Step, UnreadMedia
from lightrft.environments.chat_format import ChatFormat
from lightrft.environments.observations import plain_history
from lightrft.environments.play import Player
from lightrft.environments.pool import EnvironmentPool
from lightrft.environments.worker import plain
from lightrft.inference.generation import BatchGenerator
from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.hf.engine import HFEngine
from lightrft.rollout.scheduler import generate
from lightrft.tests.support import environments, tiny, tool_models
from lightrft.tests.support.forks import alone
from lightrft.trainer.carried_groups import group_state, load_group
from lightrft.types import Episode, Prompt

TURNS, NEW, ENDS = 5, 64, tuple(range(30, 60))
PARAMS = SamplingParams(NEW, stop_token_ids=ENDS)


@pytest.fixture(name="tok", scope="module")
def fixture_tok():
    return tool_models.tokenizer()


@pytest.fixture(name="engine", scope="module")
def fixture_engine(tok):
    model = tiny.model("qwen3", vocab_size=len(tok), initializer_range=0.12, num_hidden_layers=1)
    model.set_attn_implementation("packed")
    return HFEngine(model, {tok.eos_token_id}, 1 << 24)


def started(tok):
    return Player(EnvironmentPool(EnvironmentSpec(environments.__file__, "Compacting"), 1, 20.0), tok,
                  ChatFormat(tok, "qwen3"), TURNS, 200)  # yapf: disable


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
