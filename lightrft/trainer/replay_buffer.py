"""Plan that cuts a rollout batch into mini-batches (optimizer steps), ranks and micro-batches (forward passes).

Every rank knows the lengths of the whole rollout batch, so all ranks compute the same plan without communication. The
plan of mini-batches does not depend on the number of ranks. Sequences that are *bound* (a pair, a group) are planned as
one unit: they land in one micro-batch, whatever its limits.
"""
import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from lightrft.ops.aggregate import Denominators
from lightrft.types import Experience

Plan = list[list[list[int]]]  # [rank][micro-batch] -> sample indices


def karmarkar_karp(weights: list[int], parts: int) -> list[list[int]]:
    """Split indices of ``weights`` into ``parts`` lists of nearly equal sums (Karmarkar & Karp 1982, differencing).

    The result is deterministic and every list is sorted. Lists may be empty if there are fewer weights than parts.
    """
    if not weights or parts == 1:
        return [list(range(len(weights))), *([] for _ in range(parts - 1))]
    heap = []
    for order, weight in enumerate(weights):
        sums = [(weight, [order])] + [(0, []) for _ in range(parts - 1)]
        heap.append((-weight, order, sums))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        merged = [(a + b, i + j) for (a, i), (b, j) in zip(left, reversed(right))]
        merged.sort(key=lambda entry: (-entry[0], entry[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], order, merged))
    return [sorted(indices) for _, indices in heap[0][2]]


@dataclass(frozen=True)
class MicroBatchLimits:
    """Limits on sequences (0: no limit) and tokens of one forward pass; a unit beyond them gets its own pass."""
    rows: int
    tokens: int

    def fit(self, units: list[list[int]], lens: list[int]) -> bool:
        """Return True if the sequences of all ``units`` may share a forward pass."""
        if len(units) <= 1:
            return True
        return (not self.rows or sum(map(len, units)) <= self.rows) and _tokens(units, lens) <= self.tokens

    def least(self, units: list[list[int]], lens: list[int]) -> int:
        """Return a lower bound on the number of forward passes for the sequences of ``units``."""
        rows = sum(map(len, units))
        bound = max(-(-_tokens(units, lens) // self.tokens), -(-rows // self.rows) if self.rows else 1)
        return max(1, min(bound, len(units)))  # a unit beyond the limits is not divided


def _tokens(units: list[list[int]], lens: list[int]) -> int:
    return sum(lens[i] for unit in units for i in unit)


def bind(samples: list[int], bound: list[int] | None) -> list[list[int]]:
    """Return the units of ``samples``: those with the same number in ``bound`` [B] together; None: each on its own."""
    if bound is None:
        return [[sample] for sample in samples]
    units: dict[int, list[int]] = {}
    for sample in samples:
        units.setdefault(bound[sample], []).append(sample)
    return list(units.values())


def _divide(units: list[list[int]], lens: list[int], parts: int) -> list[list[list[int]]]:
    """Divide units into ``parts`` lists of nearly equally many tokens."""
    return [[units[i] for i in part] for part in karmarkar_karp([_tokens([unit], lens) for unit in units], parts)]


def _cut(units: list[list[int]], lens: list[int], limits: MicroBatchLimits, parts: int) -> list[list[list[int]]]:
    """Return the fewest balanced parts (at least ``parts``) that respect the limits."""
    while True:
        cut = _divide(units, lens, parts)
        if all(limits.fit(part, lens) for part in cut):
            return cut
        parts += 1


def plan_mini_batch(samples: list[int], lens: list[int], world: int, limits: MicroBatchLimits,
                    bound: list[int] | None = None) -> Plan:
    """Return ``[rank][micro-batch] -> sample indices`` for one mini-batch, with tokens balanced over ranks.

    Args:
        bound: a number per sequence of the batch; those with the same number share a micro-batch, whatever its limits.
    """
    return _cut_shares(_divide(bind(samples, bound), lens, world), lens, limits)


def plan_shares(shares: list[list[int]], lens: list[int], limits: MicroBatchLimits) -> Plan:
    """Plan :func:`plan_mini_batch` for samples that are divided over the ranks already."""
    return _cut_shares([bind(share, None) for share in shares], lens, limits)


def _cut_shares(shares: list[list[list[int]]], lens: list[int], limits: MicroBatchLimits) -> Plan:
    """Cut the units of each rank into micro-batches.

    Every rank has the same number of micro-batches (some may be empty), because sharded forward passes are collectives.
    """
    cuts = [_cut(share, lens, limits, limits.least(share, lens)) for share in shares]
    while (count := max(map(len, cuts))) > min(map(len, cuts)):
        cuts = [cut if len(cut) == count else _cut(share, lens, limits, count) for cut, share in zip(cuts, shares)]
    return [[[sample for unit in part for sample in unit] for part in cut] for cut in cuts]


def mini_batches(num_samples: int, size: int, seed: str) -> list[list[int]]:
    """Cut a seeded permutation of the samples into mini-batches of ``size`` (the last one may be smaller)."""
    order = list(range(num_samples))
    random.Random(seed).shuffle(order)
    return [order[i:i + size] for i in range(0, num_samples, size)]


def take(exp: Experience, part: list[int]) -> Experience:
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
        samples = [sample for unit in self.units if any(alive[i] for i in unit) for sample in unit]
        return self.cut(samples) if len(samples) < len(self.samples) else self.plan


class ReplayBuffer:
    """Plans the passes over one rollout batch; the same on every rank.

    Args:
        seq_lens: tokens of every sequence of the global rollout batch.
        mini_batch_size: samples per optimizer step, over all ranks; a bound unit is one.
        limits: limits of one forward pass.
        seed: seed of the shuffles.
        bound: a number per sequence; those with the same number stay together (:func:`plan_mini_batch`).
    """

    def __init__(self, seq_lens: torch.Tensor, mini_batch_size: int, limits: MicroBatchLimits, rank: int, world: int,
                 seed: str, bound: list[int] | None = None) -> None:
        self.lens, self.bound = seq_lens.tolist(), bound
        self.size, self.limits, self.rank, self.world, self.seed = mini_batch_size, limits, rank, world, seed
        self._epochs: dict[int, list[MiniBatch]] = {}

    def epoch(self, number: int) -> list[MiniBatch]:
        """Return the mini-batches of epoch ``number`` (the same ones in every call)."""
        if number not in self._epochs:
            units = bind(list(range(len(self.lens))), self.bound)
            chosen = mini_batches(len(units), self.size, f"{self.seed}/{number}")
            self._epochs[number] = [MiniBatch([units[i] for i in part], self._cut, self.rank) for part in chosen]
        return self._epochs[number]

    def homes(self) -> list[list[int]]:
        """Return the samples of each rank in the first epoch, ascending: a sequence lives where it is trained first."""
        if self.world == 1:  # no plan is needed to know it
            return [list(range(len(self.lens)))]
        return gathered([mini.plan for mini in self.epoch(0)], self.world)

    def _cut(self, samples: list[int]) -> Plan:
        return plan_mini_batch(samples, self.lens, self.world, self.limits, self.bound)


def gathered(plans: Iterable[Plan], world: int) -> list[list[int]]:
    """Return the samples of each rank in all ``plans``, ascending."""
    found: list[set[int]] = [set() for _ in range(world)]
    for plan in plans:
        for samples, parts in zip(found, plan):
            samples.update(*parts)
    return [sorted(samples) for samples in found]
