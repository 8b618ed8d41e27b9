"""Responses of several turns by the HF engine: tokens, masks in several runs and log-probs, to the last detail."""
from dataclasses import replace

import pytest

from lightrft.rollout.tests.test_hf_engine import engine, naive_logprobs, requests
from lightrft.rollout.tests.test_partial import TINY
from lightrft.tests.support.episodes import Group, generate
from lightrft.tests.support.forks import branches_are_those_of_their_prompts
from lightrft.tests.support.turns import (PARAMS, Toy, a_turn_without_room_is_dropped, cut_turns, equal,
                                          turns_are_those_by_hand, turns_have_the_scores)
from lightrft.utils.errors import UserError


@pytest.mark.parametrize("family,kv_bytes,more", [
    ("qwen2", 1 << 24, {}), ("qwen2", TINY, {}), ("mistral", TINY, {}), ("gemma2", 1 << 24, {"temperature": 0.7}),
    ("qwen2", 1 << 24, {"temperature": 0.0}), ("qwen2", 1 << 24, {"max_new_tokens": 9})])  # yapf: disable
def test_turns(family, kv_bytes, more):
    """Few slots (``TINY``): responses wait for a slot between two turns."""
    params = replace(PARAMS, **more)
    groups = turns_are_those_by_hand(engine(family, kv_bytes), requests(), params)
    turns_have_the_scores(
        requests(), groups,
        lambda request, ids: naive_logprobs(family, request.token_ids, ids, params.temperature).tolist())


def test_fire_heats_the_first_token_of_the_first_turn_only():
    params = replace(PARAMS, temperature=0.7, first_temperature=8.0)
    groups = turns_are_those_by_hand(engine(), requests(), params)

    def score(request, ids):
        hot, usual = (naive_logprobs("qwen2", request.token_ids, ids, t).tolist() for t in (8.0, 0.7))
        return hot[:1] + usual[1:]

    turns_have_the_scores(requests(), groups, score)


@pytest.mark.parametrize("kv_bytes", [1 << 24, TINY])
def test_branches(kv_bytes):
    """Few slots (``TINY``): responses wait for a slot between two branches."""
    branches_are_those_of_their_prompts(engine(kv_bytes=kv_bytes), requests())


def test_a_turn_without_room():
    a_turn_without_room_is_dropped(engine(), requests())


@pytest.mark.parametrize("kv_bytes", [1 << 24, TINY])
def test_a_cut_turn(kv_bytes):
    found = list(cut_turns(engine(kv_bytes=kv_bytes), requests()))
    assert any(begun.given for _, _, begun, *_ in found), "no cut in a later turn"
    assert all(equal(done, whole) for *_, done, whole in found)


def test_a_turn_may_begin_with_no_token():
    """The response is then the one that the same tokens without stop tokens give."""
    plain = generate(engine(), requests(), replace(PARAMS, stop_token_ids=()))
    found = generate(engine(), requests(), PARAMS, next_turn=lambda ended: [[]] * len(ended))
    for done, whole in ((done, whole) for pair in zip(found, plain) for done, whole in zip(*pair)):
        assert done.token_ids[:len(whole.token_ids)] == whole.token_ids and not done.given
        assert done.logprobs[:len(whole.logprobs)] == pytest.approx(whole.logprobs, abs=5e-6)
        assert len(done.token_ids) == PARAMS.max_new_tokens and done.finish_reason == "length"


def test_without_answers_nothing_changes():
    plain, toy = generate(engine(), requests(), PARAMS), Toy(requests(), turns=0)
    assert generate(engine(), requests(), PARAMS, next_turn=toy) == plain
    stopped = [(i, j, done) for i, group in enumerate(plain) for j, done in enumerate(group)
               if done.finish_reason == "stop"]
    assert sorted(toy.seen, key=lambda one: one[:2]) == stopped != [], "not asked once for each stop token"


def test_tokens_that_the_model_does_not_have_are_refused():
    with pytest.raises(UserError, match="response 0 to prompt 0 has token 1000, and the model has embeddings of"):
        generate(engine(), [Group([5], [1])], replace(PARAMS, stop_token_ids=tuple(range(260))),
                 next_turn=lambda ended: [[5, 1000]])
