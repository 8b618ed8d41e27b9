"""Every estimator against a naive loop over samples, the reference numbers, and the shape of the suite itself."""
import inspect
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

import lightrft.algorithms as suite
from lightrft.algorithms import ADVANTAGES, CORRECTIONS, POLICY_LOSSES
from lightrft.algorithms.advantages.group_relative import added_to_best
from lightrft.algorithms.catalog import fields_of
from lightrft.config.schema import AlgorithmConfig
from lightrft.config.tree import extended
from lightrft.ops.tests.test_returns import naive_gae, naive_returns
from lightrft.tests.support.naive_advantages import NAIVE
from lightrft.tests.support.ragged import SEEDS, batch, spans
from lightrft.types import Experience

CFG = extended(AlgorithmConfig)(std_eps=0.0)


def reference_batch(dtype=torch.float32):
    """Rewards [1, 0 | 1, 1], lengths 2, 3, 1, 2."""
    cu = torch.tensor([0, 2, 5, 6, 8], dtype=torch.int32)
    rewards, token_rewards = torch.tensor([1, 0, 1, 1], dtype=dtype), torch.zeros(8, dtype=dtype)
    token_rewards[cu[1:].long() - 1] = rewards
    return Experience(
        torch.zeros(8).long(), cu,
        torch.ones(8).bool(), torch.tensor([7, 7, 3, 3]), rewards=rewards, token_rewards=token_rewards,
        scored=torch.ones(4).bool(), values=torch.tensor([.1, .2, .3, .2, .1, .5, .4, .6], dtype=dtype),
        reward_parts=torch.tensor([[1, 0], [0, 0], [1, 0], [0, 1]], dtype=dtype),
        part_weights=torch.tensor([[1, 0.5]], dtype=dtype).repeat(4, 1), baseline_rewards=torch.tensor([0, 0, 1, 1],
                                                                                                       dtype=dtype))


def rewarded(rewards, **changes):
    """The reference batch with other rewards."""
    exp = replace(reference_batch(), rewards=torch.tensor(rewards), **changes)
    exp.token_rewards[exp.cu_seqlens[1:].long() - 1] = exp.rewards
    return exp


