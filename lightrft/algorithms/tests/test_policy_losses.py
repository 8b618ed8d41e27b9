"""Every policy loss against its loop, and what all of them have in common."""
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from lightrft.algorithms import POLICY_LOSSES
from lightrft.config.schema import AlgorithmConfig
from lightrft.config.tree import extended, group_options
from lightrft.models.loss import PolicyLoss
from lightrft.ops.aggregate import MODES, count
from lightrft.tests.support.naive_losses import NAIVE, covariances
from lightrft.tests.support.own_options import another_value
from lightrft.tests.support.ragged import SEEDS, batch, spans
from lightrft.types import Experience

NAMES = [name for name in POLICY_LOSSES if POLICY_LOSSES.get(name).fn.__module__.startswith("lightrft.algorithms.")]
SEQUENCE = ("gspo", "gspo_token", "gmpo")  # one ratio per sequence
CHANGES = {
    "eps_clip": 0.05, "eps_clip_high": 0.06, "dual_clip": 1.3, "cispo_absolute": True, "policy_drift_coef": 0.5,
    "sapo_tau_pos": 2.0, "sapo_tau_neg": 3.0, "dppo_delta": 0.01, "clip_cov_ratio": 0.05, "clip_cov_low": 0.4,
    "clip_cov_high": 0.3, "kl_cov_ratio": 0.7, "kl_cov_coef": 3.0, "kl_cov_abs": True, "dppo_ratio_max": 1.1
}
CFG = extended(AlgorithmConfig)(eps_clip=0.2, eps_clip_high=0.3, clip_cov_ratio=0.3, clip_cov_low=0.05,
                                kl_cov_ratio=0.3)


def surrogate(name):
    return POLICY_LOSSES.get(name)


def random_batch(seed, equal=False, **sizes):
    """``(new, exp)``: float64, turns with gaps, empty masks; advantages per token, or ``equal`` within a sequence."""
    _, cu, mask, gen = batch(seed, **sizes)
    total = len(mask)
    old = -torch.rand(total, generator=gen, dtype=torch.float64) * 2 - 0.2
    new = (old + 0.5 * torch.randn(total, generator=gen, dtype=torch.float64)).clamp_max(-0.01)
    advantages = torch.randn(total, generator=gen, dtype=torch.float64)
    advantages[torch.rand(total, generator=gen) < 0.1] = 0
    if equal:
        advantages = torch.randn(len(cu) - 1, generator=gen, dtype=torch.float64).repeat_interleave(cu.diff().long())
    old, new, advantages = (torch.where(mask, x, 0) for x in (old, new, advantages))
    exp = Experience(torch.zeros(total).long(), cu, mask, old_logprobs=old, rollout_logprobs=old, advantages=advantages)
    return new, exp


def chosen(name, new, exp, cfg, seed=3):
    """``exp`` with the choice of the loss, or none."""
    selects = surrogate(name).selects
    none = torch.zeros_like(exp.loss_mask)
    return replace(exp, selected=none if selects is None else selects(new.detach(), exp, cfg, seed))


def run(name, new, exp, cfg):
    """The token losses where the mask keeps, and the gradient of their sum under fixed, unequal weights."""
    new = new.detach().requires_grad_()
    loss, metrics = surrogate(name).fn(new, exp, cfg)
    weights = torch.linspace(0.5, 1.5, len(new), dtype=torch.float64)
    kept = torch.where(exp.loss_mask, loss, 0)
    return kept.detach(), torch.autograd.grad((kept * weights).sum(), new)[0], metrics


def naive(name, new, exp, cfg):
    new = new.detach().requires_grad_()
    losses = torch.zeros_like(new)
    weights, total = torch.linspace(0.5, 1.5, len(new), dtype=torch.float64), new.sum() * 0
    for start, end in spans(exp.cu_seqlens):
        kept = [t for t in range(start, end) if exp.loss_mask[t]]
        if not kept:
            continue
        old, adv, picked = ([x[t].item() for t in kept] for x in (exp.old_logprobs, exp.advantages, exp.selected))
        for t, loss in zip(kept, NAIVE[name]([new[t] for t in kept], old, adv, cfg, picked)):
            losses[t] = loss.detach()
            total = total + weights[t] * loss
    return losses.detach(), torch.autograd.grad(total, new)[0]


