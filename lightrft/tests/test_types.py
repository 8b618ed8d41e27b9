"""Batch: selecting, splitting, joining and moving keep every declared field of every sequence together."""
import json
import pickle
from dataclasses import replace

import pytest
import torch

from lightrft.types import Batch, Episode, Experience, number, NUMBERS, Prompt, Sample, Segment
from lightrft.types.episodes import sample_seed
from lightrft.utils.errors import UserError

LENS = [3, 1, 4, 2]


@pytest.fixture(autouse=True)
def calls_and_delays(monkeypatch):
    """A number per response and one per token, declared for a test."""
    monkeypatch.setattr(NUMBERS, "_entries", {})
    number("calls")
    number("delay", "T", missing=-1.0)


def make() -> Batch:
    """Four sequences with every field set; a value shows its field, its sequence and its position."""
    cu = torch.tensor([0, *LENS]).cumsum(0).to(torch.int32)
    seq = torch.repeat_interleave(torch.arange(4), torch.tensor(LENS))
    token, sequence = 10 * seq + torch.arange(10) - cu[seq], torch.arange(4)
    values = {"cu_seqlens": cu, "media": [(f"{i}.png", ) * i for i in range(4)]}
    for i, (name, declared) in enumerate(Batch.declared().items()):
        if name not in values:
            values[name] = (token if declared.axis == "T" else sequence) + 1000 * i
    exp = Batch(**values, extra={"calls": sequence + 0.5, "delay": token + 0.5})
    exp.loss_mask = token % 2 == 0
    exp.scored = sequence % 2 == 0
    return exp


def values_of(exp: Batch) -> dict:
    """Axis and value of every field and number."""
    return {name: (declared.axis, vars(exp)[name]) for name, declared in exp.declared().items()} | {
        name: (NUMBERS.get(name).axis, value) for name, value in exp.extra.items()}  # yapf: disable


def sequences(exp: Batch) -> list[dict]:
    """Each sequence alone, as plain lists."""
    cu, out = exp.cu_seqlens.tolist(), []
    for b in range(exp.num_seqs):
        row = {}
        for name, (axis, value) in values_of(exp).items():
            if axis == "T":
                row[name] = value[cu[b]:cu[b + 1]].tolist()
            elif axis != "cu":
                row[name] = value[b] if axis == "list" or isinstance(value, list) else value[b].item()
        out.append(row)
    return out


@pytest.mark.parametrize("indices", [[0, 1, 2, 3], [3, 0], [2], [1, 1], []])
def test_select_equals_picking_each_sequence(indices):
    exp, chosen = make(), make().select(indices)
    assert sequences(chosen) == [sequences(exp)[i] for i in indices]
    assert chosen.cu_seqlens.dtype == torch.int32 and chosen.cu_seqlens[0] == 0
    assert chosen.num_tokens == chosen.cu_seqlens[-1] == sum(LENS[i] for i in indices)
    assert chosen.seq_lens.tolist() == [LENS[i] for i in indices]


def test_split_and_cat_are_inverse():
    exp = make()
    parts = exp.split([[2, 0], [], [1, 3]])
    assert [part.num_seqs for part in parts] == [2, 0, 2]
    joined = Batch.cat(parts)
    assert sequences(joined.select([1, 2, 0, 3])) == sequences(exp)
    assert joined.cu_seqlens.dtype == torch.int32


def test_media_travel_as_keys():
    chosen = pickle.loads(pickle.dumps(make().select([3, 1])))
    assert chosen.media == [("3.png", ) * 3, ("1.png", )]
    assert Batch.cat([chosen, make()]).split([[5], [0]])[1].media == [("3.png", ) * 3]


def test_absent_fields_stay_absent_and_half_absent_ones_are_refused():
    exp = make()
    exp.values = exp.media = None
    assert exp.select([0]).values is None and exp.to("cpu").media is None
    assert Batch.cat(exp.split([[0], [1]])).values is None
    with pytest.raises(ValueError, match="values is set in some parts only"):
        Batch.cat([exp, make()])


def test_a_number_that_some_parts_lack_is_missing_there():
    joined = Batch.cat([replace(make(), extra={}), make()])
    assert joined.extra["calls"].isnan().tolist() == [True] * 4 + [False] * 4
    assert (joined.extra["delay"] == -1).tolist() == [True] * 10 + [False] * 10


