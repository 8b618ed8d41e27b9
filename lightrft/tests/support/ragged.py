"""Ragged multi-turn batches and rollouts for property tests, and changes that must not change a loss.

They have gaps, empty masks, one-token sequences and sequences without tokens.
"""
from dataclasses import replace

import torch
from hypothesis import HealthCheck, settings, strategies as st

from lightrft.types import Experience

PROFILE = settings(derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
SEEDS = st.integers(0, 10**6)
# per sample its group and which of its tokens the policy chose: turns with gaps, all masked, one token, no token
SAMPLES = st.lists(st.tuples(st.integers(0, 2), st.lists(st.booleans(), max_size=8)), min_size=1, max_size=7)
FIXED = [(0, [1, 1, 0, 0, 1, 1, 0]), (1, [0, 1]), (0, [0, 0, 0]), (0, [0, 1, 1, 1, 1, 1]), (1, [1, 1, 0, 1]), (2, [1]),
         (2, [0, 1, 1, 0, 1, 1, 1, 0])]  # yapf: disable


def batch(seed, max_len=9, max_seqs=6):
    """``(lens, cu_seqlens, mask [T], gen)``."""
    gen = torch.Generator().manual_seed(seed)
    seqs = int(torch.randint(1, max_seqs + 1, (), generator=gen))
    lens = torch.randint(0, max_len + 1, (seqs, ), generator=gen)
    cu = torch.cat([torch.zeros(1, dtype=torch.long), lens.cumsum(0)]).int()
    density = torch.tensor([0.0, 0.5, 1.0])[torch.randint(3, (seqs, ), generator=gen)]
    mask = torch.rand(int(cu[-1]), generator=gen) < torch.repeat_interleave(density, lens)
    return lens.tolist(), cu, mask, gen


def spans(cu):
    """(start, end) of each sequence."""
    return list(zip(cu[:-1].tolist(), cu[1:].tolist()))


def ours(registry):
    """The names of a registry that this package fills; other tests may add to it."""
    return [name for name in registry if registry.get(name).fn.__module__.startswith("lightrft.algorithms.")]


def rollout(samples, seed):
    """``(exp, new, entropy)`` in float64: every field that an estimator, a loss or a correction reads.

    ``exp.token_ids`` counts the tokens, so ``new[part.token_ids]`` belongs to any cut ``part`` of ``exp``.
    """
    gen = torch.Generator().manual_seed(seed)
    lens, total = torch.tensor([len(mask) for _, mask in samples]), sum(len(mask) for _, mask in samples)

    def normal(*size):
        return torch.randn(*size, generator=gen, dtype=torch.float64)

    def uniform(*size):
        return torch.rand(*size, generator=gen, dtype=torch.float64)

    old, groups = -2 * uniform(total) - 0.2, torch.tensor([group for group, _ in samples])
    exp = Experience(
        torch.arange(total), torch.cat([torch.zeros(1).long(), lens.cumsum(0)]).int(),
        torch.tensor([bool(kept) for _, mask in samples for kept in mask], dtype=torch.bool), groups,
        old_logprobs=old, rollout_logprobs=old + 0.6 * normal(total), ref_logprobs=old + 0.3 * normal(total),
        advantages=normal(total) * (uniform(total) > 0.1), values=normal(total), token_rewards=0.1 * normal(total),
        rewards=torch.randint(3, (len(samples), ), generator=gen).double() / 2, scored=uniform(len(samples)) < 0.8,
        reward_parts=torch.randint(3, (len(samples), 2), generator=gen).double() / 2,
        part_weights=uniform(len(samples), 2), baseline_rewards=uniform(3)[groups])  # yapf: disable
    return exp, (old + 0.5 * normal(total)).clamp_max(-0.01), uniform(total)


def over(exp, axis, change):
    """``exp`` with ``change`` applied to its float fields of ``axis``."""
    return exp._map(lambda each, value: change(value) if each.axis == axis and value.is_floating_point() else value)


def without_gaps(exp):
    """Only the tokens of the loss mask, each sequence packed tight."""
    kept = [exp.loss_mask[a:b].sum() for a, b in zip(exp.cu_seqlens[:-1], exp.cu_seqlens[1:])]
    cu = torch.tensor([0, *kept]).cumsum(0).int()
    pick = {"T": lambda value: value[exp.loss_mask], "cu": lambda value: cu}
    return exp._map(lambda each, value: pick.get(each.axis, lambda kept: kept)(value))


def with_all_masked(exp):
    """All-masked copies of the first and the last sample around the others."""
    edges = [exp.select([b]) for b in (0, exp.num_seqs - 1)]
    first, last = (replace(edge, loss_mask=torch.zeros_like(edge.loss_mask)) for edge in edges)
    return Experience.cat([first, exp, last])


def shuffled(count, seed):
    """A seeded permutation."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def random_cut(count, seed):
    """A seeded partition of the sequences in any order; a part may be empty."""
    order, gen = shuffled(count, seed), torch.Generator().manual_seed(seed)
    owner = torch.randint(4, (count, ), generator=gen).tolist()
    return [[b for b, part in zip(order, owner) if part == k] for k in range(4)]


def swapped_in_groups(exp, seed):
    """An order of the samples in which every group keeps its positions and its members permute."""
    order = list(range(exp.num_seqs))
    for group in exp.group_ids.unique():
        members = (exp.group_ids == group).nonzero().flatten().tolist()
        for position, which in zip(members, shuffled(len(members), seed)):
            order[position] = members[which]
    return order
