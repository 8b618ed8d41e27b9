"""The losses against naive formulas, reference numbers, any cut into micro-batches, and garbage outside the mask."""
import math
from dataclasses import replace

import pytest
import torch

from lightrft.algorithms.base import POLICY_LOSSES, policy_loss, ratio_metrics
from lightrft.config.schema import AlgorithmConfig
from lightrft.models.loss import GPTLMLoss, PolicyLoss, ValueLoss
from lightrft.ops.aggregate import MODES, Denominators, aggregate, count
from lightrft.ops.divergence import kl_estimate
from lightrft.types import Experience
from lightrft.utils.errors import UserError

TOKEN_FIELDS = ("old_logprobs", "ref_logprobs", "advantages", "values", "returns")
REGULARISED = {"use_kl_loss": True, "init_kl_coef": 0.1, "entropy_coef": 0.02}


def make(lens=(3, 5, 1, 4, 2), seed=0, empty=(2, )):
    gen = torch.Generator().manual_seed(seed)
    cu = torch.tensor([0, *lens]).cumsum(0).int()
    mask = torch.rand(sum(lens), generator=gen) < 0.7
    for b in empty:
        mask[cu[b]:cu[b + 1]] = False
    fields = {name: torch.randn(sum(lens), generator=gen, dtype=torch.float64) for name in TOKEN_FIELDS}
    exp = Experience(torch.zeros(sum(lens)).long(), cu, mask, **fields)
    new = torch.randn(sum(lens), generator=gen, dtype=torch.float64).requires_grad_()
    return exp, new, torch.rand(sum(lens), generator=gen, dtype=torch.float64).requires_grad_()


def run(loss, exp, new, entropy, counts=None, kl_coef=0.1):
    counts = count(exp.loss_mask, exp.cu_seqlens) if counts is None else counts
    return loss(new, entropy, exp, loss.denominators(counts), kl_coef)


@pytest.mark.parametrize("mode", MODES)
def test_policy_loss_equals_its_formula(mode):
    cfg = AlgorithmConfig(loss_agg_mode=mode, eps_clip=0.1, eps_clip_high=0.3, dual_clip=2.0, **REGULARISED)
    exp, new, entropy = make()
    loss, metrics = run(PolicyLoss(cfg, norm=9), exp, new, entropy)
    ratio = (new - exp.old_logprobs).exp()
    token = torch.maximum(-ratio * exp.advantages, -ratio.clamp(0.9, 1.3) * exp.advantages)
    token = torch.where(exp.advantages < 0, torch.minimum(token, -2.0 * exp.advantages), token)
    token = token + 0.1 * kl_estimate(new, exp.ref_logprobs, "k3") - 0.02 * entropy
    denominators = Denominators.of(count(exp.loss_mask, exp.cu_seqlens), 9.0)
    want = aggregate(token, exp.loss_mask, exp.cu_seqlens, mode, denominators)
    torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-9)
    for got, naive in zip(torch.autograd.grad(loss, (new, entropy)), torch.autograd.grad(want, (new, entropy))):
        torch.testing.assert_close(got, naive, rtol=1e-9, atol=1e-9)
    names = {"ratio", "clip_frac_low", "clip_frac_high", "clip_frac_dual", "kl_old", "kl_ref", "entropy", "loss",
             "correction_weight", "correction_bound_frac", "correction_veto_frac"}  # yapf: disable
    assert set(metrics) == names and all(m.shape == new.shape and not m.requires_grad for m in metrics.values())
    torch.testing.assert_close(metrics["loss"][exp.loss_mask], token[exp.loss_mask].detach())
    lr = (exp.old_logprobs - new).detach()[exp.loss_mask]
    torch.testing.assert_close(metrics["kl_old"][exp.loss_mask], (-lr).exp() - 1 + lr)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("parts", [[[0], [1], [2], [3], [4]], [[4, 0], [3, 2, 1]], [[2], [0, 1, 3, 4]]])
