"""Every estimator against a naive loop over samples, the reference numbers, and the shape of the suite itself."""
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

import lightrft.algorithms as suite
from lightrft.algorithms import ADVANTAGES, CORRECTIONS, POLICY_LOSSES
from lightrft.algorithms.catalog import fields_of
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.tests.ragged import SEEDS, batch, spans
from lightrft.ops.tests.test_returns import naive_gae, naive_returns
from lightrft.types import Experience

CFG = AlgorithmConfig(std_eps=0.0)


def reference_batch(dtype=torch.float32):
    """Rewards [1, 0 | 1, 1], lengths 2, 3, 1, 2."""
    cu = torch.tensor([0, 2, 5, 6, 8], dtype=torch.int32)
    rewards, token_rewards = torch.tensor([1, 0, 1, 1], dtype=dtype), torch.zeros(8, dtype=dtype)
    token_rewards[cu[1:].long() - 1] = rewards
    return Experience(
        torch.zeros(8).long(), cu,
        torch.ones(8).bool(), torch.tensor([7, 7, 3, 3]), rewards=rewards, token_rewards=token_rewards,
        scored=torch.ones(4).bool(), values=torch.tensor([.1, .2, .3, .2, .1, .5, .4, .6], dtype=dtype))


def random_batch(seed, penalties):
    """Groups of any size in any order, unscored samples with NaN rewards, empty masks, gaps."""
    _, cu, mask, gen = batch(seed)
    seqs, total = len(cu) - 1, len(mask)
    groups, scored = torch.randint(3, (seqs, ), generator=gen) * 5, torch.rand(seqs, generator=gen) < 0.8
    rewards = torch.randint(3, (seqs, ), generator=gen).double() / 2
    tokens = torch.randn(total, generator=gen, dtype=torch.float64) * penalties
    for b, (start, end) in enumerate(spans(cu)):
        kept = [t for t in range(start, end) if mask[t]]
        if kept:
            tokens[kept[-1]] += rewards[b]
        if not scored[b]:
            rewards[b], tokens[start:end] = torch.nan, torch.nan
    values = torch.randn(total, generator=gen, dtype=torch.float64)
    return Experience(
        torch.zeros(total).long(), cu, mask, groups, rewards=rewards, token_rewards=tokens, scored=scored,
        values=values)


def naive_outcomes(exp, shape):
    """Shaped reward of each sample by a loop, and whether its group is alive."""
    out, live = torch.zeros_like(exp.rewards), torch.zeros_like(exp.scored)
    for b in range(exp.num_seqs):
        peers = [
            float(exp.rewards[i]) for i in range(exp.num_seqs) if exp.group_ids[i] == exp.group_ids[b] and exp.scored[i]
        ]
        if exp.scored[b] and len(peers) > 1 and max(peers) - min(peers) > CFG.zero_spread:
            out[b], live[b] = shape(float(exp.rewards[b]), torch.tensor(peers, dtype=torch.float64)), True
    return out, live


def naive_tokens(exp, outcomes, gamma):
    """The outcome on the last action token, the penalties before it, summed backwards."""
    keep = exp.loss_mask & exp.scored.repeat_interleave(exp.seq_lens)
    rewards = torch.where(keep, exp.token_rewards, 0)
    for b, (start, end) in enumerate(spans(exp.cu_seqlens)):
        kept = [t for t in range(start, end) if keep[t]]
        if kept and outcomes is not None:
            rewards[kept[-1]] += outcomes[b] - exp.rewards[b]
    return naive_returns(rewards, keep, exp.cu_seqlens, gamma), keep


SHAPES = {
    "rloo": lambda r, peers: r - (peers.sum() - r) / (len(peers) - 1),
    "group_norm": lambda r, peers: (r - peers.mean()) / peers.std(),
    "dr_grpo": lambda r, peers: r - peers.mean(),
    "reinforce_baseline": lambda r, peers: r - peers.mean(),
}


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_estimators_equal_a_loop(seed):
    exp, cfg = random_batch(seed, penalties=seed % 2), replace(CFG, gamma=[1.0, 0.9][seed % 3 == 0])
    for name, entry in ADVANTAGES._entries.items():
        got = entry.fn(exp, cfg)
        outcomes, live = naive_outcomes(
            exp, SHAPES["group_norm" if name == "grpo" else name]) if entry.needs_group else (None, None)
        want, keep = naive_tokens(exp, outcomes, cfg.gamma)
        if name == "gae":
            want, _ = naive_gae(exp.token_rewards, exp.values, keep, exp.cu_seqlens, cfg.gamma, cfg.lambd)
        if entry.whitens:
            stat = keep if live is None else keep & live.repeat_interleave(exp.seq_lens)
            if stat.any():
                scale = (want[stat].var(correction=0) + 1e-8).sqrt()
                want = torch.where(stat, want - want[stat].mean(), want) / scale
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda m: f"{name}: {m}")
        assert not got[~keep].any()


