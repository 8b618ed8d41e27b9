"""Properties of every policy loss x aggregation x correction: the cut, the order and the padding do not matter."""
import math
from dataclasses import fields, replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightrft.algorithms import ADVANTAGES, CORRECTIONS, POLICY_LOSSES
from lightrft.algorithms.base import action_mask
from lightrft.config.presets import RECIPES
from lightrft.config.schema import AlgorithmConfig
from lightrft.config.tree import extended
from lightrft.models.loss import PolicyLoss
from lightrft.ops.aggregate import MODES, aggregate, count
from lightrft.ops.surrogate import safe_log_ratio, sequence_ratio
from lightrft.tests.support.ragged import (FIXED, PROFILE, SAMPLES, SEEDS, ours, over, random_cut, rollout, shuffled,
                                           swapped_in_groups, with_all_masked, without_gaps)
from lightrft.types import Experience

LOSSES, WEIGHTS, ESTIMATORS = ours(POLICY_LOSSES), ours(CORRECTIONS), ours(ADVANTAGES)
AGGREGATIONS = [*product(MODES, [True]), ("seq-mean-token-sum-norm", False)]
CHOOSING = [name for name in LOSSES if POLICY_LOSSES.get(name).selects]
OPTIONS = {
    "eps_clip": 0.2, "eps_clip_high": 0.3, "dual_clip": 1.5, "clip_cov_ratio": 0.3, "clip_cov_low": 0.05,
    "kl_cov_ratio": 0.3, "use_kl_loss": True, "init_kl_coef": 0.1, "entropy_coef": 0.02
}
BOUNDS = {"correction_low": 0.6, "correction_high": 1.5, "correction_veto": 0.45}
GARBAGE = [math.nan, math.inf, -math.inf]
NORM, KL_COEF, SEED = 7.0, 0.1, 3


def config(loss, weight, aggregation, **options):
    mode, by_seqs = aggregation
    read = {option: BOUNDS[option] for option in CORRECTIONS.get(weight).reads}
    return extended(AlgorithmConfig)(policy_loss=loss, rollout_correction=weight, loss_agg_mode=mode,
                                     loss_agg_norm_seqs=by_seqs, **OPTIONS | read | options)


def chosen(exp, new, cfg):
    """``exp`` with the choice of the loss among all its tokens, made before the cut as the trainer does."""
    selects = POLICY_LOSSES.get(cfg.policy_loss).selects
    if selects is None or exp.selected is not None:
        return exp
    return replace(exp, selected=selects(new[exp.token_ids].detach(), exp, cfg, SEED))


def learn(exp, new, entropy, cfg, parts=None, spoil=lambda module: module):
    """``(loss, d loss / d new, d loss / d entropy)`` of one optimizer step in the micro-batches ``parts``."""
    module = spoil(PolicyLoss(cfg, NORM))
    new, entropy = (x.detach().clone().requires_grad_() for x in (new, entropy))
    denominators = module.denominators(count(exp.loss_mask, exp.cu_seqlens))
    pieces = chosen(exp, new, cfg).split(parts or [list(range(exp.num_seqs))])
    losses = [module(new[e.token_ids], entropy[e.token_ids], e, denominators, KL_COEF)[0] for e in pieces]
    total = torch.stack(losses).sum()
    return total.detach(), *torch.autograd.grad(total, (new, entropy), materialize_grads=True)


def same(got, want, what):
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda m: f"{what}: {m}")


def check(exp, new, entropy, cfg, seed, garbage, spoil=lambda module: module):
    """Every invariance of one combination; returns the result that they share."""

    def run(e, parts=None, x=new, h=entropy):
        return learn(e, x, h, cfg, parts, spoil)

    want, whole = run(exp), chosen(exp, new, cfg)
    same(run(whole, random_cut(exp.num_seqs, seed)), want, "cut into micro-batches")
    same(run(whole, [[b] for b in range(exp.num_seqs)]), want, "one sample per micro-batch")
    same(run(whole.select(shuffled(exp.num_seqs, seed))), want, "packing order")
    same(run(whole.select(swapped_in_groups(exp, seed))), want, "order within a group")
    same(run(with_all_masked(exp)), want, "an all-masked sample")
    same(run(without_gaps(exp)), want, "padding")
    x, h = (torch.where(exp.loss_mask, v, garbage) for v in (new, entropy))
    same(run(over(exp, "T", lambda v: torch.where(exp.loss_mask, v, garbage)), x=x, h=h), want, "garbage")
    assert not want[1][~exp.loss_mask].any() and not want[2][~exp.loss_mask].any()
    return want


