"""An environment that answers: whole runs on responses of several turns, with the mask, the log-probs and the text."""
from types import SimpleNamespace

import pytest
import torch

from lightrft.rewards.base import Outcome
from lightrft.tests.support import runs, tiny
from lightrft.tests.support.boundary_tokenizers import metaspace
from lightrft.trainer.environment import next_turn, Reply
from lightrft.trainer.environment_trial import opened
from lightrft.trainer.samples import decode, reward_input, stop_token_ids
from lightrft.types import Episode, number, NUMBERS, Prompt, Segment
from lightrft.utils.errors import UserError
from lightrft.utils.play import Play

no_picture = runs.no_picture
ANSWER = "(go on)"
STOPS = list("aeiouxyz")  # so that turns end


class Twice:
    """Answers the first two turns of a response."""

    def __init__(self):
        self.asked = []

    def turn(self, prompt, response):
        self.asked.append((prompt.text, response))
        return ANSWER if response.count(ANSWER) < 2 else None


def trainer(home, folder, score=runs.letters, **options):
    made = runs.build(home, folder, score, stop=STOPS, generate_max_len=40, save_trajectories=True, **options)
    made.maker.environment = Twice()
    if made.maker.greedy:
        made.maker.greedy.environment = made.maker.environment
    return made


def spans(mask):
    """The runs [start, stop) of True."""
    edges = torch.cat([mask.new_zeros(1), mask, mask.new_zeros(1)]).long().diff().nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2]))


def test_answers_are_in_the_response_and_not_in_the_loss(home, tmp_path):
    seen = []
    made = trainer(home, tmp_path, lambda item: seen.append(item.response) or runs.letters(item), max_epochs=2)
    made.sync_weights(0)
    made.prepared["actor"].model.eval()
    done = made.maker.make([made.loader.dataset[i] for i in range(4)], 0)
    answer, turns = made.tokenizer.encode(ANSWER), set()
    for i, episode in enumerate(done.episodes):
        exp = done.exp.select([i])
        prompt = len(made.tokenizer.encode(episode.prompt.text))
        assert torch.equal(exp.loss_mask, exp.weight_versions >= 0) and not exp.loss_mask[:prompt].any()
        gaps = [exp.token_ids[a:b].tolist() for (_, a), (b, _) in zip(spans(exp.loss_mask), spans(exp.loss_mask)[1:])]
        assert gaps == [answer] * len(gaps) and episode.text.count(ANSWER) == len(gaps)
        assert torch.equal(exp.rollout_logprobs != 0, exp.loss_mask)
        assert (exp.rollout_logprobs - exp.old_logprobs).abs().max() < 1e-5, "not the log-prob of the whole sequence"
        turns.add(len(gaps))
    end = made.tokenizer.eos_token
    drawn = ["\n".join(text.removesuffix(end) for text in episode.text.split(ANSWER)) for episode in done.episodes]
    assert 2 in turns and sorted(seen) == sorted(drawn), "rewards read what the policy drew"
    assert {prompt for prompt, _ in made.maker.environment.asked} == set(runs.PROMPTS[:4])


@pytest.mark.parametrize("more", [{}, {"oversample": 1.5, "max_steps": 4}, {"dynamic_sampling": True},
                                  {"advantage_estimator": "gae", "init_kl_coef": 0.1, "max_epochs": 2},
                                  {"advantage_estimator": "remax"}, {"overlap_passes": True, "max_epochs": 2},
                                  {"use_fire": True}], ids=str)  # yapf: disable
def test_runs_of_several_turns_train(more, home, tmp_path):
    made = trainer(home, tmp_path, **{"max_steps": 2, "n_samples_per_prompt": 2} | more)
    made.fit()
    done = runs.Run(made, tmp_path)
    rows = [row for step in range(1, len(done.lines) + 1) for row in done.rollout(step)]
    assert any(ANSWER in row["response"] for row in rows)
    assert all(line["policy/grad_norm"] > 0 for line in done.lines)
    if not more:  # every token is of the current weights, at the training temperature
        assert all(line["rollout/mismatch/abs_logp_mean"] < 1e-5 for line in done.lines)


def test_answers_count_neither_in_lengths_nor_in_the_overlong_penalty(home, tmp_path):
    """For the samples and for the greedy baseline alike; the length with them is a metric of its own."""
    made = trainer(home, tmp_path, lambda item: Outcome(0.0), advantage_estimator="remax", overlong_buffer=True,
                   overlong_buffer_len=12)
    made.sync_weights(0)
    made.prepared["actor"].model.eval()
    done = made.maker.make([made.loader.dataset[i] for i in range(4)], 0)
    parts = [done.exp.select([i]) for i in range(8)]
    prompts = [len(made.tokenizer.encode(episode.prompt.text)) for episode in done.episodes]
    whole = [part.num_tokens - prompt for part, prompt in zip(parts, prompts)]
    lengths = [episode.drawn_len for episode in done.episodes]
    assert lengths == [part.drawn.sum().item() for part in parts] and sum(whole) > sum(lengths)
    for name, expected in (("response", lengths), ("whole", whole)):
        assert done.metrics[f"rollout/{name}_len/mean"] == pytest.approx(sum(expected) / 8)
        assert done.metrics[f"rollout/{name}_len/max"] == max(expected)
    assert done.metrics["rollout/tokens"] == done.exp.loss_mask.sum() == sum(lengths)
    penalty = [-min(max(length - 28, 0), 12) / 12 for length in lengths]
    assert any(penalty) and done.exp.rewards.tolist() == pytest.approx(penalty)
    greedy = [-min(max(episode.greedy[1] - 28, 0), 12) / 12 for episode in done.episodes]
    assert done.exp.baseline_rewards.tolist() == pytest.approx(greedy)