@pytest.mark.parametrize("name", NAIVE)
@settings(max_examples=25, deadline=None)
@given(SEEDS)
def test_losses_equal_a_loop(name, seed):
    new, exp = random_batch(seed, equal=seed % 2)
    cfg = [
        CFG,
        replace(CFG, dual_clip=1.5, cispo_absolute=True, kl_cov_abs=True, dppo_ratio_max=1.1),
        replace(CFG, eps_clip=0.1, eps_clip_high=None)
    ][seed % 3]
    exp = chosen(name, new, exp, cfg)
    for got, want in zip(run(name, new, exp, cfg), naive(name, new, exp, cfg)):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_every_loss_has_a_loop_and_says_which_options_it_reads():
    """Or a file of tests, named as its module."""
    assert set(NAIVE) <= set(NAMES)
    for name in set(NAMES) - set(NAIVE):
        file = f"test_{surrogate(name).fn.__module__.rpartition('.')[2]}.py"
        assert (Path(__file__).parent / file).exists(), f"{name}: write a loop in naive_losses.py, or {file}"
    assert set(CHANGES) == {option for name in NAMES for option in surrogate(name).reads}


def on_many_tokens(seed=5):
    return random_batch(seed, max_len=40, max_seqs=12)


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_reads_what_it_says(name):
    new, exp = on_many_tokens()

    def value(cfg):
        return run(name, new, chosen(name, new, exp, cfg), cfg)[0]

    known = group_options(type(CFG))
    own = {option: another_value(known[option]) for loss in NAMES for option in surrogate(loss).own}
    read = {
        option for option, other in {**CHANGES, **own}.items()
        if not torch.equal(value(CFG), value(replace(CFG, **{option: other})))
    }
    assert read == {*surrogate(name).reads, *surrogate(name).own}


@pytest.mark.parametrize("name", NAMES)
def test_only_a_loss_that_needs_the_old_policy_depends_on_it(name):
    new, exp = on_many_tokens()
    exp = chosen(name, new, exp, CFG)
    moved = replace(exp, old_logprobs=exp.old_logprobs - 0.1 * exp.loss_mask)
    same = torch.equal(run(name, new, exp, CFG)[1], run(name, new, moved, CFG)[1])
    assert same is not surrogate(name).needs_old


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(SEEDS)
def test_the_first_update_is_reinforce(name, seed):
    """The sum over a sequence, for the losses with one ratio per sequence."""
    new, exp = random_batch(seed, equal=True)
    exp = replace(exp, old_logprobs=new, selected=torch.zeros_like(exp.loss_mask))
    x = new.clone().requires_grad_()
    loss, metrics = surrogate(name).fn(x, exp, CFG)
    gradient, = torch.autograd.grad(torch.where(exp.loss_mask, loss, 0).sum(), x)
    torch.testing.assert_close(gradient, torch.where(exp.loss_mask, -exp.advantages, 0), rtol=1e-12, atol=1e-12)
    assert (metrics["ratio"] == 1).all() and not metrics["clip_frac_low"].any() and not metrics["clip_frac_high"].any()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(SEEDS)