def prepared(exp, new, weight, fresh, high_entropy_mask):
    """The old log-probs as the trainer sets them, and the tokens that get a policy gradient."""
    old = exp.rollout_logprobs if weight == "bypass" else None if fresh else exp.old_logprobs
    return replace(exp, old_logprobs=old, high_entropy_mask=exp.loss_mask & (new > -1.5) if high_entropy_mask else None)


def pairs(loss):
    """Each weight with two of the six aggregations, others for the next loss: all pairs of the three occur."""
    index, numbered = LOSSES.index(loss), product(enumerate(WEIGHTS), enumerate(AGGREGATIONS))
    return [(weight, aggregation) for (i, weight), (j, aggregation) in numbered if (index + i + j) % 3 == 0]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_pair_is_invariant(loss):
    """Random batches below have any combination."""
    for number, (weight, aggregation) in enumerate(pairs(loss)):
        exp, new, entropy = rollout(FIXED, 8)
        exp, cfg = prepared(exp, new, weight, fresh=False, high_entropy_mask=False), config(loss, weight, aggregation)
        _, gradient, _ = check(exp, new, entropy, cfg, number, GARBAGE[number % 3])
        rest = learn(replace(exp, advantages=torch.zeros_like(new)), new, entropy, cfg)[1]
        assert not torch.allclose(gradient, rest), "only the KL has a gradient"


COMBINATIONS = st.builds(config, st.sampled_from(LOSSES), st.sampled_from(WEIGHTS), st.sampled_from(AGGREGATIONS))


@settings(PROFILE, max_examples=150)
@given(COMBINATIONS, SAMPLES, SEEDS, st.booleans(), st.booleans(), st.sampled_from(GARBAGE))
def test_random_batches_are_invariant(cfg, samples, seed, fresh, high_entropy_mask, garbage):
    exp, new, entropy = rollout(samples, seed)
    check(prepared(exp, new, cfg.rollout_correction, fresh, high_entropy_mask), new, entropy, cfg, seed, garbage)


@settings(PROFILE, max_examples=100)
@given(COMBINATIONS, st.sampled_from(ESTIMATORS), SAMPLES, SEEDS)
def test_the_order_of_the_rollout_does_not_matter(cfg, estimator, samples, seed):
    """From rewards to gradients; a seeded choice of tokens is made by their positions, so it moves with its samples."""
    exp, new, entropy = rollout(samples, seed)
    exp.loss_mask = action_mask(exp)

    def advised(e):
        return replace(e, advantages=torch.where(e.loss_mask, ADVANTAGES.get(estimator).fn(e, cfg), 0))

    exp.selected = chosen(advised(exp), new, cfg).selected
    want = learn(advised(exp), new, entropy, cfg)
    for order in (shuffled(exp.num_seqs, seed), swapped_in_groups(exp, seed)):
        same(learn(advised(exp.select(order)), new, entropy, cfg), want, f"{estimator} {order}")


def test_the_fixed_batch_reaches_every_bound():
    exp, new, entropy = rollout(FIXED, 8)
    for weight in WEIGHTS:
        module = PolicyLoss(config("ppo", weight, AGGREGATIONS[0]), NORM)
        _, metrics = module(new, entropy, exp, module.denominators(count(exp.loss_mask, exp.cu_seqlens)), KL_COEF)
        reached = {key for key, value in metrics.items() if "frac" in key and value[exp.loss_mask].any()}
        corrected = {"correction_bound_frac", "correction_veto_frac"} if CORRECTIONS.get(weight).reads else set()
        assert reached == {"clip_frac_low", "clip_frac_high", "clip_frac_dual"} | corrected, weight


def _wrong(change):
    """A policy loss module whose token losses go through ``change(loss, exp)``."""

    def spoil(module):
        right = module.policy_loss

        def wrong(logprobs, exp, cfg):
            loss, metrics = right(logprobs, exp, cfg)
            return change(loss, exp), metrics

        module.policy_loss = wrong
        return module

    return spoil


