"""GAE and discounted returns against a loop over time, and the reference numbers."""
import pytest
import torch
from hypothesis import given, settings

from lightrft.ops.returns import discounted_returns, gae
from lightrft.tests.support.ragged import SEEDS, batch, spans


def naive_gae(rewards, values, mask, cu, gamma, lambd):
    out = torch.zeros_like(values)
    for a, b in spans(cu):
        adv = after = 0.0
        for t in reversed(range(a, b)):
            if mask[t]:
                adv = rewards[t] + gamma * after - values[t] + gamma * lambd * adv
                out[t], after = adv, values[t]
    return out, torch.where(mask, out + values, 0)


def naive_returns(rewards, mask, cu, gamma):
    out = torch.zeros_like(rewards)
    for a, b in spans(cu):
        total = 0.0
        for t in reversed(range(a, b)):
            if mask[t]:
                total = rewards[t] + gamma * total
                out[t] = total
    return out


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_equal_to_loop(seed):
    _, cu, mask, gen = batch(seed, max_len=40)
    rewards, values = torch.randn(2, len(mask), generator=gen, dtype=torch.float64)
    gamma, lambd = [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.0, 0.95), (0.99, 0.0)][seed % 5]
    args = rewards, values, mask, cu, gamma, lambd
    for got, want in zip(gae(*args), naive_gae(*args)):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(discounted_returns(rewards, mask, cu, gamma),
                               naive_returns(rewards, mask, cu, gamma),
                               rtol=1e-9,
                               atol=1e-9)


@pytest.mark.parametrize("gamma", [1.0, 0.999])
def test_one_long_sequence(gamma):
    gen = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 5000, generator=gen, dtype=torch.float64)
    cu, mask = torch.tensor([0, 5000], dtype=torch.int32), torch.rand(5000, generator=gen) < 0.8
    got, want = gae(rewards, values, mask, cu, gamma, 0.95)[0], naive_gae(rewards, values, mask, cu, gamma, 0.95)[0]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(discounted_returns(rewards, mask, cu, gamma),
                               naive_returns(rewards, mask, cu, gamma),
                               rtol=1e-9,
                               atol=1e-9)


def test_reference_numbers():
    cu = torch.tensor([0, 2, 5, 6, 8], dtype=torch.int32)
    values = torch.tensor([.1, .2, .3, .2, .1, .5, .4, .6])
    rewards = torch.tensor([0, 1, 0, 0, 0, 1, 0, 1.])
    adv, returns = gae(rewards, values, torch.ones(8, dtype=torch.bool), cu, 1.0, 0.95)
    torch.testing.assert_close(adv, torch.tensor([.86, .80, -.28525, -.195, -.1, .5, .58, .40]))
    torch.testing.assert_close(returns, torch.tensor([.96, 1, .01475, .005, 0, 1, .98, 1]))


def test_environment_gap_is_skipped():
    mask = torch.tensor([1, 1, 0, 1, 1]).bool()
    values, rewards = torch.where(mask, 0.5, torch.nan), torch.tensor([0, 0, torch.nan, 0, 1.])
    adv, returns = gae(rewards, values, mask, torch.tensor([0, 5], dtype=torch.int32), 1.0, 0.95)
    torch.testing.assert_close(adv, torch.tensor([.428688, .45125, 0, .475, .5]), atol=1e-6, rtol=0)
    assert returns[2] == 0 and returns.isfinite().all()


def test_inputs_are_kept_and_nothing_is_an_answer():
    rewards, mask, cu = torch.ones(4), torch.ones(4, dtype=torch.bool), torch.tensor([0, 4], dtype=torch.int32)
    assert discounted_returns(rewards, mask, cu, 0.5).tolist() == [1.875, 1.75, 1.5, 1]
    assert rewards.tolist() == [1, 1, 1, 1]
    adv, returns = gae(rewards, rewards, ~mask, cu, 1.0, 1.0)
    assert not adv.any() and not returns.any()