def random_batch(seed, penalties):
    """Groups of any size in any order, unscored samples with NaN rewards, empty masks, gaps."""
    _, cu, mask, gen = batch(seed, max_seqs=9)
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
    parts = torch.randint(3, (seqs, 3), generator=gen).double() / 2
    parts[torch.rand(seqs, 3, generator=gen) < 0.2] = torch.nan
    baselines = torch.randint(3, (3, ), generator=gen).double() / 2
    baselines[torch.rand(3, generator=gen) < 0.2] = torch.nan
    return Experience(
        torch.zeros(total).long(), cu, mask, groups, rewards=rewards, token_rewards=tokens, scored=scored,
        values=values, reward_parts=parts, part_weights=torch.rand(seqs, 3, generator=gen, dtype=torch.float64),
        baseline_rewards=baselines[groups // 5])


def naive_tokens(exp, outcomes, gamma):
    """The outcome on the last action token, the penalties before it, summed backwards."""
    keep = exp.loss_mask & exp.scored.repeat_interleave(exp.seq_lens)
    rewards = torch.where(keep, exp.token_rewards, 0)
    for b, (start, end) in enumerate(spans(exp.cu_seqlens)):
        kept = [t for t in range(start, end) if keep[t]]
        if kept and outcomes is not None:
            rewards[kept[-1]] += outcomes[b] - exp.rewards[b]
    return naive_returns(rewards, keep, exp.cu_seqlens, gamma), keep


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_estimators_equal_a_loop(seed):
    exp = random_batch(seed, penalties=seed % 2)
    cfg = replace(CFG, gamma=[1.0, 0.9][seed % 3 == 0], pass_k=[0, 2, 3][seed % 3])
    for name, entry in ADVANTAGES._entries.items():
        got = entry.fn(exp, cfg)
        assert name in NAIVE or not entry.needs_group, f"{name} has no loop"
        outcomes, live = NAIVE[name](exp, cfg) if name in NAIVE else (None, None)
        want, keep = naive_tokens(exp, outcomes, cfg.gamma)
        if name == "gae":
            want, _ = naive_gae(exp.token_rewards, exp.values, keep, exp.cu_seqlens, cfg.gamma, cfg.lambd)
        if name in ("reinforce++", "reinforce_baseline"):
            stat = keep if live is None else keep & torch.tensor(live).repeat_interleave(exp.seq_lens)
            if stat.any():
                scale = (want[stat].var(correction=0) + 1e-8).sqrt()
                want = torch.where(stat, want - want[stat].mean(), want) / scale
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda m: f"{name}: {m}")
        assert not got[~keep].any()


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_the_order_of_samples_does_not_matter(seed):
    exp, cfg = random_batch(seed, penalties=1), replace(CFG, pass_k=seed % 3 and 2)
    order = torch.randperm(exp.num_seqs, generator=torch.Generator().manual_seed(seed)).tolist()
    for name, entry in ADVANTAGES._entries.items():
        exp.advantages = entry.fn(exp, cfg)
        torch.testing.assert_close(entry.fn(exp.select(order), cfg),
                                   exp.select(order).advantages, rtol=1e-9, atol=1e-9, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("name,expected", [
    ("rloo", [1, -1, 0, 0]),
    ("dr_grpo", [.5, -.5, 0, 0]),
    ("group_norm", [.707107, -.707107, 0, 0]),
    ("grpo", [.707107, -.707107, 0, 0]),
    ("reinforce++", [.774597, -1.290994, .774597, .774597]),
    ("reinforce", [1, 0, 1, 1]),
    ("remax", [1, 0, 0, 0]),
    ("opo", [.6, -.4, 0, 0]),
    ("gpg", [1, -1, 0, 0]),
    ("cpgd", [.5, -.5, 0, 0]),
    ("maxrl", [1, -1, 0, 0]),
    ("grpo_passk", [1, 0, 0, 0]),
    ("gdpo", [1.264911, -1.264911, .632456, -.632456]),
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
    for name in sorted(NAIVE.keys() - {"remax", "gdpo"}):
        assert not ADVANTAGES.get(name).fn(exp, CFG)[5:].any(), name
        alone = replace(exp, scored=torch.tensor([True, False, True, True]))
        assert not ADVANTAGES.get(name).fn(alone, CFG).any(), f"{name}: one scored sample"
        wide = replace(CFG, zero_spread=2.0)
        assert not ADVANTAGES.get(name).fn(exp, wide).any(), f"{name}: the spread threshold"


@pytest.mark.parametrize("k", [2, 3, 5])
def test_pass_k_is_the_gradient_of_the_expected_best_of_k(k):
    """A policy over four responses: the expected sum of advantage times score, over every draw of k, is exact."""
    rewards = torch.tensor([0.3, 1.0, 0.0, 0.6], dtype=torch.float64)
    logits = torch.tensor([0.1, -0.4, 0.7, 0.2], dtype=torch.float64, requires_grad=True)
    p = logits.softmax(0)
    draws = list(product(range(4), repeat=k))
    best = torch.stack([p[list(draw)].prod() * rewards[list(draw)].max() for draw in draws]).sum()
    wanted, = torch.autograd.grad(best, logits)
    got = torch.zeros(4, dtype=torch.float64)
    for draw in draws:
        advantages = added_to_best(rewards[list(draw)], k)
        for i, action in enumerate(draw):
            score = torch.nn.functional.one_hot(torch.tensor(action), 4) - p.detach()
            got += p.detach()[list(draw)].prod() * advantages[i] * score
    torch.testing.assert_close(got, wanted)


def test_pass_k_values():
    values = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])
    assert not added_to_best(values, 8).any(), "two right answers: neither is missed among all eight"
    one = torch.tensor([1.0, 0, 0, 0])
    assert all(added_to_best(one, k).tolist() == [1, 0, 0, 0] for k in (2, 4, 0, 9)), "no k is above the group's size"
    two = torch.tensor([1.0, 1, 0, 0])
    torch.testing.assert_close(added_to_best(two, 2), torch.tensor([2 / 3, 2 / 3, 0, 0]))


def test_length_weights_of_opo_are_those_of_the_loss():
    exp = reference_batch()
    exp.loss_mask[2:4] = False  # the second response has one token left
    torch.testing.assert_close(ADVANTAGES.get("opo").fn(exp, CFG)[[0, 4]], torch.tensor([1 / 3, -2 / 3]))
    exp.loss_mask[4] = False
    assert not ADVANTAGES.get("opo").fn(exp, CFG).any(), "alone in the loss, the first response is its own baseline"


def test_gpg_scales_by_the_groups_that_teach():
    exp = reference_batch()
    plain = ADVANTAGES.get("dr_grpo").fn(exp, CFG)
    assert torch.equal(ADVANTAGES.get("gpg").fn(exp, CFG), 2 * plain)
    exp.scored = torch.tensor([True, True, True, False])
    assert torch.equal(ADVANTAGES.get("gpg").fn(exp, CFG), 1.5 * plain)


def test_gdpo_tells_apart_what_a_sum_hides():
    """Rewards (0, 1) and (1, 0) with weights 1 and 1: the same total, another rarity of the parts."""
    parts, one = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]]), torch.zeros(4).long()
    exp = rewarded([1.0, 1.0, 1.0, 0.0], group_ids=one, reward_parts=parts, part_weights=torch.ones(4, 2))
    got = ADVANTAGES.get("gdpo").fn(exp, CFG)
    assert got[0] > got[2] > 0
    lone = rewarded([1.0, 0.0, 0.0, 0.0], group_ids=one, reward_parts=parts[:, :1], part_weights=torch.ones(4, 1))
    single, grpo = ADVANTAGES.get("gdpo").fn(lone, CFG), ADVANTAGES.get("group_norm").fn(lone, CFG)
    scale = grpo[[0, 2, 5, 6]].std(correction=0)
    torch.testing.assert_close(single, grpo / scale, msg="one part is group_norm on another scale")


