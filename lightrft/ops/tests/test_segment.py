"""Packing and segment statistics against loops over sequences, groups and tokens."""
import torch
from hypothesis import given, settings

from lightrft.ops.segment import (expand, group_stats, last_token, masked_mean, masked_var, masked_whiten, position_ids,
                                  response_lengths, segment_mean, segment_sum, seq_ids, shift_right)
from lightrft.tests.support.ragged import SEEDS, batch, spans

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_packing(seed):
    lens, cu, _, gen = batch(seed)
    parts = [torch.randn(n, 2, generator=gen) for n in lens]
    flat = torch.cat(parts)
    assert seq_ids(cu).tolist() == seq_ids(cu, len(flat)).tolist() == [b for b, n in enumerate(lens) for _ in range(n)]
    assert position_ids(cu).tolist() == [t for n in lens for t in range(n)]
    want = torch.cat([torch.cat([torch.zeros(1, 2), p[:-1]]) if len(p) else p for p in parts])
    assert torch.equal(shift_right(flat, cu), want)
    assert torch.equal(shift_right(flat[:, 0] > 0, cu), want[:, 0] > 0), "masks shift as well"


def test_packing_nothing():
    assert not len(shift_right(torch.empty(0), torch.tensor([0], dtype=torch.int32)))


def test_shift_right_is_differentiable():
    x = torch.arange(5.).requires_grad_()
    shift_right(x, torch.tensor([0, 2, 2, 5])).sum().backward()
    assert x.grad.tolist() == [1, 0, 1, 1, 0]


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_segments(seed):
    _, cu, mask, gen = batch(seed)
    x = torch.randn(len(mask), generator=gen, dtype=torch.float64)
    dirty = torch.where(mask, x, torch.nan)
    kept = [x[a:b][mask[a:b]] for a, b in spans(cu)]
    torch.testing.assert_close(segment_sum(dirty, cu, mask), torch.stack([k.sum() for k in kept]), **CLOSE)
    mean = torch.stack([k.mean() if len(k) else k.sum() for k in kept])
    torch.testing.assert_close(segment_mean(dirty, cu, mask), mean, **CLOSE)
    torch.testing.assert_close(segment_mean(x, cu), torch.stack([x[a:b].sum() / max(b - a, 1) for a, b in spans(cu)]),
                               **CLOSE)
    assert segment_sum(mask, cu).tolist() == [len(k) for k in kept]
    assert expand(mean, cu,
                  len(mask)).tolist() == [m for m, (a, b) in zip(mean.tolist(), spans(cu)) for _ in range(b - a)]
    index, valid = last_token(mask, cu)
    for (a, b), i, ok in zip(spans(cu), index.tolist(), valid.tolist(), strict=True):
        chosen = [t for t in range(a, b) if mask[t]]
        assert ok == bool(chosen) and (not chosen or i == chosen[-1])


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_groups(seed):
    gen = torch.Generator().manual_seed(seed)
    seqs = int(torch.randint(1, 9, (), generator=gen))
    ids, valid = torch.randint(-1, 3, (seqs, ), generator=gen) * 10, torch.rand(seqs, generator=gen) < 0.7
    values = torch.where(valid, torch.randn(seqs, generator=gen, dtype=torch.float64), torch.nan)
    stats = group_stats(values, ids, valid)
    for b in range(seqs):
        x = values[(ids == ids[b]) & valid]
        want = [float(f) for f in (x.mean(), x.std(), len(x), x.max() - x.min())] if len(x) > 1 else None
        want = want or ([float(x), 0.0, 1.0, 0.0] if len(x) else [0.0] * 4)
        torch.testing.assert_close(torch.stack([s[b] for s in stats]), torch.tensor(want, dtype=torch.float64), **CLOSE)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_masked_statistics(seed):
    _, _, mask, gen = batch(seed)
    x = torch.randn(len(mask), generator=gen, dtype=torch.float64)
    dirty, kept = torch.where(mask, x, torch.inf), x[mask]
    torch.testing.assert_close(masked_mean(dirty, mask), kept.mean() if len(kept) else kept.sum(), **CLOSE)
    for unbiased in (False, True):
        want = kept.var(correction=int(unbiased)) if len(kept) > unbiased else kept.new_zeros(())
        torch.testing.assert_close(masked_var(dirty, mask, unbiased), want, **CLOSE)
    white = masked_whiten(dirty, mask)
    assert not white[~mask].any()
    if len(kept):
        torch.testing.assert_close(white[mask], (kept - kept.mean()) / (kept.var(correction=0) + 1e-8).sqrt(), **CLOSE)


def test_response_lengths_count_from_the_first_drawn_token():
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0], dtype=torch.bool)
    cu = torch.tensor([0, 6, 8, 8, 12], dtype=torch.int32)
    expected = [int(b - a - part.int().argmax()) if part.any() else 0
                for a, b in zip(cu, cu[1:]) for part in [mask[a:b]]]  # yapf: disable
    assert response_lengths(mask, cu).tolist() == expected == [5, 0, 0, 4]
