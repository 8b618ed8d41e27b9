"""Plan that cuts a rollout batch into mini-batches (optimizer steps), ranks and micro-batches (forward passes).

Every rank knows the lengths of the whole rollout batch, so all ranks compute the same plan without communication. The
plan of mini-batches does not depend on the number of ranks. Sequences that are *bound* (a pair, a group) are planned as
one unit: they land in one micro-batch, whatever its limits.
"""
import heapq
import random
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain

import torch

from lightrft.ops.aggregate import Denominators
from lightrft.types import Experience

Plan = list[list[list[int]]]  # [rank][micro-batch] -> sample indices


def karmarkar_karp(weights: list[int], count: int) -> list[list[int]]:
    """Split indices of ``weights`` into ``count`` lists of nearly equal sums (Karmarkar & Karp 1982, differencing).

    The result is deterministic and every list is sorted. Lists may be empty if there are fewer weights than lists.
    """
    if not weights or count == 1:
        return [list(range(len(weights))), *([] for _ in range(count - 1))]
    empty: list[int] = []
    # sums are negative: the order of tuples is then that of the lists, the largest first
    heap = [(-weight, order, [(-weight, [order]), *[(0, empty)] * (count - 1)]) for order, weight in enumerate(weights)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, left = heapq.heappop(heap)
        merged = [(a + b, i + j) for (a, i), (b, j) in zip(left, reversed(heap[0][2]))]
        merged.sort()
        heapq.heapreplace(heap, (merged[0][0] - merged[-1][0], order, merged))
    return [sorted(indices) for _, indices in heap[0][2]]


@dataclass(frozen=True)
class SharedWork:
    """Sequences of a batch that are cheaper in a shared forward pass.

    ``numbers`` [B]: sequences with the same number share work, because they have the same prompt, or the same media,
    for which a tower then runs once. ``prompts`` [B]: leading tokens that a pass computes once per number.
    """
    numbers: list[int]
    prompts: list[int]

    def saved(self, samples: Iterable[int]) -> int:
        """Count the tokens that one pass over ``samples`` need not compute."""
        samples = list(samples)
        first = {self.numbers[i]: i for i in reversed(samples)}
        return sum(self.prompts[i] for i in samples) - sum(self.prompts[i] for i in first.values())


@dataclass(frozen=True)
class MicroBatchLimits:
    """Limits on sequences (0: no limit) and tokens of one forward pass; a unit beyond them gets its own pass."""
    rows: int
    tokens: int

    def fit(self, units: list[list[int]], lens: list[int], shared: SharedWork | None = None) -> bool:
        """Return True if the sequences of all ``units`` may share a forward pass."""
        if len(units) <= 1:
            return True
        return (not self.rows or sum(map(len, units)) <= self.rows) and pass_tokens(units, lens, shared) <= self.tokens

    def least(self, units: list[list[int]], lens: list[int], shared: SharedWork | None = None) -> int:
        """Return a lower bound on the number of forward passes for the sequences of ``units``."""
        rows = sum(map(len, units))
        bound = max(-(-pass_tokens(units, lens, shared) // self.tokens), -(-rows // self.rows) if self.rows else 1)
        return max(1, min(bound, len(units)))  # a unit beyond the limits is not divided


def pass_tokens(units: Iterable[list[int]], lens: list[int], shared: SharedWork | None) -> int:
    """Count the tokens that a forward pass over ``units`` computes; a prompt that they share counts once."""
    samples = list(chain.from_iterable(units))
    return sum(map(lens.__getitem__, samples)) - (0 if shared is None else shared.saved(samples))


def bind(samples: list[int], bound: list[int] | None) -> list[list[int]]:
    """Return the units of ``samples``: those with the same number in ``bound`` [B] together; None: each on its own."""
    if bound is None:
        return [[sample] for sample in samples]
    units: dict[int, list[int]] = {}
    for sample in samples:
        units.setdefault(bound[sample], []).append(sample)
    return list(units.values())


def pass_cost(units: Iterable[list[int]], lens: list[int], shared: SharedWork | None, attention: float) -> int:
    """Estimate the time of a forward pass over ``units``, in tokens that see nothing; ``attention`` as in
    :func:`plan_mini_batch`."""
    units = list(units)
    pairs = sum(lens[i]**2 for i in chain.from_iterable(units)) if attention else 0
    return pass_tokens(units, lens, shared) + round(attention * pairs)


def _divide(units: list[list[int]], lens: list[int], shared: SharedWork | None, count: int,
            attention: float) -> list[list[list[int]]]:
    """Divide units into ``count`` lists of nearly equal cost."""
    if count == 1:
        return [units]
    weights = [pass_cost([unit], lens, shared, attention) for unit in units]
    return [[units[i] for i in share] for share in karmarkar_karp(weights, count)]


def _fill(units: list[list[int]], weights: list[int], rows: int, count: int) -> list[list[list[int]]]:
    """Divide units into ``count`` lists: the heaviest first, each to the lightest list with room among its ``rows``.

    0 rows: no limit. Where no list has room, one gets too many.
    """
    heap, lists, used = [(0, number) for number in range(count)], [list[int]() for _ in range(count)], [0] * count
    for index in sorted(range(len(units)), key=lambda unit: -weights[unit]):
        size, full = len(units[index]), []
        while rows and len(heap) > 1 and lists[heap[0][1]] and used[heap[0][1]] + size > rows:
            full.append(heapq.heappop(heap))
        weight, number = heap[0]
        lists[number].append(index)
        used[number] += size
        heapq.heapreplace(heap, (weight + weights[index], number))
        for entry in full:
            heapq.heappush(heap, entry)
    return [[units[index] for index in sorted(members)] for members in lists]


def _cut(units: list[list[int]], lens: list[int], shared: SharedWork | None, limits: MicroBatchLimits,
         count: int) -> list[list[list[int]]]:
    """Return balanced lists (at least ``count``) that respect the limits, as few as a short search finds.

    Counts are tried in growing steps, then between the last two: a batch may need hundreds more than the first one. A
    larger count that does not fit may hide a smaller one that does; 1 in 300 random batches got a part more.
    """
    weights = [pass_tokens([unit], lens, shared) for unit in units]
    cut = cache(partial(_fill, units, weights, limits.rows))

    def fits(count: int) -> bool:
        return all(limits.fit(part, lens, shared) for part in cut(count))

    step = 1
    while not fits(count + step - 1):
        step *= 2
    between = range(count + step // 2, count + step - 1)
    return cut(between.start + bisect_left(between, True, key=fits))


def join_shared(units: list[list[int]], shared: SharedWork | None, lens: list[int], limits: MicroBatchLimits,
                parts: int = 1) -> list[list[int]]:
    """Merge units that have ``shared`` work, up to the limits, and to an equal share of all tokens in each of
    ``parts``; None: nothing is merged."""
    if shared is None:
        return units
    limits = MicroBatchLimits(limits.rows, min(limits.tokens, -(-pass_tokens(units, lens, shared) // parts)))
    merged: list[list[int]] = []
    latest: dict[int, list[int]] = {}
    for unit in units:
        group = latest.get(shared.numbers[unit[0]])
        if group is not None and limits.fit([group, unit], lens, shared):
            group += unit
        else:
            latest[shared.numbers[unit[0]]] = group = [*unit]
            merged.append(group)
    return merged


def plan_mini_batch(samples: list[int], lens: list[int], world: int, limits: MicroBatchLimits,
                    bound: list[int] | None = None, shared: SharedWork | None = None, attention: float = 0.0) -> Plan:
    """Return ``[rank][micro-batch] -> sample indices`` for one mini-batch, with the cost balanced over ranks.

    Args:
        bound: a number per sequence of the batch; those with the same number share a micro-batch, whatever its limits.
        shared: what shares a micro-batch as far as its limits allow, unless the busiest rank then computes more.
        attention: a sequence of n tokens costs ``n + attention * n**2``; 0 balances tokens.
    """
    units = bind(samples, bound)
    merged = join_shared(units, shared, lens, limits, world)
    plan = _cut_shares(_divide(merged, lens, shared, world, attention), lens, limits, shared)
    if shared is None or not any(shared.prompts) or len(merged) == len(units):
        return plan
    apart = _cut_shares(_divide(units, lens, shared, world, attention), lens, limits, shared)
    return min(
        plan, apart,
        key=lambda each: max(sum(pass_cost([part], lens, shared, attention) for part in parts) for parts in each))


def rank_tokens(plan: Plan, lens: list[int], shared: SharedWork | None) -> list[int]:
    """Count the tokens that each rank computes in the forward passes of ``plan``."""
    return [sum(pass_tokens([part], lens, shared) for part in parts) for parts in plan]


def plan_shares(shares: list[list[int]], lens: list[int], limits: MicroBatchLimits,
                shared: SharedWork | None = None) -> Plan:
    """Plan :func:`plan_mini_batch` for samples that are divided over the ranks already."""
    return _cut_shares([join_shared(bind(share, None), shared, lens, limits) for share in shares], lens, limits, shared)


def _cut_shares(shares: list[list[list[int]]], lens: list[int], limits: MicroBatchLimits,
                shared: SharedWork | None) -> Plan:
    """Cut the units of each rank into micro-batches.

    Every rank has the same number of micro-batches (some may be empty), because sharded forward passes are collectives.
    """
    cuts = [_cut(share, lens, shared, limits, limits.least(share, lens, shared)) for share in shares]
    while (count := max(map(len, cuts))) > min(map(len, cuts)):
        cuts = [cut if len(cut) == count else _cut(share, lens, shared, limits, count)
                for cut, share in zip(cuts, shares)]  # yapf: disable
    return [[[sample for unit in part for sample in unit] for part in cut] for cut in cuts]


def mini_batches(num_samples: int, size: int, seed: str) -> list[list[int]]:
    """Cut a seeded permutation of the samples into mini-batches of ``size`` (the last one may be smaller)."""
    order = list(range(num_samples))
    random.Random(seed).shuffle(order)
    return [order[i:i + size] for i in range(0, num_samples, size)]


def select_micro_batch(exp: Experience, part: list[int]) -> Experience:
    """Return the sequences ``part``.

    An empty part becomes one sequence without tokens in the loss. Its forward and backward passes keep this rank in
    step with the others and add zero.
    """
    if part:
        return exp.select(part)
    dummy = exp.select([int(exp.seq_lens.argmin())])
    dummy.loss_mask = torch.zeros_like(dummy.loss_mask)
    dummy.weight_versions = torch.full_like(dummy.token_ids, -1)  # no drawn tokens: no rows
    return dummy


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: its samples in bound units, and ``cut``, which plans the micro-batches of all ranks."""
    units: list[list[int]]
    cut: Callable[[list[int]], Plan]
    rank: int

    @cached_property
    def samples(self) -> list[int]:
        """All samples."""
        return [sample for unit in self.units for sample in unit]

    @cached_property
    def plan(self) -> Plan:
        """Micro-batches of all samples, of every rank; planned at first use, because not every step needs them."""
        return self.cut(self.samples)

    @property
    def micro_batches(self) -> list[list[int]]:
        """Micro-batches of all samples, of this rank."""
        return self.plan[self.rank]

    def denominators(self, kept: torch.Tensor, norm: float, all_seqs: bool = False) -> Denominators:
        """Return the denominators of this optimizer step, equal on every rank; ``kept`` [B]: loss tokens per sample.

        With ``all_seqs`` samples without tokens in the loss are counted too.
        """
        counts = kept[self.samples]
        return Denominators(counts.sum().item(), ((counts > 0) | all_seqs).sum().item(), norm)

    def of(self, live: torch.Tensor) -> Plan:
        """Plan the units with a sample where ``live`` [B] is True; each rank gets a micro-batch, which may be empty."""
        alive = live.tolist()
        samples = [sample for unit in self.units if any(map(alive.__getitem__, unit)) for sample in unit]
        return self.cut(samples) if len(samples) < len(self.samples) else self.plan


class BatchPlan:
    """Plans the passes over one rollout batch; the same on every rank.

    Args:
        seq_lens: tokens of every sequence of the global rollout batch.
        mini_batch_size: samples per optimizer step, over all ranks; a bound unit is one.
        limits: limits of one forward pass.
        seed: seed of the shuffles.
        bound: a number per sequence; those with the same number stay together (:func:`plan_mini_batch`).
        shared: what stays together where limits and balance allow.
        attention: cost of attention, as in :func:`plan_mini_batch`.
    """

    def __init__(self, seq_lens: torch.Tensor, mini_batch_size: int, limits: MicroBatchLimits, rank: int, world: int,
                 seed: str, bound: list[int] | None = None, shared: SharedWork | None = None,
                 attention: float = 0.0) -> None:
        self.lens, self.bound, self.shared, self.attention = seq_lens.tolist(), bound, shared, attention
        self.size, self.limits, self.rank, self.world, self.seed = mini_batch_size, limits, rank, world, seed
        self._epochs: dict[int, list[MiniBatch]] = {}

    def epoch(self, number: int) -> list[MiniBatch]:
        """Return the mini-batches of epoch ``number`` (the same ones in every call)."""
        if number not in self._epochs:
            units = bind(list(range(len(self.lens))), self.bound)
            chosen = mini_batches(len(units), self.size, f"{self.seed}/{number}")
            # no method: mini-batches must not refer to their plan, or both wait for the garbage collector
            cut = partial(plan_mini_batch, lens=self.lens, world=self.world, limits=self.limits, bound=self.bound,
                          shared=self.shared, attention=self.attention)  # yapf: disable
            self._epochs[number] = [MiniBatch([units[i] for i in part], cut, self.rank) for part in chosen]
        return self._epochs[number]

    def tokens(self, plan: Plan) -> int:
        """Count the tokens that all ranks compute in the forward passes of ``plan``."""
        return sum(rank_tokens(plan, self.lens, self.shared))

    def owned(self) -> list[list[int]]:
        """Return the samples that each rank owns, ascending: those that it trains in the first epoch."""
        if self.world == 1:  # no plan is needed to know it
            return [list(range(len(self.lens)))]
        return gathered([mini.plan for mini in self.epoch(0)], self.world)


def gathered(plans: Iterable[Plan], world: int) -> list[list[int]]:
    """Return the samples of each rank in all ``plans``, ascending."""
    of_ranks: list[set[int]] = [set() for _ in range(world)]
    for plan in plans:
        for samples, micro_batches in zip(of_ranks, plan):
            samples.update(*micro_batches)
    return [sorted(samples) for samples in of_ranks]
