"""Experience: selecting, splitting, joining and moving keep every field of every sequence together."""
import pickle
from dataclasses import fields

import pytest
import torch

from lightrft.types import Experience, Prompt, Sample

LENS = [3, 1, 4, 2]


def make() -> Experience:
    """Four sequences with every field set; a value shows its field, its sequence and its position."""
    cu = torch.tensor([0, *LENS]).cumsum(0).to(torch.int32)
    seq = torch.repeat_interleave(torch.arange(4), torch.tensor(LENS))
    token, sequence = 10 * seq + torch.arange(10) - cu[seq], torch.arange(4)
    values = {"cu_seqlens": cu, "media": [(f"{i}.png", ) * i for i in range(4)]}
    for number, f in enumerate(fields(Experience)):
        if f.name not in values:
            base = token if f.metadata["axis"] == "T" else sequence
            values[f.name] = base + 1000 * number
    exp = Experience(**values)
    exp.loss_mask = token % 2 == 0
    exp.scored = sequence % 2 == 0
    return exp


def sequences(exp: Experience) -> list[dict]:
    """Each sequence alone, as plain lists."""
    cu, out = exp.cu_seqlens.tolist(), []
    for b in range(exp.num_seqs):
        row = {}
        for f in fields(exp):
            axis, value = f.metadata["axis"], exp.__dict__[f.name]
            if axis == "T":
                row[f.name] = value[cu[b]:cu[b + 1]].tolist()
            elif axis != "cu":
                row[f.name] = value[b] if axis == "list" else value[b].item()
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
    joined = Experience.cat(parts)
    assert sequences(joined.select([1, 2, 0, 3])) == sequences(exp)
    assert joined.cu_seqlens.dtype == torch.int32


def test_media_travel_as_keys():
    chosen = pickle.loads(pickle.dumps(make().select([3, 1])))
    assert chosen.media == [("3.png", ) * 3, ("1.png", )]
    assert Experience.cat([chosen, make()]).split([[5], [0]])[1].media == [("3.png", ) * 3]


def test_absent_fields_stay_absent_and_half_absent_ones_are_refused():
    exp = make()
    exp.values = exp.media = None
    assert exp.select([0]).values is None and exp.to("cpu").media is None
    assert Experience.cat(exp.split([[0], [1]])).values is None
    with pytest.raises(ValueError, match="values is set in some parts only"):
        Experience.cat([exp, make()])


def test_to_moves_every_tensor_and_copies_nothing_else():
    moved = make().to("meta")
    for f in fields(moved):
        value = moved.__dict__[f.name]
        assert f.metadata["axis"] == "list" or value.device.type == "meta", f.name
    assert moved.media == make().media
    assert sequences(make().to("cpu")) == sequences(make())


def test_a_change_of_a_selection_leaves_the_whole_alone():
    exp = make()
    exp.select([0, 1]).rewards.zero_()
    assert exp.rewards.tolist() == make().rewards.tolist()


def test_response_length():
    sample = Sample(Prompt("u", [1, 2], "p"), 0, 0, [1, 2, 3, 4, 5], [False] * 2 + [True] * 3, [0.0] * 5,
                    [-1] * 2 + [0] * 3, "stop")
    assert sample.response_len == 3


def test_drawn_tokens_stay_known_when_they_leave_the_loss():
    exp = make()
    exp.weight_versions = torch.where(exp.loss_mask, exp.token_ids, -1)
    before, exp.loss_mask = exp.loss_mask, exp.loss_mask & (exp.token_ids % 1000 < 20)
    assert torch.equal(exp.drawn, before) and not torch.equal(exp.drawn, exp.loss_mask)
    exp.weight_versions = None
    assert torch.equal(exp.drawn, exp.loss_mask), "nobody drew them: demonstrations"
