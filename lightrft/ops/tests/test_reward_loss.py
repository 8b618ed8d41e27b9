"""Losses of reward models against known values, a naive loop, and each other."""
import math

import pytest
import torch

from lightrft.ops.preference import pair_loss, REWARD_LOSSES, step_loss

CHOSEN, REJECTED = torch.tensor([1.0, 0.2]), torch.tensor([0.5, 0.4])


@pytest.mark.parametrize("kind, margins, known", [("sigmoid", 0.0, 0.636108), ("logexp", 0.0, 0.636108),
                                                  ("hps", 0.0, 0.636108), ("sigmoid", [0.1, 0.2], 0.713015)])
def test_known_values(kind, margins, known):
    loss = pair_loss(CHOSEN, REJECTED, torch.ones(2), torch.tensor(margins), kind)
    assert loss.mean().item() == pytest.approx(known, abs=1e-6)


def naive(chosen, rejected, label, margin):
    """The loss of one pair in float64, from the definition of the sigmoid."""
    if math.isnan(label):
        return 0.0
    margin = 0.0 if label == 0.5 else margin
    right, wrong = chosen - rejected - margin, rejected - chosen - margin
    return label * math.log(1 + math.exp(-right)) + (1 - label) * math.log(1 + math.exp(-wrong))


@pytest.mark.parametrize("kind", REWARD_LOSSES)
def test_a_naive_loop_and_its_gradient(kind):
    draw = torch.Generator().manual_seed(0)
    chosen, rejected = (torch.randn(40, 2, generator=draw, dtype=torch.float64, requires_grad=True) for _ in range(2))
    margins = torch.rand(40, 2, generator=draw, dtype=torch.float64)
    labels = torch.tensor([1.0, 0.0, 0.5, torch.nan], dtype=torch.float64).repeat(20).view(40, 2)
    loss = pair_loss(chosen, rejected, labels, margins, kind)
    used = margins if kind == "sigmoid" else torch.zeros_like(margins)
    wanted = [
        naive(*each) for each in zip(chosen.flatten().tolist(),
                                     rejected.flatten().tolist(), labels.flatten(), used.flatten())
    ]
    torch.testing.assert_close(loss.flatten(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda c, r: pair_loss(c, r, labels, margins, kind), (chosen, rejected))


def test_far_scores_stay_finite_and_a_tie_is_least_where_both_are_equal():
    far = torch.tensor([1e4, -1e4], requires_grad=True)
    for kind in REWARD_LOSSES:
        loss = pair_loss(far, torch.zeros(2), torch.ones(2), 0.0, kind)
        assert loss.tolist() == [0.0, 1e4]
        gaps = torch.linspace(-1, 1, 21)
        assert pair_loss(gaps, torch.zeros(21), torch.full((21, ), 0.5), 9.0, kind).argmin() == 10
    with pytest.raises(ValueError, match="known: sigmoid, logexp, hps"):
        pair_loss(far, far, far, 0.0, "hinge")


def test_steps_by_hand():
    """Classes of 0.8 and 0.2: a good step costs -log 0.8, a bad one -log 0.2, an even one the mean of both."""
    logprobs = torch.tensor([[0.8, 0.2]]).log().repeat(3, 1)
    graded = step_loss(logprobs, torch.tensor([1.0, 0.0, 0.5]), True)
    assert graded.tolist() == pytest.approx([0.223144, 1.609438, 0.916291], abs=1e-6)
    assert step_loss(logprobs[:2], torch.tensor([0.0, 1.0]), False).tolist() == graded[:2].tolist()