def test_losses_do_not_depend_on_the_cut(mode, parts):
    exp, new, entropy = make()
    counts = count(exp.loss_mask, exp.cu_seqlens)
    policy = PolicyLoss(AlgorithmConfig(loss_agg_mode=mode, **REGULARISED), norm=9)
    value = ValueLoss(0.2)
    where = [
        torch.cat([torch.arange(int(exp.cu_seqlens[b]), int(exp.cu_seqlens[b + 1])) for b in part]) for part in parts
    ]

    def total(pieces):
        terms = [(policy(new[i], entropy[i], e, policy.denominators(counts),
                         0.1)[0], value(new[i], e, policy.denominators(counts))[0]) for e, i in pieces]
        sums = [torch.stack(t).sum() for t in zip(*terms)]
        return [*sums, *(torch.autograd.grad(s, new)[0] for s in sums)]

    for cut, whole in zip(total(zip(exp.split(parts), where)), total([(exp, torch.arange(len(new)))])):
        torch.testing.assert_close(cut, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("all_masked", [False, True])
def test_garbage_outside_the_mask_is_silent(garbage, all_masked):
    exp, new, entropy = make()
    mask = exp.loss_mask & (not all_masked)
    fields = {name: torch.where(mask, getattr(exp, name), garbage) for name in TOKEN_FIELDS}
    clean, dirty = replace(exp, loss_mask=mask), replace(exp, loss_mask=mask, **fields)
    policy, denominators = PolicyLoss(AlgorithmConfig(**REGULARISED), 1), Denominators.of(count(mask, exp.cu_seqlens))
    results = []
    for e, fill in ((clean, 0.0), (dirty, garbage)):
        x, h = [torch.where(mask, t.detach(), fill).requires_grad_() for t in (new, entropy)]
        losses = [
            policy(x, h, e, denominators, 0.1),
            ValueLoss(0.2)(x, e, denominators),
            GPTLMLoss()(x, e, denominators)
        ]
        for loss, metrics in losses:
            grad, = torch.autograd.grad(loss, x)
            assert not grad[~mask].any() and grad.isfinite().all() and bool(grad.any()) != all_masked
            assert all(m.isfinite().all() for m in metrics.values())
            results.append((loss, grad))
    for (a, b), (c, d) in zip(results[:3], results[3:]):
        assert torch.equal(a, c) and torch.equal(b, d) and (not all_masked or a == 0)


def test_nan_inside_the_mask_is_not_hidden():
    exp, new, entropy = make()
    broken = torch.where(torch.arange(len(new)) == int(exp.loss_mask.nonzero()[0]), torch.nan, new)
    assert run(PolicyLoss(AlgorithmConfig(), 1), exp, broken, None)[0].isnan()


def test_without_old_logprobs_the_ratio_is_exactly_one():
    exp, new, _ = make()
    policy = PolicyLoss(AlgorithmConfig(), 1)
    first, metrics = run(policy, replace(exp, old_logprobs=None), new, None)
    same, _ = run(policy, replace(exp, old_logprobs=new.detach()), new, None)
    assert (metrics["ratio"] == 1).all() and not metrics["kl_old"].any() and torch.equal(first, same)
    assert "entropy" not in metrics and "kl_ref" in metrics
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(first, new), torch.autograd.grad(same, new)))


def test_each_option_changes_the_loss():
    exp, new, entropy = make()
    base = AlgorithmConfig()

    def value(**change):
        return run(PolicyLoss(replace(base, **change), norm=9), exp, new, entropy)[0].item()

    changes = [{"eps_clip": 0.5}, {"eps_clip_high": 0.6}, {"dual_clip": 1.1}, {"use_kl_loss": True},
               {"entropy_coef": 0.1}, {"use_kl_loss": True, "kl_estimator":
                                       "k2"}, *({"loss_agg_mode": mode} for mode in MODES[1:])]
    assert len({value(), *(value(**change) for change in changes)}) == len(changes) + 1
    norms = [run(PolicyLoss(replace(base, loss_agg_mode=MODES[3]), norm=n), exp, new, None)[0].item() for n in (5, 10)]
    assert norms[0] == pytest.approx(2 * norms[1])


def test_a_term_without_its_input_is_an_error():
    exp, new, _ = make()
    with pytest.raises(ValueError, match="entropy_coef 0.1"):
        run(PolicyLoss(AlgorithmConfig(entropy_coef=0.1), 1), exp, new, None)
    kl = PolicyLoss(AlgorithmConfig(use_kl_loss=True), 1)
    with pytest.raises(ValueError, match="ref_logprobs"):
        run(kl, replace(exp, ref_logprobs=None), new, None)
    assert run(kl, replace(exp, ref_logprobs=None), new, None,
               kl_coef=0.0)[0].isfinite(), "no coefficient, no reference"


@pytest.mark.parametrize("clip,expected,share", [(0.5, 1.625, .5), (0.0, .3125, 0.0)])
def test_value_clip_reference_number(clip, expected, share):
    exp = Experience(
        torch.zeros(2).long(), torch.tensor([0, 2], dtype=torch.int32),
        torch.ones(2).bool(), values=torch.zeros(2), returns=torch.tensor([.5, 3]))
    loss, metrics = ValueLoss(clip)(torch.tensor([1., 2.]), exp, Denominators(2, 1))
    assert float(loss) == pytest.approx(expected) and float(metrics["clip_frac"].mean()) == share


