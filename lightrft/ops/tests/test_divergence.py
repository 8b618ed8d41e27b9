"""Gaps counted in histograms: quantiles of what no rank ever gathers."""
import math

import pytest
import torch

from lightrft.ops.divergence import (BINS, gap_metrics, gap_sums, histogram, mismatch_metrics, mismatch_sums,
                                     upper_quantile)


def gaps_of(count, seed=0):
    """Gaps over ten orders of magnitude, [count] float64."""
    return 10**(torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10 - 8)


def all_of(values):
    return torch.ones(len(values), dtype=torch.bool)


@pytest.mark.parametrize("share", [0.5, 0.99, 0.999])
@pytest.mark.parametrize("count", [2, 10, 999, 1000, 1001, 20_000])
def test_the_quantile_is_bounded_from_above(count, share):
    """By the edge of its bin, where at least one value ranks above."""
    gaps = gaps_of(count, count)
    exact = gaps.sort().values[min(math.ceil(share * count), count - 1) - 1].item()
    assert exact <= upper_quantile(histogram(gaps, all_of(gaps)), share) <= 1.1221 * exact


def test_counts_of_parts_add_up():
    """Micro-batches and ranks: the same counts as of all tokens at once."""
    gaps, mask = gaps_of(1000), torch.rand(1000, generator=torch.Generator().manual_seed(1)) < 0.5
    parts = [histogram(*pair) for pair in zip(gaps.split(137), mask.split(137))]
    assert torch.equal(sum(parts), histogram(gaps, mask)) and sum(parts).sum() == mask.sum()


def test_zero_small_large_and_broken_gaps():

    def shown(*values):
        return upper_quantile(histogram(torch.tensor(values), all_of(values)), 0.999)

    assert shown(0.0, 0.0, 0.0) == 0 and shown(0.0, 1e-12, 1e-12) == pytest.approx(1e-8)
    assert shown(1e5, 1e5) == math.inf == shown(math.nan, math.nan) == shown(math.inf, math.inf)
    assert shown(5.0) == 0 == shown() and shown(0.0, 5.0) == 0, "one token alone decides nothing"


def test_gaps_outside_the_mask_do_not_count():
    gaps, mask = torch.tensor([0.1, math.nan, 0.1, 0.1, 7.0]), torch.tensor([True, False, True, True, False])
    sums, largest = gap_sums(gaps, mask)
    found = gap_metrics(sums)
    assert largest.item() == pytest.approx(0.1) == found["mean"] and 0.1 <= found["p999"] < 0.1123
    assert gap_metrics(gap_sums(gaps, ~all_of(gaps))[0]) == {"mean": 0.0, "p999": 0.0}


def test_the_mismatch_is_the_naive_one():
    """Means and maxima over the masked tokens; nan outside of the mask reaches nothing."""
    rng = torch.Generator().manual_seed(0)
    old, rollout = (-torch.rand(500, generator=rng) * 3 for _ in range(2))
    mask = torch.rand(500, generator=rng) < 0.6
    rollout[~mask] = torch.nan
    found = mismatch_metrics(*mismatch_sums(old, rollout, mask))
    x, y = old[mask].double(), rollout[mask].double()
    dp, dlogp = (x.exp() - y.exp()).abs(), (x - y).abs()
    naive = {"tokens": mask.sum(), "abs_dp_mean": dp.mean(), "abs_dp_max": dp.max(), "abs_logp_mean": dlogp.mean(),
             "abs_logp_max": dlogp.max(), "kl_k1": (y - x).mean(), "pearson": torch.corrcoef(torch.stack([x, y]))[0, 1],
             "chi2": ((x - y).exp()**2).mean() - 1, "abs_dp_std": dp.std(correction=0)}  # yapf: disable
    for key, value in naive.items():
        assert found[key] == pytest.approx(value.item()), key
    for key, values in (("abs_dp_p999", dp), ("abs_logp_p999", dlogp)):
        assert 1 <= found[key] / values.sort().values[-2].item() < 1.1221
    empty = mismatch_metrics(*mismatch_sums(old, rollout, mask & ~mask))
    assert set(empty.values()) == {0.0} and len(mismatch_sums(old, rollout, mask)[0]) == 13 + 2 * BINS