def test_responses_fill_every_field_that_is_declared_to_be_read_from_them():
    prompt = Prompt("u", [1, 2], "p", media=("image:0", ))
    first = Episode.of(prompt, 3, 0, Segment([5], [-0.5], version=7), "stop")
    second = Episode.of(prompt, 3, 1, Segment([5], [-0.25], version=7), "abort")
    second.add([Segment([6], [-0.25], version=8)], "length")
    second.extra |= {"calls": 2, "delay": [0.5]}
    exp = Batch.of([first, second])
    assert exp.keys == [(3, 0), (3, 1)] and exp.cu_seqlens.tolist() == [0, 3, 7] and exp.prompt_lens == [2, 2]
    assert exp.weight_versions.tolist() == [-1, -1, 7, -1, -1, 7, 8] and exp.truncated.tolist() == [False, True]
    assert exp.extra["calls"].nan_to_num(-1).tolist() == [-1, 2] and exp.extra["delay"].tolist() == [-1] * 6 + [0.5]
    assert exp.media == [("image:0", )] * 2 and Batch.of([]).num_tokens == 0
    for name, declared in Batch.declared().items():
        value = vars(exp)[name]
        assert (value is not None) == bool(declared.source or declared.axis == "cu"), name
        assert declared.axis == "list" or value is None or value.dtype == declared.dtype, name


def test_an_episode_forks_and_its_branches_are_one_response():

    def drawn(*ids):
        return Segment([*ids], [-0.5] * len(ids), version=2)

    row = Prompt("u", [1, 2], "p", label="math", media=("image:0", ))
    episode = Episode(row, 3, 0, seed=7)
    episode.fork(replace(row, token_ids=[1, 9]))
    assert not episode.closed and episode.seed == 7 and episode.joined is episode, "nothing was drawn yet"
    episode.add([drawn(5, 6), Segment.given([8]), drawn(7)], "stop")
    episode.fork(replace(row, token_ids=[1, 4, 4], text="q", media=(), unexpanded_ids=[]))
    assert episode.open and episode.prompt.label == "math" and episode.seed == sample_seed(7, "branch", 1)
    episode.add([drawn(6)], "stop")
    assert [branch.token_ids for branch in episode.branches] == [[1, 9, 5, 6, 8, 7], [1, 4, 4, 6]]
    assert (episode.response_len, episode.drawn_len, episode.offset) == (1, 4, 6)
    whole = episode.joined
    assert whole.token_ids == [1, 9, 5, 6, 8, 7, 1, 4, 4, 6] and whole.prompt.media == ("image:0", )
    assert whole.runs == [(True, 2, 4), (False, 4, 5), (True, 5, 6), (False, 6, 9), (True, 9, 10)]
    number("whole", "T", of=lambda response: response.logprobs)
    number("asked", of=lambda response: response.prompt_len)
    exp = Batch.of([episode])
    assert torch.equal(exp.extra["whole"], exp.rollout_logprobs) and exp.extra["asked"].tolist() == [2]
    again = Episode.load(episode.prompt, 3, 0, json.loads(json.dumps(episode.state())))
    assert again == episode and again.joined == whole


def test_the_names_of_lightrft_are_the_same_classes():
    assert Experience is Batch and Sample is Episode


def test_to_moves_every_tensor_and_copies_nothing_else():
    moved = make().to("meta")
    for name, (axis, value) in values_of(moved).items():
        assert axis == "list" or value.device.type == "meta", name
    assert moved.media == make().media
    assert sequences(make().to("cpu")) == sequences(make())


def test_a_change_of_a_selection_leaves_the_whole_alone():
    exp = make()
    exp.select([0, 1]).rewards.zero_()
    assert exp.rewards.tolist() == make().rewards.tolist()