def test_a_rounding_is_no_clipped_value():
    """``old + (value - old)`` is not the value to the bit, and its error may be the larger one."""
    inside, old, returns = torch.rand(3, 1000, generator=torch.Generator().manual_seed(0)) - 0.5
    inside, old = 0.2 * inside, 0.1 * old  # at most 0.15 apart
    exp = Experience(torch.zeros(1000).long(), torch.tensor([0, 1000]), torch.ones(1000).bool(), values=old,
                     returns=returns)  # yapf: disable
    assert ((old + (inside - old) - returns)**2 > (inside - returns)**2).any()
    far = old + 0.21 * inside.sign()
    fractions = [ValueLoss(0.2)(values, exp, Denominators(1000, 1))[1]["clip_frac"] for values in (inside, far)]
    assert not fractions[0].any()
    assert torch.equal(fractions[1] > 0, (old + 0.2 * inside.sign() - returns).abs() > (far - returns).abs())


def test_language_model_loss_is_the_mean_over_kept_tokens():
    exp, new, _ = make()
    loss, _ = GPTLMLoss()(new, exp, Denominators.of(count(exp.loss_mask, exp.cu_seqlens)))
    torch.testing.assert_close(loss, -new[exp.loss_mask].mean())


@pytest.mark.parametrize("returned,message", [
    (lambda loss: (loss, {}), r"'mine' returns no metric ratio, clip_frac_low, clip_frac_high: .* ratio_metrics\("),
    (lambda loss: (loss, {"ratio": loss, "clip_frac_high": loss}), "'mine' returns no metric clip_frac_low: "),
    (lambda loss: (loss.mean(), dict.fromkeys(["ratio", "clip_frac_low", "clip_frac_high"], loss)),
     r"'mine' returns a loss of shape \[\]: return one number per token, \[15\] here"),
])  # yapf: disable
def test_a_policy_loss_that_breaks_its_contract_is_refused(returned, message):
    policy_loss("mine")(lambda logprobs, exp, cfg: returned(-exp.advantages * logprobs))
    exp, new, _ = make()
    try:
        with pytest.raises(UserError, match=message):
            run(PolicyLoss(AlgorithmConfig(policy_loss="mine"), 1.0), exp, new, None)
    finally:
        del POLICY_LOSSES._entries["mine"]


@pytest.mark.parametrize("most,pulled", [(10.0, False), (0.0, True)])
def test_a_token_above_the_limit_of_k3_is_not_pulled(most, pulled):
    """One token whose reference is 5 nats above, another 1 nat: k3 of 142 and of 0.7."""
    new, ref = torch.tensor([-6., -2.]).requires_grad_(), torch.tensor([-1., -1.])
    exp = Experience(
        torch.zeros(2).long(),
        torch.tensor([0, 2]).int(),
        torch.ones(2).bool(), ref_logprobs=ref, advantages=torch.zeros(2), old_logprobs=new.detach())
    cfg = AlgorithmConfig(use_kl_loss=True, init_kl_coef=1.0, k3_max=most)
    loss, metrics = PolicyLoss(cfg, 1.0)(new, None, exp, Denominators(2, 1), 1.0)
    gradient = torch.autograd.grad(loss, new)[0]
    assert metrics["kl_ref"].tolist() == pytest.approx([math.exp(5) - 6 if pulled else 10.0, math.exp(1) - 2])
    assert gradient.tolist() == pytest.approx([(1 - math.exp(5)) / 2 * pulled, (1 - math.exp(1)) / 2], rel=1e-5)


def test_the_bound_itself_is_no_argument_of_the_metrics():
    """A user writes ``ratio_metrics(ratio, 0.8, 1.2)``: it wants the tokens there; without a clip it wants neither."""
    ratio = torch.tensor([0.5, 1.0, 1.5])
    for bounds in ((0.8, 1.2), (torch.tensor(0.8), torch.tensor(1.2))):
        with pytest.raises(UserError, match=r"at_low is .*0\.8.*, expected the tokens .* bool \[3\].*ratio < bound"):
            ratio_metrics(ratio, *bounds)
    found = ratio_metrics(ratio, ratio < 0.8, ratio > 1.2, mine=ratio)
    assert found["clip_frac_low"].tolist() == [1, 0, 0] and found["clip_frac_high"].tolist() == [0, 0, 1]
    assert found["mine"] is ratio and ratio_metrics(ratio)["clip_frac_high"].tolist() == [0, 0, 0]
