"""KL estimates, ratios, clips and aggregation: reference numbers, loops, and independence of how a batch is cut."""
import math

import pytest
import torch
from hypothesis import given, settings

from lightrft.ops.aggregate import MODES, Denominators, aggregate, count
from lightrft.ops.divergence import kl_estimate
from lightrft.ops.surrogate import clipped_surrogate, safe_ratio
from lightrft.tests.support.ragged import SEEDS, batch, spans


@pytest.mark.parametrize("kind,expected", [("k1", [.5, -.5]), ("k2", [.125, .125]), ("k3", [.106531, .148721])])
def test_kl_reference_numbers(kind, expected):
    ref = torch.tensor([-1., -2.])
    torch.testing.assert_close(kl_estimate(ref + torch.tensor([.5, -.5]), ref, kind), torch.tensor(expected), rtol=0,
                               atol=1e-6)


def test_kl_estimates_agree_with_the_exact_kl():
    gen = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 50, generator=gen, dtype=torch.float64).mul_(.3).log_softmax(-1)
    exact = float((p.exp() * (p - q)).sum())
    for kind, bias in (("k1", 1e-12), ("k2", 0.02), ("k3", 1e-12)):
        assert float((p.exp() * kl_estimate(p, q, kind)).sum()) == pytest.approx(exact, abs=bias)
    assert not kl_estimate(p, p, "k3").any(), "exactly 0 when the policies are equal"


@pytest.mark.parametrize("kind", ["k1+", "k3+"])
def test_straight_through_kl_has_one_value_and_another_gradient(kind):
    gen = torch.Generator().manual_seed(0)
    new, ref = torch.randn(2, 20, generator=gen, dtype=torch.float64).requires_grad_()
    value = kl_estimate(new, ref, kind)
    assert torch.equal(value, kl_estimate(new, ref, kind[:-1]))
    grads = [torch.autograd.grad(kl_estimate(new, ref, k).sum(), new)[0] for k in (kind, "k2", kind[:-1])]
    assert torch.equal(grads[0], grads[1]) and not torch.allclose(grads[0], grads[2])
    assert torch.equal(grads[0], (new - ref).detach())