@pytest.mark.parametrize("change,broken", [
    (lambda loss, exp: loss / exp.loss_mask.sum().clamp_min(1), "micro-batch"),
    (lambda loss, exp: loss * loss.detach()[exp.loss_mask].sum(), "micro-batch"),
    (lambda loss, exp: loss * torch.arange(len(loss)), "micro-batch"),
    (lambda loss, exp: loss * exp.seq_lens.repeat_interleave(exp.seq_lens), "padding"),
    (lambda loss, exp: loss * (1 + exp.seq_lens.diff().sign().sum()), "micro-batch"),
    (lambda loss, exp: loss + 0 * exp.token_rewards.sum(), "garbage"),
])
def test_the_checks_notice_a_wrong_loss(change, broken):
    exp, new, entropy = rollout(FIXED, 8)
    with pytest.raises(AssertionError, match=broken):
        check(exp, new, entropy, config("ppo", "none", AGGREGATIONS[0]), 1, math.nan, _wrong(change))


@pytest.mark.parametrize("name", CHOOSING)
def test_a_choice_per_micro_batch_would_depend_on_the_cut(name):
    """Why the trainer chooses among the tokens of the whole mini-batch, and before it cuts it."""
    exp, new, entropy = rollout(FIXED, 8)
    cfg, alone = config(name, "none", AGGREGATIONS[0]), [[b] for b in range(exp.num_seqs)]
    whole = chosen(exp, new, cfg)
    apart = Experience.cat([chosen(part, new, cfg) for part in exp.split(alone)])
    assert whole.selected.any() and not torch.equal(whole.selected, apart.selected)
    want = learn(whole, new, entropy, cfg)
    same(learn(whole, new, entropy, cfg, alone), want, "chosen once")
    assert not torch.allclose(learn(apart, new, entropy, cfg, alone)[1], want[1])


@pytest.mark.parametrize("name", CHOOSING)
@settings(PROFILE, max_examples=25)
@given(SAMPLES, SEEDS)
def test_the_choice_is_that_of_the_mini_batch_in_any_order(name, samples, seed):
    """A mini-batch within a rollout (its mask narrowed) chooses what it would choose alone; ties and draws aside, in
    any order."""
    exp, new, _ = rollout([*samples, *FIXED], seed)
    cfg = config(name, "none", AGGREGATIONS[0], clip_cov_ratio=1.0)
    mini = list(range(len(samples), exp.num_seqs))
    member = torch.arange(exp.num_seqs).repeat_interleave(exp.seq_lens) >= len(samples)
    narrowed = chosen(replace(exp, loss_mask=exp.loss_mask & member), new, cfg).select(mini)
    assert torch.equal(narrowed.selected, chosen(exp.select(mini), new, cfg).selected) and narrowed.selected.any()
    order = shuffled(len(mini), seed)
    turned = chosen(replace(narrowed, selected=None).select(order), new, cfg)
    assert torch.equal(turned.selected, narrowed.select(order).selected)


def aggregated(token_loss, exp, cfg):
    """The loss of the whole batch from token losses written by hand."""
    denominators = PolicyLoss(cfg, NORM).denominators(count(exp.loss_mask, exp.cu_seqlens))
    return aggregate(token_loss, exp.loss_mask, exp.cu_seqlens, cfg.loss_agg_mode, denominators, cfg.loss_agg_norm_seqs)


def plain(loss, weight, aggregation, **options):
    """A combination without KL and entropy."""
    return config(loss, weight, aggregation, use_kl_loss=False, entropy_coef=0.0, **options)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("bounds", [{}, {"eps_clip": 1.0, "eps_clip_high": math.inf, "dual_clip": None}])
def test_the_first_update_is_weighted_reinforce(loss, bounds):
    """``-w * A * log pi``, for losses with one ratio per sequence because A and w are the same on all its tokens."""
    exp, new, entropy = rollout(FIXED, 8)
    lens, each = exp.seq_lens, torch.linspace(-0.9, 0.9, 7, dtype=torch.float64)
    gap, advantages = each.repeat_interleave(lens), each.cos().roll(3).sub(0.8).repeat_interleave(lens)
    exp = replace(exp, advantages=advantages, rollout_logprobs=new - gap, selected=torch.zeros_like(exp.loss_mask))
    for weight, aggregation in product(WEIGHTS, AGGREGATIONS):
        cfg, entry, x = plain(loss, weight, aggregation, **bounds), CORRECTIONS.get(weight), new.clone()
        w = entry.fn(replace(exp, old_logprobs=new), entry.resolve(cfg))
        w = torch.where(gap.exp() < BOUNDS["correction_veto"], 0, w) if entry.reads else w
        loss_by_hand = aggregated(-w * advantages * x.requires_grad_(), exp, cfg)
        first = replace(exp, old_logprobs=new if weight == "bypass" else None)
        same(learn(first, new, entropy, cfg)[1:2], torch.autograd.grad(loss_by_hand, x), f"{weight} {aggregation}")