def test_other_sequences_of_the_micro_batch_do_not_matter(name, seed):
    new, exp = random_batch(seed)
    exp = chosen(name, new, exp, CFG)
    loss, _, metrics = run(name, new, exp, CFG)
    assert {"ratio", "clip_frac_low", "clip_frac_high"} <= set(metrics)
    order = list(range(exp.num_seqs))[::-1]
    for b, (start, end) in enumerate(spans(exp.cu_seqlens)):
        alone, _, message = run(name, new[start:end], exp.select([b]), CFG)
        torch.testing.assert_close(alone, loss[start:end], rtol=1e-12, atol=1e-12)
        for key, value in metrics.items():
            torch.testing.assert_close(message[key], value[start:end], rtol=1e-12, atol=1e-12)
    turned = torch.cat([new[start:end] for start, end in spans(exp.cu_seqlens)[::-1]])
    back = torch.cat([loss[start:end] for start, end in spans(exp.cu_seqlens)[::-1]])
    torch.testing.assert_close(run(name, turned, exp.select(order), CFG)[0], back, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_does_not_depend_on_the_cut(name, mode):
    new, exp = random_batch(11)
    exp = chosen(name, new, exp, CFG)
    module = PolicyLoss(replace(CFG, policy_loss=name, loss_agg_mode=mode), 7.0)
    denominators, new = module.denominators(count(exp.loss_mask, exp.cu_seqlens)), new.requires_grad_()
    ends = spans(exp.cu_seqlens)
    whole = torch.autograd.grad(module(new, None, exp, denominators, 0.0)[0], new)[0]
    cuts = [[[b] for b in range(exp.num_seqs)], [list(range(0, exp.num_seqs, 2)), list(range(1, exp.num_seqs, 2))]]
    assert exp.num_seqs > 3 and whole.any()
    for cut in cuts:
        parts = [torch.cat([new[slice(*ends[b])] for b in part]) for part in cut]
        losses = [module(x, None, exp.select(part), denominators, 0.0)[0] for x, part in zip(parts, cut)]
        torch.testing.assert_close(torch.autograd.grad(sum(losses), new)[0], whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_outside_the_mask_is_silent(name, garbage):
    new, exp = random_batch(11)
    exp = chosen(name, new, exp, CFG)
    module, results = PolicyLoss(replace(CFG, policy_loss=name), 1.0), []
    denominators = module.denominators(count(exp.loss_mask, exp.cu_seqlens))
    for fill in (0.0, garbage):
        x, old, adv = (torch.where(exp.loss_mask, v, fill) for v in (new, exp.old_logprobs, exp.advantages))
        x = x.detach().requires_grad_()
        loss, metrics = module(x, None, replace(exp, old_logprobs=old, advantages=adv), denominators, 0.0)
        assert all(m.isfinite().all() and not m.requires_grad for m in metrics.values())
        results.append((loss, torch.autograd.grad(loss, x)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results)) and not results[0][1][~exp.loss_mask].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_probs_stay_finite(name, dtype):
    """A token that became certain, one that became impossible, and one that was certain; both signs of A."""
    old = torch.tensor([-60., 0., -1e-9, -2.] * 2, dtype=dtype)
    new = torch.tensor([0., -60., 0., -2.] * 2, dtype=dtype)
    advantages = torch.tensor([1.] * 4 + [-1.] * 4, dtype=dtype)
    exp = Experience(
        torch.zeros(8).long(),
        torch.arange(9).int(),
        torch.ones(8).bool(), old_logprobs=old, advantages=advantages, selected=torch.arange(8) % 2 == 0)
    x = new.requires_grad_()
    loss, metrics = surrogate(name).fn(x, exp, CFG)
    assert loss.isfinite().all() and torch.autograd.grad(loss.sum(), x)[0].isfinite().all()
    assert all(value.isfinite().all() for value in metrics.values())


def single_tokens(seed=2):
    """Sequences of one action token each."""
    new, exp = random_batch(seed, max_len=40, max_seqs=4)
    index = exp.loss_mask.nonzero().flatten()
    cut = Experience(exp.token_ids[index],
                     torch.arange(len(index) + 1).int(), exp.loss_mask[index], old_logprobs=exp.old_logprobs[index],
                     advantages=exp.advantages[index])
    assert len(index) > 20
    return new[index], cut


def same(left, right):
    for a, b in zip(left[:2], right[:2]):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SEQUENCE)
def test_one_token_is_ppo(name):
    new, exp = single_tokens()
    bounds = CFG if name != "gmpo" else replace(CFG, eps_clip=1 - math.exp(-0.2), eps_clip_high=math.exp(0.3) - 1)
    same(run(name, new, exp, CFG), run("ppo", new, exp, bounds))


@settings(max_examples=15, deadline=None)
@given(SEEDS)
def test_gspo_token_is_gspo_with_one_advantage_per_sequence(seed):
    for equal in (True, False):
        new, exp = random_batch(seed, equal=equal)
        x = new.clone().requires_grad_()
        both = [torch.where(exp.loss_mask, surrogate(name).fn(x, exp, CFG)[0], 0) for name in ("gspo", "gspo_token")]
        torch.testing.assert_close(*both, rtol=1e-12, atol=1e-12)
        if equal:
            torch.testing.assert_close(*(torch.autograd.grad(loss.sum(), x, retain_graph=True)[0] for loss in both),
                                       rtol=1e-9, atol=1e-12)


def test_losses_that_become_others():
    new, exp = on_many_tokens()
    exp = replace(exp, selected=torch.zeros_like(exp.loss_mask))
    wide = replace(CFG, eps_clip=1.0, eps_clip_high=1e6, dppo_delta=1e6, policy_drift_coef=0.0)
    same(run("clip_cov", new, exp, CFG), run("ppo", new, exp, CFG))
    for name in ("dppo_tv", "dppo_kl", "kl_cov"):
        same(run(name, new, exp, wide), run("ppo", new, exp, wide))
    same(run("cpgd", new, replace(exp, old_logprobs=exp.old_logprobs * 0), wide), run("gpg", new, exp, wide))
    ratio = (new - exp.old_logprobs).exp()
    weighted = replace(exp, advantages=exp.advantages * ratio)
    same(run("cispo", new, exp, replace(CFG, cispo_absolute=True, eps_clip_high=1e6)), run("gpg", new, weighted, CFG))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("cispo", "gspo_token")])