def test_kl_of_a_broken_token_is_finite_and_names_are_checked():
    assert torch.isfinite(kl_estimate(torch.tensor([-1e4]), torch.tensor([0.]), "k3")).all()
    with pytest.raises(ValueError, match="k4.*k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_the_limit_of_k3():
    """Equal below the limit; at it the value stops and the gradient is 0; the other estimators have none."""
    new = torch.tensor([0., 0., 0., 0.], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([1., 2.5, 20., -20.], dtype=torch.float64)
    plain, limited = kl_estimate(new, ref, "k3"), kl_estimate(new, ref, "k3", 10.0)
    assert limited.tolist() == pytest.approx([plain[0].item(), plain[1].item(), 10.0, 10.0])
    assert torch.autograd.grad(limited.sum(),
                               new)[0].tolist() == pytest.approx([1 - math.exp(1), 1 - math.exp(2.5), 0, 0])
    assert plain[2].item() == pytest.approx(math.exp(20) - 21) and plain[3].item() == pytest.approx(19)
    for kind in ("k1", "k2"):
        assert torch.equal(kl_estimate(new, ref, kind, 10.0), kl_estimate(new, ref, kind))


def test_only_k1_in_the_reward_has_the_gradient_of_the_kl():
    """Cosine of E[-kl * d log p] to -d KL(p || q), by a sum over all outcomes of random policies of eight actions."""
    gen, cosines = torch.Generator().manual_seed(0), {"k1": [], "k2": [], "k3": []}
    for _ in range(200):
        logits, q = torch.randn(2, 8, generator=gen, dtype=torch.float64)
        logits, q = logits.requires_grad_(), q.log_softmax(-1)
        p = logits.log_softmax(-1)
        true, = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
        for kind, found in cosines.items():
            reward = -kl_estimate(p, q, kind).detach()
            got, = torch.autograd.grad((p.exp().detach() * reward * p).sum(), logits, retain_graph=True)
            found.append(torch.cosine_similarity(got, -true, dim=0).item())
    mean = {kind: sum(found) / len(found) for kind, found in cosines.items()}
    assert min(cosines["k1"]) == pytest.approx(1) and 0.6 < mean["k2"] < 0.7 and 0.15 < mean["k3"] < 0.3, mean


def test_safe_ratio_ignores_what_is_masked():
    new = torch.tensor([.5, torch.nan, torch.inf, -torch.inf, 100.], requires_grad=True)
    mask = torch.tensor([True, False, False, False, True])
    ratio = safe_ratio(new, torch.tensor([.1, 0, torch.inf, torch.nan, 0]), mask)
    ratio.sum().backward()
    torch.testing.assert_close(ratio, torch.tensor([.4, 0, 0, 0, 20]).exp())
    torch.testing.assert_close(new.grad, torch.tensor([1.4918247, 0, 0, 0, 0]))
    same = torch.randn(9)
    assert (safe_ratio(same, same, torch.ones(9).bool()) == 1).all(), "equal log-probs have a ratio of exactly 1"


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_clip_equals_a_loop(seed):
    gen = torch.Generator().manual_seed(seed)
    ratio, adv = torch.randn(2, 8, generator=gen, dtype=torch.float64)
    ratio, low, high, dual = ratio.exp(), 0.2, 0.3, [None, 3.0, 1.1][seed % 3]
    got = clipped_surrogate(ratio, adv, low, high, dual)
    for i, (r, a) in enumerate(zip(ratio.tolist(), adv.tolist())):
        loss = max(-r * a, -min(max(r, 1 - low), 1 + high) * a)
        bound = -dual * a if dual is not None and a < 0 else float("inf")
        assert float(got.loss[i]) == pytest.approx(min(loss, bound), abs=1e-12)
        assert bool(got.low[i]) == (a < 0 and r < 1 - low) and bool(got.high[i]) == (a > 0 and r > 1 + high)
        assert bool(got.dual[i]) == (loss > bound)


def naive_aggregate(loss, mask, cu, mode, norm):
    kept = [k for k in (loss[a:b][mask[a:b]] for a, b in spans(cu)) if len(k)]
    if not kept:
        return loss.new_zeros(())
    return {
        "token-mean": torch.cat(kept).mean(),
        "seq-mean-token-mean": torch.stack([k.mean() for k in kept]).mean(),
        "seq-mean-token-sum": torch.stack([k.sum() for k in kept]).mean(),
        "token-sum": torch.cat(kept).sum(),
        "seq-mean-token-sum-norm": torch.stack([k.sum() / norm for k in kept]).mean(),
    }[mode]


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_aggregate_does_not_depend_on_the_cut(mode, seed):
    """Any split into micro-batches gives the loss and the gradient of the whole, as the naive formula has them."""
    lens, cu, mask, gen = batch(seed)
    x = torch.where(mask, torch.randn(len(mask), generator=gen, dtype=torch.float64), torch.nan).requires_grad_()
    denominators = Denominators.of(count(mask, cu), norm=7.0)
    whole = aggregate(x, mask, cu, mode, denominators)
    cuts, parts = sorted({0, len(lens), *torch.randint(len(lens) + 1, (2, ), generator=gen).tolist()}), []
    for first, last in zip(cuts[:-1], cuts[1:]):
        a, b = int(cu[first]), int(cu[last])
        parts.append(aggregate(x[a:b], mask[a:b], cu[first:last + 1] - cu[first], mode, denominators))
    want = naive_aggregate(x, mask, cu, mode, 7.0)
    grad, = torch.autograd.grad(want, x) if want.requires_grad else (torch.zeros_like(x), )
    for value in (whole, torch.stack(parts).sum()):
        torch.testing.assert_close(value, want, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(torch.autograd.grad(value, x)[0], grad, rtol=1e-9, atol=1e-9)


def test_uneven_micro_batches_are_one_mean():
    x, cu = torch.arange(7.), torch.tensor([0, 2, 7], dtype=torch.int32)
    denominators = Denominators.of(count(torch.ones(7).bool(), cu))
    halves = [
        aggregate(x[a:b],
                  torch.ones(b - a).bool(), torch.tensor([0, b - a]), "token-mean", denominators)
        for a, b in ((0, 2), (2, 7))
    ]
    assert float(sum(halves)) == pytest.approx(3.0)


@pytest.mark.parametrize("mode", MODES)
def test_masked_tokens_and_an_empty_batch_are_silent(mode):
    x, cu = torch.tensor([torch.nan, torch.inf, 1, 1], requires_grad=True), torch.tensor([0, 1, 4], dtype=torch.int32)
    for mask in (torch.zeros(4).bool(), torch.tensor([False, False, True, True])):
        counts = count(mask, cu)
        assert counts.tolist() == [float(mask.sum()), float(mask.any())]
        loss = aggregate(x, mask, cu, mode, Denominators.of(counts, 2.0))
        grad, = torch.autograd.grad(loss, x)
        assert loss.isfinite() and bool(loss != 0) == bool(mask.any())
        assert torch.equal(grad != 0, mask)


def test_unknown_mode():
    with pytest.raises(ValueError, match="mean.*token-mean"):
        aggregate(torch.zeros(1), torch.ones(1).bool(), torch.tensor([0, 1]), "mean", Denominators(1, 1))