@settings(PROFILE, max_examples=15)
@given(SAMPLES, SEEDS)
def test_dapo_with_equal_clips_is_grpo_with_a_token_mean(samples, seed):
    known, (exp, new, entropy) = {f.name for f in fields(AlgorithmConfig)}, rollout(samples, seed)

    def recipe(name, **changes):
        options = {key: value for key, value in RECIPES[name].options.items() if key in known}
        cfg = AlgorithmConfig(**options | changes)
        advantages = ADVANTAGES.get(cfg.advantage_estimator).fn(exp, cfg)
        return learn(replace(exp, advantages=advantages, loss_mask=action_mask(exp)), new, entropy, cfg)

    same(recipe("dapo", eps_clip_high=None), recipe("grpo", loss_agg_mode="token-mean", use_kl_loss=False), "dapo")


@pytest.mark.parametrize("weight", [name for name in WEIGHTS if CORRECTIONS.get(name).reads])
@settings(PROFILE, max_examples=15)
@given(SAMPLES, SEEDS, st.sampled_from(AGGREGATIONS))
def test_without_bounds_a_correction_is_the_whole_importance_weight(weight, samples, seed, aggregation):
    """A weight times PPO's loss is PPO's loss of the weighted advantage."""
    exp, new, entropy = rollout(samples, seed)
    wide = {"correction_low": 0.0, "correction_high": math.inf, "correction_veto": 0.0}
    got = learn(exp, new, entropy, plain("ppo", weight, aggregation, **wide))
    gap = torch.where(exp.loss_mask, exp.old_logprobs - exp.rollout_logprobs, 0)
    if weight.startswith(("seq_", "geo_")):
        for a, b in zip(exp.cu_seqlens.tolist(), exp.cu_seqlens.tolist()[1:]):
            kept = max(int(exp.loss_mask[a:b].sum()), 1) if weight.startswith("geo_") else 1
            gap[a:b] = gap[a:b].sum() / kept
    weighted = replace(exp, advantages=exp.advantages * gap.exp())
    same(got, learn(weighted, new, entropy, plain("ppo", "none", aggregation)), weight)


def _cispo(x, exp, cfg):
    ratio = (x - exp.old_logprobs).exp().detach()
    return -ratio.clamp(1 - cfg.eps_clip, 1 + cfg.eps_clip_high) * exp.advantages * x


def _gspo_token(x, exp, cfg):
    log_ratio = safe_log_ratio(x.detach(), exp.old_logprobs, exp.loss_mask)
    ratio, adv = sequence_ratio(log_ratio, exp.loss_mask, exp.cu_seqlens), exp.advantages
    moved = ((ratio > 1 + cfg.eps_clip_high) & (adv > 0)) | ((ratio < 1 - cfg.eps_clip) & (adv < 0))
    return torch.where(moved, 0, -ratio * adv) * x


# surrogates with the gradient of the losses that detach a part of themselves
DETACHING = {"cispo": _cispo, "gspo_token": _gspo_token}


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_every_combination(loss):
    exp, new, entropy = rollout(FIXED, 8)
    for weight, aggregation in product(WEIGHTS, AGGREGATIONS):
        cfg = (plain if loss in DETACHING else config)(loss, weight, aggregation)
        module, e = PolicyLoss(cfg, NORM), chosen(prepared(exp, new, weight, False, False), new, cfg)
        x, h = new.clone().requires_grad_(), entropy.clone().requires_grad_()
        denominators = module.denominators(count(e.loss_mask, e.cu_seqlens))
        if loss in DETACHING:
            _, metrics = module(x, None, e, denominators, 0.0)
            surrogate = aggregated(metrics["correction_weight"] * DETACHING[loss](x, e, cfg), e, cfg)
            same(learn(e, new, entropy, cfg)[1:2], torch.autograd.grad(surrogate, x), f"{weight} {aggregation}")
        else:
            assert torch.autograd.gradcheck(lambda a, b: module(a, b, e, denominators, KL_COEF)[0], (x, h), eps=1e-7,
                                            atol=1e-6, fast_mode=True)
