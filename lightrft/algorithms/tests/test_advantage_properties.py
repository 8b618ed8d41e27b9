"""What holds for every advantage estimator: order, names of groups, padding, and what the others of a batch change."""
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightrft.algorithms import ADVANTAGES
from lightrft.algorithms.base import action_mask
from lightrft.config.schema import AlgorithmConfig
from lightrft.config.tree import extended
from lightrft.tests.support.ragged import (FIXED, PROFILE, SAMPLES, SEEDS, ours, over, rollout, shuffled,
                                           swapped_in_groups, without_gaps)
from lightrft.types import Experience

NAMES = ours(ADVANTAGES)
CONFIGS = st.builds(extended(AlgorithmConfig), gamma=st.sampled_from([1.0, 0.9]), pass_k=st.sampled_from([0, 2, 3]),
                    whiten_unbiased=st.booleans())


def estimate(name, exp, cfg):
    """Advantages, by the numbers of the tokens."""
    found = ADVANTAGES.get(name).fn(exp, cfg)
    return dict(zip(exp.token_ids[exp.loss_mask].tolist(), found[exp.loss_mask].tolist()))


def same(got, want, what):
    assert got == pytest.approx(want, rel=1e-9, abs=1e-9), what


def newcomer(group, reward):
    """One sample more, unscored without a ``reward``, whose tokens have numbers of their own."""
    one, _, _ = rollout([(0, [1, 0, 1])], 1)
    scored, reward = torch.tensor([reward is not None]), torch.nan if reward is None else reward
    one = over(one, "B", lambda v: torch.full_like(v, reward))
    return replace(one, group_ids=torch.tensor([group]), scored=scored, token_ids=one.token_ids + 1000)


def known(advantages):
    return {token: value for token, value in advantages.items() if token < 1000}


@pytest.mark.parametrize("name", NAMES)
@settings(PROFILE, max_examples=25)
@given(SAMPLES, SEEDS, CONFIGS, st.sampled_from([torch.nan, torch.inf, -torch.inf]))
def test_order_names_padding_and_garbage_do_not_matter(name, samples, seed, cfg, garbage):
    exp, _, _ = rollout(samples, seed)
    want = estimate(name, exp, cfg)
    same(estimate(name, exp.select(shuffled(exp.num_seqs, seed)), cfg), want, "packing order")
    same(estimate(name, exp.select(swapped_in_groups(exp, seed)), cfg), want, "order within a group")
    same(estimate(name, replace(exp, group_ids=40 - 3 * exp.group_ids), cfg), want, "names of groups")
    same(estimate(name, without_gaps(exp), cfg), want, "padding")
    spoilt = over(exp, "T", lambda v: torch.where(action_mask(exp), v, garbage))
    spoilt.rewards = torch.where(exp.scored, exp.rewards, garbage)
    same(estimate(name, spoilt, cfg), want, "garbage outside the mask and where nothing was scored")
    kept = action_mask(exp)[exp.loss_mask].tolist()
    assert not any(value for value, scored in zip(want.values(), kept) if not scored)


@pytest.mark.parametrize("name", NAMES)
@settings(PROFILE, max_examples=25)
@given(SAMPLES, SEEDS, CONFIGS, st.integers(0, 3), st.booleans())
def test_an_unscored_sample_changes_nothing_else(name, samples, seed, cfg, group, first):
    """In its own group, in another or in a new one; also for statistics over the whole batch."""
    exp, _, _ = rollout(samples, seed)
    parts = [exp, newcomer(group, None)]
    got = estimate(name, Experience.cat(parts[::-1] if first else parts), cfg)
    assert all(value == 0 for token, value in got.items() if token >= 1000)
    same(known(got), estimate(name, exp, cfg), "an unscored sample")


def test_which_estimators_look_beyond_the_group():
    """Those that whiten over the rollout batch, and gpg, which scales by the share of its groups that teach."""
    exp, _, _ = rollout(FIXED, 8)
    exp.scored[:] = True
    both = Experience.cat([exp, newcomer(7, 0.5), newcomer(7, 3.0), newcomer(8, 1.0)])

    def moved(name):
        cfg = extended(AlgorithmConfig)()
        return known(estimate(name, both, cfg)) != pytest.approx(estimate(name, exp, cfg), rel=1e-9, abs=1e-9)

    assert {name for name in NAMES if moved(name)} == {name for name in NAMES if ADVANTAGES.get(name).whitens} | {"gpg"}
