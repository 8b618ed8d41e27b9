"""Every correction against a loop over sequences, the reference numbers, the veto and the denominators."""
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from lightrft.algorithms import CORRECTIONS
from lightrft.config.schema import AlgorithmConfig
from lightrft.models.loss import PolicyLoss
from lightrft.ops.aggregate import MODES, Denominators, count
from lightrft.tests.support.ragged import SEEDS, batch, spans
from lightrft.types import Experience

BOUNDED = [name for name in CORRECTIONS if CORRECTIONS.get(name).low is not None]
NAMES = ["none", "bypass", "tis", "mis", "icepop", "seq_tis", "seq_mis", "geo_tis", "geo_mis"]


def test_the_names_and_their_bounds():
    assert set(NAMES) <= set(CORRECTIONS) and set(BOUNDED) == set(NAMES[2:])
    cfg = CORRECTIONS.get("icepop").resolve(AlgorithmConfig())
    assert (cfg.correction_low, cfg.correction_high) == (0.5, 5.0)
    cfg = CORRECTIONS.get("icepop").resolve(AlgorithmConfig(correction_low=0.1))
    assert (cfg.correction_low, cfg.correction_high) == (0.1, 5.0)


def naive(name, old, rollout, low, high):
    """Weights of the action tokens of one sequence."""
    gaps = [min(max(a - b, -20.0), 20.0) for a, b in zip(old, rollout)]
    if name.startswith("seq_"):
        gaps = [sum(gaps)] * len(gaps)
    if name.startswith("geo_"):
        gaps = [sum(gaps) / max(len(gaps), 1)] * len(gaps)
    weights = [math.exp(min(max(gap, -20.0), 20.0)) for gap in gaps]
    if name.endswith("tis"):
        return [min(max(w, low), high) for w in weights]
    return [w if low <= w <= high else 0.0 for w in weights]


def random_batch(seed, scale=1.0):
    """A ragged multi-turn batch with NaN outside the mask."""
    _, cu, mask, gen = batch(seed)
    tokens = [torch.randn(len(mask), generator=gen, dtype=torch.float64) for _ in range(3)]
    old, gap, adv = tokens[0] - 1, tokens[1] * scale, tokens[2]
    hide = [torch.where(mask, values, torch.nan) for values in (old, old - gap, adv)]
    return Experience(
        torch.zeros(len(mask)).long(), cu, mask, old_logprobs=hide[0], rollout_logprobs=hide[1], advantages=hide[2])


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_weights_equal_a_loop(name, seed):
    exp = random_batch(seed, scale=[1.0, 30.0][seed % 5 == 0])
    low, high = [(0.4, 1.8), (0.0, 5.0)][seed % 2]
    got = CORRECTIONS.get(name).fn(exp, AlgorithmConfig(correction_low=low, correction_high=high))
    for a, b in spans(exp.cu_seqlens):
        kept = [t for t in range(a, b) if exp.loss_mask[t]]
        want = naive(name, exp.old_logprobs[kept].tolist(), exp.rollout_logprobs[kept].tolist(), low, high)
        assert got[kept].tolist() == pytest.approx(want, rel=1e-9, abs=1e-9)
    assert got.isfinite().all()


def loss_of(exp, new, **options):
    """``(loss, metrics, module)`` of PPO on ``exp``."""
    module = PolicyLoss(AlgorithmConfig(**options), 1.0)
    denominators = Denominators.of(count(exp.loss_mask, exp.cu_seqlens))
    return *module(new, None, exp, denominators, 0.0), module


@pytest.mark.parametrize("name,high,expected", [("tis", 5.0, -1.839306), ("tis", 2.0, -1.397326),
                                                ("icepop", 5.0, -1.672639), ("icepop", 2.0, 0.0),
                                                ("mis", 5.0, -1.672639), ("none", None, -.948664)])
