"""Losses of pairs and of KTO: known values, naive loops, another implementation, and how a batch may be cut."""
import math

import pytest
import torch

from lightrft.config.preference_schema import WITHOUT_REFERENCE
from lightrft.ops.preference import PAIR_LOSSES, Pairs, kto, kto_kl, match_by_rank, ordered_rightly

KNOWN = Pairs(*(torch.tensor(row)
                for row in ([-10., -12.], [-14., -11.], [-11., -12.], [-13., -12.], [5., 6.], [7., 3.])))
OPTIONS = {"beta": 0.3, "label_smoothing": 0.1, "simpo_gamma": 0.7}


def drawn(seed, count=7):
    """Random pairs, float64."""
    rng = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, 30, (2, count), generator=rng).double()
    policy = -torch.rand(2, count, generator=rng, dtype=torch.float64) * 2 * lens - 0.01
    ref = policy + torch.randn(2, count, generator=rng, dtype=torch.float64) * 20
    return Pairs(*policy, *ref.clamp_max(-0.01), *lens)


def losses(name, pairs, **options):
    entry = PAIR_LOSSES.get(name)
    return entry.fn(pairs, **{key: value for key, value in (OPTIONS | options).items() if key in entry.reads})


def test_a_tie_is_half_a_right_pair():
    assert ordered_rightly(torch.tensor([0.5, 0.0, -0.5, 0.0])).tolist() == [1.0, 0.5, 0.0, 0.5]


@pytest.mark.parametrize("name,options,value", [
    ("sigmoid", {"label_smoothing": 0.0}, .671268),
    ("sigmoid", {"label_smoothing": 0.1}, .676268),
    ("ipo_sum", {}, 22.5),
])
def test_known_values_of_pairs(name, options, value):
    assert losses(name, KNOWN, beta=0.1, **options).mean().item() == pytest.approx(value, abs=1e-6)


def test_known_values_of_kto():
    policy, ref = torch.tensor([-10., -14., -11.]), torch.tensor([-11., -13., -12.])
    kl = kto_kl(torch.tensor([-9., -12., -13.]), torch.tensor([-10., -12., -15.]))
    found = kto(policy, ref, torch.tensor([True, False, False]), kl, 0.1, 1.0, 1.33)
    assert kl.item() == 1.0 and found.mean().item() == pytest.approx(.587907, abs=1e-6)


def sig(x):
    return 1 / (1 + math.exp(-x))


def log_odds(mean):
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


def naive(name, c, r, rc, rr, nc, nr, beta, eps, gamma):
    """The loss of one pair, as it is printed."""
    d = (c - rc) - (r - rr)
    right, wrong = -math.log(sig(beta * d)), -math.log(sig(-beta * d))
    simpo = beta * (c / nc - r / nr) - gamma
    q = sig(beta * d)
    return {
        "sigmoid": (1 - eps) * right + eps * wrong,
        "ipo_sum": (d - 1 / (2 * beta))**2,
        "ipo_mean": ((c - rc) / nc - (r - rr) / nr - 1 / (2 * beta))**2,
        "hinge": max(0.0, 1 - beta * d),
        "robust": ((1 - eps) * right - eps * wrong) / (1 - 2 * eps),
        "simpo": -(1 - eps) * math.log(sig(simpo)) - eps * math.log(sig(-simpo)),
        "orpo": -c / nc - beta * math.log(sig(log_odds(c / nc) - log_odds(r / nr))),
        "apo_zero": 1 - sig(beta * (c - rc)) + sig(beta * (r - rr)),
        "apo_down": sig(beta * (c - rc)) + 1 - sig(beta * d),
        "sppo": (c - rc - 0.5 / beta)**2 + (r - rr + 0.5 / beta)**2,
        "exo": q * math.log(q / (1 - eps)) + (1 - q) * math.log((1 - q) / eps),
    }[name]


def naive_batch(name, pairs):
    rows = list(zip(*(column.tolist() for column in pairs[:6])))
    if name == "aot":  # the same loss on rows whose references were exchanged
        order = sorted(range(len(rows)), key=lambda i: rows[i][0] - rows[i][1])
        refs = sorted(rows, key=lambda row: row[2] - row[3])
        rows = [(*rows[i][:2], *ref[2:4], *rows[i][4:]) for i, ref in zip(order, refs)]
        name = "sigmoid"
    return sum(naive(name, *row, *OPTIONS.values()) for row in rows) / len(rows)


@pytest.mark.parametrize("name", list(PAIR_LOSSES))
def test_every_loss_is_the_naive_loop_and_its_gradient(name):
    pairs = drawn(3)
    assert losses(name, pairs).mean().item() == pytest.approx(naive_batch(name, pairs), rel=1e-10)
    policy = [column.clone().requires_grad_() for column in pairs[:2]]
    torch.autograd.gradcheck(lambda c, r: losses(name, pairs._replace(chosen=c, rejected=r)), policy)


@pytest.mark.parametrize("name", list(PAIR_LOSSES))
@pytest.mark.parametrize("size", [0.0, 1e4])
def test_far_and_certain_responses_stay_finite(name, size):
    """Log-probs of 0 and of -10000, float32."""
    pairs = Pairs(*(torch.tensor(row, requires_grad=True) for row in ([-0., -size], [-size, -0.])), *torch.zeros(2, 2),
                  *torch.ones(2, 2))
    loss = losses(name, pairs).mean()
    assert torch.isfinite(loss), loss
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(loss, pairs[:2]))


def test_aot_in_parts_is_aot_of_the_batch():
    """A micro-batch with the matches of the whole batch; without them it matches its own pairs."""
    pairs = drawn(3)
    whole = losses("aot", pairs)
    matched = match_by_rank(pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected)
    parts = [Pairs(*(column[part] for column in pairs[:6])) for part in (slice(0, 3), slice(3, 7))]
    found = [losses("aot", part._replace(matched=m)) for part, m in zip(parts, matched.split([3, 4]))]
    assert torch.equal(torch.cat(found), whole)
    assert not torch.allclose(torch.cat([losses("aot", part) for part in parts]), whole)


def test_equal_values_are_ranked_in_their_order():
    found = match_by_rank(torch.tensor([1., 0., 1., 0.]), torch.tensor([4., 3., 2., 1.]))
    assert found.tolist() == [3., 1., 4., 2.]


def test_kto_takes_opposite_sides_and_a_kl_that_is_never_negative():
    ratio = torch.tensor([2.0, 2.0], requires_grad=True)
    found = kto(ratio, torch.zeros(2), torch.tensor([True, False]), 0.5, 1.0, 2.0, 3.0)
    assert found.tolist() == pytest.approx([2 * (1 - sig(1.5)), 3 * (1 - sig(-1.5))])
    gradient, = torch.autograd.grad(found.sum(), ratio)
    assert gradient[0] < 0 < gradient[1]
    assert kto_kl(torch.tensor([-3.0, -2.0]), torch.zeros(2)).item() == 0


def test_what_a_loss_reads_comes_from_its_signature():
    assert PAIR_LOSSES.get("hinge").reads == ("beta", )
    assert PAIR_LOSSES.get("simpo").reads == ("beta", "label_smoothing", "simpo_gamma")


@pytest.mark.parametrize("name", list(PAIR_LOSSES))
def test_the_options_know_which_loss_reads_the_reference(name):
    pairs = drawn(1)
    moved = pairs._replace(ref_chosen=pairs.ref_chosen - 1)
    assert torch.equal(losses(name, pairs), losses(name, moved)) is (name in WITHOUT_REFERENCE)
