"""Noise, restriction and inverse-CDF sampling against exact probabilities and naive loops."""
import numpy as np
import pytest
import torch

from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.sampling import inverse_cdf, restrict, sample, uniforms, uniforms_at

ON = SamplingParams(max_new_tokens=1)


def logits_of(rows, vocabulary, seed=0, scale=2.0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def noise(rows, seed=0):
    return torch.from_numpy(uniforms([seed], rows)[0])


def chi_square(counts, probs):
    """(statistic - degrees of freedom) / its standard deviation, over cells of at least 5 expected draws."""
    expected = probs * counts.sum()
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    expected = np.append(expected[big], expected[~big].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    return (((observed - expected)**2 / expected).sum() - freedom) / (2 * freedom)**0.5


def test_noise_depends_on_the_seed_alone():
    together = uniforms([3, 2**63, 5], 40)
    assert np.array_equal(together[1], uniforms([2**63], 40)[0]), "a row changes with its neighbours"
    assert np.array_equal(together[:, :7], uniforms([3, 2**63, 5],
                                                    7)), "a longer row does not start with the shorter one"
    assert not np.array_equal(together[0], together[2]), "two seeds, one row"
    assert together.min() >= 0 and together.max() < 1 and abs(together.mean() - 0.5) < 0.08, "not uniform in [0, 1)"


@pytest.mark.parametrize("vocabulary", [7, 64, 4096, 6144, 10007])
def test_inverse_cdf_equals_the_naive_loop(vocabulary):
    probs = logits_of(40, vocabulary).softmax(-1)
    probs[:, ::3] = 0.0
    u = noise(40)
    for row, value, token in zip(probs.double().numpy(), u.tolist(), inverse_cdf(probs, u).tolist()):
        target, reached, naive = value * row.sum(), 0.0, 0
        for naive, weight in enumerate(row):
            reached += weight
            if reached > target:
                break
        assert token == naive, f"V={vocabulary}: {token} instead of {naive}"


@pytest.mark.parametrize("vocabulary", [5, 6144, 10007])
def test_tokens_of_probability_zero_are_never_drawn(vocabulary):
    probs = torch.zeros(3, vocabulary)
    probs[:, 1] = probs[:, 3] = 0.5
    edges = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cdf(probs, edges).tolist() == [1, 3, 3], "the edges of [0, 1) leave the support"


@pytest.mark.parametrize("vocabulary", [32, 4608])
@pytest.mark.parametrize("params", [
    ON,
    SamplingParams(1, temperature=0.5),
    SamplingParams(1, top_k=6),
    SamplingParams(1, top_p=0.7),
    SamplingParams(1, temperature=1.5, min_p=0.2),
])
def test_draws_follow_the_exact_distribution(vocabulary, params):
    logits = logits_of(1, vocabulary)
    exact = restrict(logits / params.temperature, params).double().softmax(-1)[0].numpy()
    draws = 20000
    tokens, logprobs = zip(*(sample(logits.expand(2000, -1), noise(2000, seed=i), params)
                             for i in range(draws // 2000)))
    counts = np.bincount(torch.cat(tokens).numpy(), minlength=vocabulary).astype(float)
    assert (counts[exact == 0] == 0).all(), "a token outside the support was drawn"
    assert abs(chi_square(counts, exact)) < 4, "the draws do not follow the distribution"
    want = torch.from_numpy(exact).log()[torch.cat(tokens)]
    assert (torch.cat(logprobs).double() -
            want).abs().max() < 1e-5, "log-probs are not those of the sampled distribution"


def support(logits, **kwargs):
    return (restrict(logits, SamplingParams(1, **kwargs)) > -torch.inf)


@pytest.mark.parametrize("seed", range(4))
def test_restrictions_equal_the_naive_supports(seed):
    logits = logits_of(1, 50, seed)
    probs = logits[0].double().softmax(-1)
    order = probs.argsort(descending=True).tolist()
    assert set(support(logits, top_k=5)[0].nonzero()[:, 0].tolist()) == set(order[:5])
    kept, mass = set(), 0.0
    for token in order:
        if mass >= 0.8:
            break
        kept.add(token)
        mass += probs[token].item()
    assert set(support(logits, top_p=0.8)[0].nonzero()[:, 0].tolist()) == kept
    assert torch.equal(support(logits, min_p=0.1)[0], probs >= 0.1 * probs.max())
    both = support(logits, top_k=10, min_p=0.1)
    assert torch.equal(both, support(logits, top_k=10) & support(logits, min_p=0.1)), "filters do not combine"
    assert support(logits, top_p=0.0)[0].sum() == 1 and support(logits, min_p=1.0)[0].sum() == 1, "nothing is left"
    assert support(logits, top_k=0)[0].all() and support(logits, top_k=999)[0].all(), "top_k 0 is not off"


def test_top_p_is_taken_after_top_k():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert support(logits, top_k=2, top_p=0.56)[0].tolist() == [True, False, False, False], "top-p must see 4/7, 3/7"
    assert support(logits, top_p=0.56)[0].tolist() == [True, True, False, False]


def test_min_p_is_taken_after_top_p():
    """In vLLM's order top-p would see 5/9, 2/9, 2/9 and keep two; preflight/engine_rules.py refuses the pair there."""
    logits = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()
    assert support(logits, top_p=0.72, min_p=0.3)[0].tolist() == [True, True, True, False]


def test_greedy_reports_the_temperature_one_softmax():
    logits = logits_of(9, 33)
    tokens, logprobs = sample(logits, None, SamplingParams(1, temperature=0.0, top_k=1))
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.allclose(logprobs, logits.log_softmax(-1).max(-1).values, atol=1e-6)


def test_half_precision_logits_give_float32_logprobs():
    assert sample(logits_of(2, 9).bfloat16(), noise(2), ON)[1].dtype == torch.float32


def _splitmix(state, mask=2**64 - 1):
    """The published algorithm, on Python's integers."""
    z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


def test_draws_by_seed_and_position():
    """Numbers of SplitMix64 whose state is a mixed seed; uniform, and no two positions or seeds alike."""
    assert _splitmix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the first number of the published seed 0
    seeds, positions = [0, 1, 7, 2**63 - 1, 1234567890123456789], [0, 1, 2, 40_000]
    for seed in seeds:
        for position in positions:
            expected = _splitmix(_splitmix(seed) + (position + 1) * 0x9E3779B97F4A7C15 & 2**64 - 1) >> 11
            assert uniforms_at(torch.tensor([seed]), torch.tensor([position])).item() == expected * 2.0**-53
    u = uniforms_at(torch.arange(200).repeat_interleave(100), torch.arange(100).repeat(200))
    assert u.unique().numel() == 20_000 and 0 <= u.min() and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01 and (u.histc(20, 0, 1) - 1000).abs().max() < 150