def test_an_episode_has_a_segment_per_source_and_lists_per_token():
    """Turns of the same weights with an answer between them, a resumed turn, and other weights."""
    episode = Episode.of(Prompt("u", [1, 2], "p"), 4, 1, Segment([3, 4], [-0.1, -0.2], version=7), "stop")
    episode.give([8, 9])
    assert episode.open
    episode.add([Segment([5], [-0.3], version=7)], "abort")
    episode.add([Segment([], [], version=7)], "abort")
    episode.add([Segment([6], [-0.4], version=7)], "abort")
    assert episode.open and [each.token_ids for each in episode.segments] == [[3, 4], [8, 9], [5, 6]]
    episode.add([Segment([7], [-0.5], version=8)], "length")
    assert episode.token_ids == [1, 2, 3, 4, 8, 9, 5, 6, 7] and episode.response_ids == episode.token_ids[2:]
    assert episode.loss_mask == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 3
    assert episode.logprobs == [0.0, 0.0, -0.1, -0.2, 0.0, 0.0, -0.3, -0.4, -0.5]
    assert episode.weight_versions == [-1, -1, 7, 7, -1, -1, 7, 7, 8]
    assert (episode.prompt_len, episode.response_len, episode.num_tokens, episode.truncated) == (2, 7, 9, True)
    assert episode.drawn_len == 5
    episode.seed = 5
    assert Episode.load(episode.prompt, 4, 1, episode.state()) == episode and episode.key == ("sample", 4, 1)


def test_an_answer_at_the_start_of_a_resumed_turn_is_given():
    episode = Episode.of(Prompt("u", [1], "p"), 0, 0, Segment([2], [-1.0], version=3), "abort")
    episode.give([3])
    episode.add([Segment([4], [-2.0], version=3)], "stop")
    assert [(each.token_ids, each.drawn) for each in episode.segments] == [([2], True), ([3], False), ([4], True)]


def test_drawn_tokens_stay_known_when_they_leave_the_loss():
    exp = make()
    exp.weight_versions = torch.where(exp.loss_mask, exp.token_ids, -1)
    before, exp.loss_mask = exp.loss_mask, exp.loss_mask & (exp.token_ids % 1000 < 20)
    assert torch.equal(exp.drawn, before) and not torch.equal(exp.drawn, exp.loss_mask)
    exp.weight_versions = None
    assert torch.equal(exp.drawn, exp.loss_mask), "nobody drew them: demonstrations"


@pytest.mark.parametrize("more, words", [
    ({"axis": "b"}, "axis='b'; write axis='B' for a number per response, or axis='T'"),
    ({"dtype": "float"}, "dtype='float'; write a type of torch"),
    ({"dtype": torch.int64}, "missing=nan, which torch.int64 cannot hold; .* missing=0"),
    ({"missing": "none"}, "missing='none'; write a number"),
    ({"of": "prompt_len"}, "of='prompt_len'; write a function of the response"),
])  # yapf: disable
def test_a_wrong_declaration_of_a_number_is_refused(more, words):
    with pytest.raises(UserError, match=f"number\\('wrong'\\): {words}"):
        number("wrong", **more)
    assert "wrong" not in NUMBERS


@pytest.mark.parametrize("extra, words", [
    ({"calls": "two"}, "'calls' of response 1 to the prompt 'p7' is 'two'; set one number, or None"),
    ({"calls": [1, 2]}, r"'calls' .* is \[1, 2\]; set one number"),
    ({"whole": 0.5}, r"'whole' .* is 0.5, which torch.int64 cannot hold; declare .*dtype=torch.float32"),
    ({"delay": 3}, "'delay' .* is 3; set a list with a number for each of the last tokens"),
    ({"delay": [0.0] * 9}, "'delay' .* has 9 values for 3 tokens"),
    ({"call": 1}, r"'call' is no declared number of responses \(did you mean calls\?\); .* declared: calls, delay"),
    ({"broken": 1}, "'broken' .* of=... of its declaration raised AttributeError: .*nothing"),
])  # yapf: disable
def test_a_wrong_number_of_a_response_is_named(extra, words):
    number("whole", dtype=torch.int64, missing=0)
    if "broken" in extra:
        number("broken", of=lambda response: response.nothing)
    response = Episode(Prompt("p7", [1], "p"), 0, 1, [Segment([2, 3], [-1.0, -1.0], version=0)], "stop", extra=extra)
    with pytest.raises(UserError, match=words):
        Batch.of([response])


def test_a_number_that_a_batch_does_not_have_is_named():
    with pytest.raises(UserError, match="'call' is no declared number of responses .*did you mean calls"):
        make().extra["call"]
    with pytest.raises(UserError, match="the number 'calls' is not in this batch, which did not come from responses"):
        replace(make(), extra={}).extra["calls"]
