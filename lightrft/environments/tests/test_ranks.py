"""Uneven turns: the gradient depends on neither the ranks nor the cut into micro-batches. And environments of two
ranks that live on across steps, and show pictures."""
import json

import pytest
import torch

from lightrft.tests.support import environment_ranks, runs, tool_models
from lightrft.tests.support.invariants import largest_gap
from lightrft.tests.support.launch import torchrun


@pytest.mark.dist
def test_gradients_of_uneven_turns_on_one_and_two_ranks_under_three_cuts(tmp_path):
    tool_models.save_model(tmp_path / "model", num_hidden_layers=1)
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in runs.PROMPTS]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if environment_ranks.HAS_VISION:
        from lightrft.tests.support.media_runs import write_shown
        (tmp_path / "sees").mkdir()
        write_shown(tmp_path / "sees", "qwen2_vl")
    one = environment_ranks.measure(tmp_path, tmp_path / "one")
    (tmp_path / "two").mkdir()
    torchrun(environment_ranks.__name__, tmp_path, tmp_path / "two")
    two = torch.load(tmp_path / "two" / "found.pt", weights_only=False)
    played_again_on_two_ranks(two.pop("lines"))
    if environment_ranks.HAS_VISION:
        pictures_go_to_the_rank_that_trains_them(two.pop("shown"), environment_ranks.shown(tmp_path / "sees", tmp_path))
    turns = [one.pop("turns"), two.pop("turns")]
    assert len(turns[1]) == 2 and sorted(turns[0][0]) == sorted(sum(turns[1].values(), []))
    assert len({*turns[0][0]}) > 1, "even turns"
    whole = one.pop("whole")
    assert max(largest_gap(other, whole) for other in (*one.values(), *two.values())) < 5e-7


def played_again_on_two_ranks(lines):
    """The second step of a run, where a response may go on at the other rank, and of one that has resumed behind the
    first step, as both ranks see them."""
    replays = [sum(line["replays"] for line in of_ranks) for of_ranks in zip(*lines)]
    assert replays[0] < replays[1]
    for of_rank in lines:
        assert [line["env/replays"] for line in of_rank] == replays
        assert not any(line["env/restarts"] for line in of_rank)


def pictures_go_to_the_rank_that_trains_them(two, one):
    """And nowhere else; gradients are those of one rank."""
    for own, trained, known in two["keys"]:
        assert known == own | trained and trained - own, "none moved"
    assert any(known < two["keys"][0][0] | two["keys"][1][0] for *_, known in two["keys"]), "both have all"
    assert largest_gap(two["gradients"], one["gradients"]) < 2e-6