def test_reference_numbers(name, high, expected):
    ones = torch.ones(3)
    exp = Experience(ones.long(), torch.tensor([0, 3], dtype=torch.int32), ones.bool(), advantages=ones,
                     old_logprobs=torch.tensor([-.3, -.1, -1]), rollout_logprobs=torch.tensor([-1.3, -1.1, -.1]))
    low = None if high is None else 0.5
    loss, metrics, _ = loss_of(exp, torch.tensor([-.2, -.4, -1]), rollout_correction=name, correction_low=low,
                               correction_high=high)
    assert float(loss) == pytest.approx(expected, abs=1e-6)
    if name == "icepop" and high == 5.0:
        assert float(metrics["correction_bound_frac"].mean()) == pytest.approx(1 / 3)
        assert float(metrics["correction_weight"].mean()) == pytest.approx(2 * math.e / 3)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_the_loss_with_a_correction_equals_a_loop(name, seed):
    """Masked and vetoed tokens add nothing and stay in the denominator; a weight has no gradient."""
    exp, low, high, veto = random_batch(seed), 0.4, 1.8, 0.3 * (seed % 2)
    new = torch.where(exp.loss_mask, exp.old_logprobs + 0.1, torch.nan).requires_grad_()
    options = {} if name in ("none", "bypass") else {
        "correction_low": low, "correction_high": high, "correction_veto": veto}  # yapf: disable
    loss, metrics, _ = loss_of(exp, new, rollout_correction=name, **options)
    total, tokens, bound, vetoed = 0.0, 0, 0, 0
    for a, b in spans(exp.cu_seqlens):
        kept = [t for t in range(a, b) if exp.loss_mask[t]]
        old, rollout = exp.old_logprobs[kept].tolist(), exp.rollout_logprobs[kept].tolist()
        weights = naive(name, old, rollout, low, high) if options else [1.0] * len(kept)
        bound += sum(w in (0.0, low, high) for w in weights)
        if options and any(math.exp(x - y) < veto for x, y in zip(old, rollout)):
            weights, vetoed = [0.0] * len(kept), vetoed + len(kept)
        ratio, adv = math.exp(0.1), exp.advantages[kept].tolist()
        total += sum(w * -ratio * a for w, a in zip(weights, adv))
        tokens += len(kept)
    assert loss.item() == pytest.approx(total / max(tokens, 1), rel=1e-9, abs=1e-9)
    mean = {key: float(metrics[f"correction_{key}"][exp.loss_mask].sum()) for key in ("bound_frac", "veto_frac")}
    assert mean == {"bound_frac": bound, "veto_frac": vetoed}
    grad, = torch.autograd.grad(loss, new)
    want = torch.where(exp.loss_mask, metrics["loss"] / max(tokens, 1), 0)
    torch.testing.assert_close(grad, want, rtol=1e-9, atol=1e-9)  # d/dx of w * exp(x - old) is itself


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BOUNDED)
def test_corrections_do_not_depend_on_the_cut(name, mode):
    exp = random_batch(11)
    assert exp.num_seqs > 3 and exp.loss_mask.any()
    new = torch.where(exp.loss_mask, exp.old_logprobs + 0.1, torch.nan)
    cfg = AlgorithmConfig(rollout_correction=name, correction_veto=0.2, loss_agg_mode=mode)
    module, denominators = PolicyLoss(cfg, 3.0), Denominators.of(count(exp.loss_mask, exp.cu_seqlens), 3.0)
    parts = [[i] for i in range(exp.num_seqs)]
    cut = sum(
        module(new[a:b], None, one, denominators, 0.0)[0]
        for one, (a, b) in zip(exp.split(parts), spans(exp.cu_seqlens)))
    torch.testing.assert_close(cut, module(new, None, exp, denominators, 0.0)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_without_mismatch_every_correction_is_none(name):
    exp = random_batch(11)
    exp.rollout_logprobs = exp.old_logprobs
    got, plain = (loss_of(exp, exp.old_logprobs + 0.1, rollout_correction=n)[0] for n in (name, "none"))
    assert torch.equal(got, plain) and got != 0


def test_an_on_policy_update_corrects_by_its_own_log_probs():
    """Without an old pass the trainer's log-probs now are the old ones."""
    exp = random_batch(11)
    skipped = loss_of(replace(exp, old_logprobs=None), exp.old_logprobs, rollout_correction="tis")[0]
    assert torch.equal(skipped, loss_of(exp, exp.old_logprobs, rollout_correction="tis")[0])
    assert not torch.equal(skipped, loss_of(exp, exp.old_logprobs)[0])