def test_gradients_agree_with_finite_differences(name):
    """Those that detach a part of themselves are compared with their loops above."""
    new, exp = random_batch(11)
    exp = chosen(name, new, exp, CFG)
    assert torch.autograd.gradcheck(lambda x: torch.where(exp.loss_mask,
                                                          surrogate(name).fn(x, exp, CFG)[0], 0), new.requires_grad_(),
                                    eps=1e-7, atol=1e-5)


def clipped_tokens(new, exp):
    """Those on which the bounds of CFG act."""
    signed = [(t, (new[t] - exp.old_logprobs[t]).exp().item(), exp.advantages[t].item()) for t in range(len(new))]
    return {t for t, ratio, a in signed if a > 0 and ratio > 1.3 or a < 0 and ratio < 0.8}


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@settings(max_examples=25, deadline=None)
@given(SEEDS)
def test_the_chosen_tokens_equal_a_loop(name, seed):
    new, exp = random_batch(seed, max_len=20)
    kept = [t for t in range(len(new)) if exp.loss_mask[t]]
    got = chosen(name, new, exp, CFG, seed).selected
    if not kept:
        assert not got.any()
        return
    cov = dict(zip(kept, covariances([new[t].item() for t in kept], [exp.advantages[t].item() for t in kept])))
    number = max(math.floor(0.3 * len(kept)), 1)
    found = set(got.nonzero().flatten().tolist())
    if name == "kl_cov":
        assert sorted(cov[t] for t in found) == pytest.approx(sorted(cov.values())[-number:], abs=1e-12)
    else:
        candidates = {t for t in kept if 0.05 <= cov[t] <= 5.0} - clipped_tokens(new, exp)
        assert found <= candidates and len(found) == min(number, len(candidates))
    assert torch.equal(got, chosen(name, new, exp, CFG, seed).selected)


def test_the_draw_is_seeded_and_uniform():
    new, exp = on_many_tokens()
    few = replace(CFG, clip_cov_ratio=0.1)
    picks = [chosen("clip_cov", new, exp, few, seed).selected for seed in range(200)]
    share = torch.stack(picks).double().mean(0)
    cov = (new - new[exp.loss_mask].mean()) * (exp.advantages - exp.advantages[exp.loss_mask].mean())
    candidates = exp.loss_mask & (cov >= 0.05) & (cov <= 5.0)
    candidates[list(clipped_tokens(new, exp))] = False
    expected = picks[0].sum() / candidates.sum()
    assert 0 < expected < 1 and (share[candidates] - expected).abs().max() < 0.2 and not share[~candidates].any()
