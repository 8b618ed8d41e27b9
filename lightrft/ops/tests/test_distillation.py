"""Divergences from a teacher: known values, naive loops, and what a sparse teacher leaves out."""
import math

import pytest
import torch

from lightrft.ops.divergence import DIVERGENCES, coarse, divergence, top_tokens


def drawn(seed, rows=4, vocab=9):
    """Log-probs of a student and a teacher, float64."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(2, rows, vocab, generator=rng, dtype=torch.float64).mul_(2).log_softmax(-1)


def kl(p, q):
    return sum(math.exp(a) * (a - b) for a, b in zip(p, q))


def naive(kind, student, teacher, mix):
    m = [math.log(mix * math.exp(t) + (1 - mix) * math.exp(s)) for s, t in zip(student, teacher)]
    return {
        "forward": kl(teacher, student), "reverse": kl(student, teacher), "js":
        mix * kl(teacher, m) + (1 - mix) * kl(student, m)
    }[kind]


def test_the_known_cross_entropy():
    """Divergence and the teacher's entropy together."""
    student, teacher = (torch.tensor([row]).log_softmax(-1) for row in ([1., 0, -1], [0., 1, 0]))
    entropy = -(teacher.exp() * teacher).sum()
    assert (divergence(student, teacher, "forward") + entropy).item() == pytest.approx(1.407606, abs=1e-6)


@pytest.mark.parametrize("mix", [0.5, 0.2])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_every_kind_is_the_naive_loop_and_its_gradient(kind, mix):
    student, teacher = drawn(0)
    expected = [naive(kind, *rows, mix) for rows in zip(student.tolist(), teacher.tolist())]
    assert divergence(student, teacher, kind, mix).tolist() == pytest.approx(expected, abs=1e-12)
    assert divergence(teacher, teacher, kind, mix).abs().max() < 1e-12
    logits = student.clone().requires_grad_()
    torch.autograd.gradcheck(lambda x: divergence(x.log_softmax(-1), teacher, kind, mix), logits)


def test_a_token_that_a_side_never_has_costs_nothing_there():
    student = torch.tensor([[math.log(.5), math.log(.5)]], requires_grad=True)
    found = divergence(student, torch.tensor([[0., -torch.inf]]), "forward")
    assert found.item() == pytest.approx(math.log(2)) and torch.isfinite(torch.autograd.grad(found, student)[0]).all()


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_sparse_teacher_bounds_the_divergence_from_below(kind):
    """The more tokens, the closer; all but one lose nothing; a student equal to the teacher has 0 and no gradient."""
    student, teacher = drawn(1)
    whole, found = divergence(student, teacher, kind), []
    for k in range(1, 9):
        ids, sparse = top_tokens(teacher, k)
        torch.testing.assert_close(sparse.exp().sum(-1), torch.ones(4, dtype=torch.float64))
        found.append(divergence(coarse(student, ids), sparse, kind))
    assert all((low <= high + 1e-12).all() for low, high in zip(found, found[1:]))
    torch.testing.assert_close(found[-1], whole)
    same = teacher.clone().requires_grad_()
    ids, sparse = top_tokens(teacher, 3)
    loss = divergence(coarse(same.log_softmax(-1), ids), sparse, kind).sum()
    assert loss.abs() < 1e-12 and torch.autograd.grad(loss, same)[0].abs().max() < 1e-12


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="unknown divergence 'kl'; known: forward, reverse, js"):
        divergence(torch.zeros(1, 1), torch.zeros(1, 1), "kl")