def test_an_answer_that_is_no_text_is_an_error_that_names_the_prompt(home, tmp_path):
    made = trainer(home, tmp_path)
    made.maker.environment.turn = lambda prompt, response: 7
    with pytest.raises(UserError, match=r"answers the prompt '.*' with 7; turn\(\) returns a text"):
        made.fit()


def test_evaluation_plays_the_environment(home, tmp_path):
    made = trainer(home, tmp_path, lambda item: Outcome(len(item.turns) - 1.0),
                   eval_data=[str(home / "test.jsonl")], eval_temperature=1.0)  # yapf: disable
    made.sync_weights(0)
    assert made.evaluate()["eval/all/reward@1"] == 0, "without an environment"
    made.evaluator.environment = Twice()
    assert made.evaluate()["eval/all/reward@1"] > 0


def test_a_response_under_way_tells_the_environment_all_its_turns(home, tmp_path):
    made = trainer(home, tmp_path, oversample=1.5, max_steps=2)
    made.sync_weights(0)
    response, *_ = made.maker.open(0, made.loader.dataset[0], "draw")
    begun = made.tokenizer.encode("b" + ANSWER)
    response.add([Segment(begun[:1], [-1.0], version=0)], "abort")
    response.give(begun[1:])
    made.prepared["actor"].model.eval()
    made.maker.advance([response], 1, set())
    assert all(text.startswith("b" + ANSWER) for _, text in made.maker.environment.asked)
    assert made.maker.environment.asked and not response.open


def test_answers_have_no_blank_of_the_tokenizer_before_them():
    """Which puts one before every text; the environment's own stays. A stop string is its token in a text."""
    tokenizer, prompt = metaspace(), Prompt("u", [1], "a")
    done = Segment(tokenizer.encode("b]"), [0.0] * 3)
    for answer in ("[7] ", " [7] "):
        ask = next_turn(SimpleNamespace(turn=lambda *_: answer), tokenizer)
        turn, again = (answered.result() for answered in ask([Episode(prompt, 0, k, [done]) for k in range(2)]))
        assert "".join(tokenizer.convert_ids_to_tokens(turn)) == answer.replace(" ", "▁")
        assert again == turn
    blank, heard = tokenizer.convert_tokens_to_ids("\u2581"), []
    begun = Episode(prompt, 0, 0, [Segment([blank], [0.0]), done])
    ask = next_turn(SimpleNamespace(turn=lambda _, text: heard.append(text)), tokenizer)
    assert ask([begun])[0].result() is None and heard == ["  b]"], "what was drawn before keeps its blank"
    stops = stop_token_ids(["]", "\n", " ["], tokenizer)
    assert tokenizer.convert_ids_to_tokens(stops) == ["]", "\n", "▁["]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_text_of_a_turn_has_no_end_token_whether_or_not_its_answer_had_room(reason):
    """Rewards would read the token as a part of the answer."""
    tokenizer, answer = tiny.tokenizer(), Segment.given([200])
    first, last = (Segment(tokenizer.encode(text) + [tokenizer.eos_token_id], [0.0] * 2, version=0) for text in "bc")
    for segments, text in (([first], "b"), ([first, answer, last], "b\nc")):
        episode = Episode(Prompt("u", [5], "a"), 0, 0, segments, reason)
        decode(tokenizer, [episode])
        assert reward_input(episode.prompt, episode.text, episode.play).response == text


class Counting(Twice):
    """Counts its answers to a response."""

    def turn(self, prompt, response):
        answer = super().turn(prompt, response)
        return Reply(answer, {} if answer is None else {"tool_calls": 1})


def test_a_number_of_a_response_is_declared_and_set_and_nothing_else(home, tmp_path, monkeypatch):
    """It arrives in the batch, in the metrics and in the rows. An answer without room is counted, and not appended."""
    monkeypatch.setattr(NUMBERS, "_entries", {})
    number("tool_calls")  # place 1; place 2 is in Counting
    made = trainer(home, tmp_path, oversample=1.5, max_steps=2)
    made.maker.environment = Counting()
    made.fit()
    done = runs.Run(made, tmp_path)
    for step, line in enumerate(done.lines, 1):
        calls = [row.get("numbers", {}).get("tool_calls") for row in done.rollout(step)]
        for row, count in zip(done.rollout(step), calls):
            dropped = (count or 0) - row["response"].count(ANSWER)
            assert dropped in ((0, 1) if row["finish_reason"] == "length" else (0, ))
        counted = [count for count in calls if count is not None]
        assert line["response/tool_calls/mean"] == pytest.approx(sum(counted) / len(counted))
        assert line["response/tool_calls/max"] == max(counted) > 0


def test_a_number_that_nobody_declared_is_refused(home, tmp_path):
    made = trainer(home, tmp_path)
    made.maker.environment.turn = lambda prompt, response: Reply(None, {"tool_cals": 1})
    with pytest.raises(UserError,
                       match="'tool_cals' is no declared number of responses; declare it with .*'tool_cals'"):
        made.fit()


@pytest.mark.parametrize("messages, shown", [([], "all of it"), ([{"role": "user", "content": "the row"}], "all of it"),
                                             ([{"role": "user", "content": "other"}], "other")])  # yapf: disable
def test_a_trial_shows_what_an_environment_begins_with(messages, shown):
    """Messages, or a text in place of the prompt, which may have no messages."""
    asked = {"messages": messages and [{"role": "user", "content": "the row"}], "text": "the row"}
    episode = Episode(Prompt("0:0", [1], "all of it", messages), 0, 0, play=Play(asked=asked))
    assert [*opened(episode)] == [f"environment: begins with '{shown}'"]