def test_maxrl_never_flips_a_sign():
    got = ADVANTAGES.get("maxrl").fn(rewarded([0.0, -1.0, 1.0, 0.25]), CFG)
    assert not got[:5].any(), "a group whose mean is negative"
    torch.testing.assert_close(got[5:7], torch.tensor([0.6, -0.6]))


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


def registered():
    functions = [ADVANTAGES.get(n).fn for n in ADVANTAGES]
    return functions + [POLICY_LOSSES.get(n).fn for n in POLICY_LOSSES] + [CORRECTIONS.get(n).fn for n in CORRECTIONS]


def test_each_algorithm_is_one_short_documented_function():
    folder = Path(suite.__file__).parent
    files = {p for name in ("advantages", "losses") for p in (folder / name).glob("*.py") if p.stem != "__init__"}
    found = {Path(fn.__code__.co_filename) for fn in registered()}
    assert found == files | {folder / "corrections.py"}, "each file registers an algorithm"
    for fn in registered():
        assert len(inspect.getsourcelines(fn)[0]) < 40, fn
        doc = fields_of(fn)
        assert re.match(r"none\b|.*https://(arxiv\.org/abs|doi\.org)/", doc["paper"], re.DOTALL), \
            f"{fn.__module__}: link the paper, or write: none, and where the algorithm is from"
        assert all(doc[key] for key in ("summary", "equation", "degenerate", "deviation")), fn.__module__


def test_the_table_names_every_algorithm():
    text = suite.table()
    for registry in (ADVANTAGES, POLICY_LOSSES, CORRECTIONS):
        for name in registry:
            assert f"`{name}`" in text
    lines = text.splitlines()
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {9}, "every row has every column"
    assert "`group_norm`, `grpo`" in text
    rows = {line.split("`")[1]: line for line in lines[2:]}
    assert " `--policy_loss`, `--eps_clip` `--eps_clip_high` `--cispo_absolute` `--loss_agg_mode` |" in rows["cispo"]
    assert " `--rollout_correction`, `--correction_low` `--correction_high` `--correction_veto` |" in rows["mis"]
    assert " `--rollout_correction` |" in rows["none"] and "`--advantage_estimator`, `--lambd` " in rows["gae"]
