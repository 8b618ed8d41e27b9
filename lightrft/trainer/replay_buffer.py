"""Plan that cuts a rollout batch into mini-batches (optimizer steps), ranks and micro-batches (forward passes).

Every rank holds the lengths of the whole rollout batch, so all ranks compute the same plan without communication. The
plan of mini-batches does not depend on the number of ranks.
"""
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from lightrft.ops.aggregate import Denominators
from lightrft.types import Experience


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
    """Limits on sequences (0: no limit) and tokens of one forward pass; a longer single sequence gets its own pass."""
    rows: int
    tokens: int

    def fit(self, part: list[int], lens: list[int]) -> bool:
        """Return True if the sequences ``part`` may share a forward pass."""
        if len(part) <= 1:
            return True
        return (not self.rows or len(part) <= self.rows) and sum(lens[i] for i in part) <= self.tokens

    def least(self, lens: list[int]) -> int:
        """Return a lower bound on the number of forward passes for sequences of these lengths."""
        return max(1, -(-sum(lens) // self.tokens), -(-len(lens) // self.rows) if self.rows else 1)


def _cut(lens: list[int], limits: MicroBatchLimits, parts: int) -> list[list[int]]:
    """Return the fewest balanced parts (at least ``parts``) that respect the limits."""
    while True:
        cut = karmarkar_karp(lens, parts)
        if all(limits.fit(part, lens) for part in cut):
            return cut
        parts += 1


def plan_mini_batch(samples: list[int], lens: list[int], world: int, limits: MicroBatchLimits) -> list[list[list[int]]]:
    """Return ``[rank][micro-batch] -> sample indices`` for one mini-batch.

    Tokens are balanced over ranks and within a rank, and every rank has the same number of micro-batches (some may be
    empty), because sharded forward passes are collectives.
    """
    shares = [[samples[i] for i in part] for part in karmarkar_karp([lens[s] for s in samples], world)]
    share_lens = [[lens[s] for s in share] for share in shares]
    cuts = [_cut(part, limits, limits.least(part)) for part in share_lens]
    while (count := max(map(len, cuts))) > min(map(len, cuts)):
        cuts = [cut if len(cut) == count else _cut(part, limits, count) for cut, part in zip(cuts, share_lens)]
    return [[[share[i] for i in part] for part in cut] for share, cut in zip(shares, cuts)]


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
    """One optimizer step: all its samples, and ``cut``, which makes micro-batches of samples for this rank."""
    samples: list[int]
    cut: Callable[[list[int]], list[list[int]]]

    @cached_property
    def micro_batches(self) -> list[list[int]]:
        """Micro-batches of all samples; planned at first use, because not every step needs them."""
        return self.cut(self.samples)

    def denominators(self, kept: torch.Tensor, norm: float, all_seqs: bool = False) -> Denominators:
        """Return the denominators of this optimizer step, equal on every rank; ``kept`` [B]: loss tokens per sample.

        With ``all_seqs`` samples without tokens in the loss are counted too.
        """
        counts = kept[self.samples]
        return Denominators(counts.sum().item(), ((counts > 0) | all_seqs).sum().item(), norm)

    def of(self, live: torch.Tensor) -> list[list[int]]:
        """Return micro-batches of the samples where ``live`` [B] is True; at least one, which may be empty."""
        samples = [sample for sample in self.samples if live[sample]]
        return self.cut(samples) if len(samples) < len(self.samples) else self.micro_batches


class ReplayBuffer:
    """Plans the passes over one rollout batch; the same on every rank.

    Args:
        seq_lens: tokens of every sequence of the global rollout batch.
        mini_batch_size: samples per optimizer step, over all ranks.
        limits: limits of one forward pass.
        seed: seed of the shuffles.
    """

    def __init__(self, seq_lens: torch.Tensor, mini_batch_size: int, limits: MicroBatchLimits, rank: int, world: int,
                 seed: str) -> None:
        self.lens = seq_lens.tolist()
        self.size, self.limits, self.rank, self.world, self.seed = mini_batch_size, limits, rank, world, seed
        self._epochs: dict[int, list[MiniBatch]] = {}

    def epoch(self, number: int) -> list[MiniBatch]:
        """Return the mini-batches of epoch ``number`` (the same ones in every call)."""
        if number not in self._epochs:
            groups = mini_batches(len(self.lens), self.size, f"{self.seed}/{number}")
            self._epochs[number] = [MiniBatch(samples, self.cut) for samples in groups]
        return self._epochs[number]

    def cut(self, samples: list[int]) -> list[list[int]]:
        """Return the micro-batches of this rank for ``samples``."""
        return plan_mini_batch(samples, self.lens, self.world, self.limits)[self.rank]