@pytest.mark.parametrize("name,expected", [
    ("rloo", [1, -1, 0, 0]),
    ("dr_grpo", [.5, -.5, 0, 0]),
    ("group_norm", [.707107, -.707107, 0, 0]),
    ("grpo", [.707107, -.707107, 0, 0]),
    ("reinforce++", [.774597, -1.290994, .774597, .774597]),
    ("reinforce", [1, 0, 1, 1]),
])
def test_reference_numbers(name, expected):
    exp = reference_batch()
    got = ADVANTAGES.get(name).fn(exp, CFG)
    torch.testing.assert_close(got, torch.tensor(expected).float().repeat_interleave(exp.seq_lens), rtol=0, atol=1e-6)


def test_reference_gae():
    exp = reference_batch()
    got = ADVANTAGES.get("gae").fn(exp, CFG)
    torch.testing.assert_close(got, torch.tensor([.86, .80, -.28525, -.195, -.1, .5, .58, .40]))
    torch.testing.assert_close(got + exp.values, torch.tensor([.96, 1, .01475, .005, 0, 1, .98, 1]))


def test_a_dead_group_gets_exactly_zero():
    exp = reference_batch()
    for name in ("rloo", "dr_grpo", "group_norm", "reinforce_baseline"):
        assert not ADVANTAGES.get(name).fn(exp, CFG)[5:].any(), name
        alone = replace(exp, scored=torch.tensor([True, False, True, True]))
        assert not ADVANTAGES.get(name).fn(alone, CFG).any(), f"{name}: one scored sample"
        wide = replace(CFG, zero_spread=2.0)
        assert not ADVANTAGES.get(name).fn(exp, wide).any(), f"{name}: the spread threshold"


def test_unscored_samples_leave_the_baseline():
    exp = reference_batch()
    three = replace(exp, group_ids=torch.tensor([1, 1, 1, 1]), scored=torch.tensor([True, True, True, False]))
    three.rewards[3] = three.token_rewards[7] = torch.nan
    got = ADVANTAGES.get("rloo").fn(three, CFG)
    torch.testing.assert_close(got, torch.tensor([.5, .5, -1, -1, -1, .5, 0, 0]))


def test_kl_in_the_reward_is_added_after_the_group():
    exp = reference_batch()
    exp.token_rewards -= 0.01
    got = ADVANTAGES.get("dr_grpo").fn(exp, CFG)
    torch.testing.assert_close(got, torch.tensor([.48, .49, -.53, -.52, -.51, -.01, -.02, -.01]))


def test_options_change_the_advantage():
    exp = reference_batch()

    def moves(name, **change):
        return not torch.equal(ADVANTAGES.get(name).fn(exp, CFG), ADVANTAGES.get(name).fn(exp, replace(CFG, **change)))

    assert moves("gae", lambd=0.5) and moves("group_norm", std_eps=0.5)
    for name in ADVANTAGES:
        assert moves(name, gamma=0.5), name


def ppo_case(**options):
    log_ratio, advantages = torch.tensor([.5, -.5, 1.5, .1]), torch.tensor([1., -1, -1, 1])
    exp = Experience(
        torch.zeros(4).long(), torch.tensor([0, 4], dtype=torch.int32),
        torch.ones(4).bool(), old_logprobs=torch.full((4, ), -2.0), advantages=advantages)
    loss, metrics = POLICY_LOSSES.get("ppo").fn(log_ratio - 2, exp, AlgorithmConfig(**options))
    return float(loss.mean()), {k: float(v.mean()) for k, v in metrics.items()}


def test_ppo_reference_numbers():
    loss, metrics = ppo_case()
    assert loss == pytest.approx(.744129, abs=1e-6) and metrics["clip_frac_low"] + metrics["clip_frac_high"] == .5
    assert ppo_case(eps_clip_high=.28)[0] == pytest.approx(.724129, abs=1e-6)
    loss, metrics = ppo_case(dual_clip=3.0)
    assert loss == pytest.approx(.373707, abs=1e-6) and metrics["clip_frac_dual"] == .25


def test_no_correction_is_one():
    exp = reference_batch()
    assert CORRECTIONS.get("none")(exp, CFG).tolist() == [1.0] * 8


def registered():
    functions = [ADVANTAGES.get(n).fn for n in ADVANTAGES]
    return functions + [POLICY_LOSSES.get(n).fn for n in POLICY_LOSSES] + [CORRECTIONS.get(n) for n in CORRECTIONS]


def test_each_algorithm_is_one_short_documented_file():
    folder = Path(suite.__file__).parent
    files = {p for p in folder.glob("*.py") if p.stem not in ("__init__", "base", "catalog")}
    assert {Path(fn.__code__.co_filename) for fn in registered()} == files, "each file registers an algorithm"
    for path in files:
        assert len(path.read_text().splitlines()) < 60, path.name
    for fn in registered():
        doc = fields_of(fn)
        assert re.search(r"https://(arxiv\.org/abs|doi\.org)/", doc["paper"]), f"{fn.__module__} links no paper"
        assert all(doc[key] for key in ("summary", "equation", "degenerate", "deviation")), fn.__module__


def test_the_table_names_every_algorithm():
    text = suite.table()
    for registry in (ADVANTAGES, POLICY_LOSSES, CORRECTIONS):
        for name in registry:
            assert f"`{name}`" in text
    lines = text.splitlines()
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {9}, "every row has every column"
    assert "`group_norm`, `grpo`" in text
