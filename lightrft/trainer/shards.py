"""The rollout batch, divided over ranks: sequences move to the rank that trains them, and no rank holds all of them.

A :class:`~lightrft.trainer.batch_plan.BatchPlan` says which rank trains what in which pass. It is computed from lengths
alone, in trainers of fixed rows too, where nothing moves. This file holds the sequences, and moves them as plans say.
"""
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from lightrft.ops.segment import response_lengths, segment_mean, segment_sum, Ranks
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.mesh import Share
from lightrft.trainer.batch_plan import select_micro_batch, SharedWork
from lightrft.types import Batch, NUMBERS
from lightrft.utils.play import Shown

Samples = list[list[int]]  # indices in the batch of the sequences of each rank


class BatchRanks(Ranks):
    """Ranks of a batch of ``size`` sequences; this one holds those at ``index`` (int64 [b], ascending).

    ``share``: that of this rank in the batch, which counts once if other ranks have the same; default: that of the
    responses it generates.
    """

    def __init__(self, strategy: StrategyBase, index: Tensor, size: int, share: Share | None = None) -> None:
        self.strategy, self.index, self.size = strategy, index, size
        self.share = share or strategy.mesh.engines

    def own(self, values: Tensor) -> Tensor:
        """Take the values at ``index``."""
        return values[self.index]

    def gather(self, values: Tensor) -> Tensor:
        """Implement :meth:`Ranks.gather` for values [b, ...], by one sum of vectors [B, ...]."""
        whole = values.new_zeros(self.size, *values.shape[1:]).index_copy(0, self.index, values)
        return self.total(whole).to(values.dtype)

    def total(self, value: Tensor) -> Tensor:
        """Sum over the ranks; of those that have one share, the first counts."""
        return self.strategy.all_reduce(torch.zeros_like(value) if self.share.replica else value)

    def columns(self, values: dict[Any, Tensor]) -> dict[Any, Tensor]:
        """Implement :meth:`Ranks.columns`, by one gather of objects."""
        whole: dict[Any, Tensor] = {}
        for index, columns in self.strategy.all_gather_object((self.index, values)):
            for key, value in columns.items():
                column = whole.setdefault(key,
                                          value.new_full((self.size, ), torch.nan if value.is_floating_point() else 0))
                column[index] = value
        return whole

    def stack(self, values: Tensor) -> Tensor:
        """Sum rows of which each share writes its own."""
        rows = values.new_zeros(self.share.size, *values.shape)
        rows[self.share.index] = values
        return self.total(rows)


class Shards:
    """Sequences of a rollout batch of all ranks. Construction and every method but :meth:`micro_batch` are collectives.

    Every rank knows the length and the owner of each sequence, so that all ranks make the same plan. Host memory per
    rank is that of its own sequences, and of the copies that it fetches for an epoch. The ranks of one data rank hold
    the same sequences once these have moved; the first of them is the owner.

    Args:
        exp: sequences that this rank has, each the sample ``indices`` of the group ``group_ids`` of the batch. Its
            ``loss_mask`` still covers every generated token.
        show: makes a picture of an environment known to this rank, and returns what keeps it known; None: there are
            none.

    ``numbers`` [b]: positions in the batch of the sequences of ``exp``, in their order. The batch is ordered by group
    and index; groups may differ in size. ``samples`` holds the fields of :class:`Batch` that responses have, [B] by
    name, and numbers by ("extra", name).

    Of all samples, int64 [B]: ``lens`` are tokens with the prompt, ``response_lens`` without it, ``drawn`` without what
    an environment appended; ``media`` is 1 where the prompt has any. Float64 [B]: ``surprisals`` are sums of -log p
    over the drawn tokens, as the engine reported it. After :meth:`update` also: ``kept`` tokens in the loss, how many
    of them have an advantage (``live``), and their mean ``advantages``.
    """

    def __init__(self, strategy: StrategyBase, exp: Batch, show: Callable[[Shown], Shown] | None = None) -> None:
        self.strategy, self.show = strategy, show
        fields, facts = _fields_of_responses(exp), _facts(exp)
        tables = strategy.all_gather_object(fields | facts | {"owner": torch.full((exp.num_seqs, ), strategy.rank)})
        columns = {name: torch.cat([table[name] for table in tables]) for name in tables[0]}
        order = columns["indices"].argsort(stable=True)
        order = order[columns["group_ids"][order].argsort(stable=True)]
        self.numbers = order.argsort()[columns["owner"] == strategy.rank]
        columns = {name: column[order] for name, column in columns.items()}
        self.samples = {name: columns[name] for name in fields}
        self.size, self.owner = len(order), columns["owner"].tolist()
        self.owner_of = list(range(strategy.world_size))  # of what each rank holds
        self.group_ids, self.truncated = columns["group_ids"], columns["truncated"]
        (self.lens, self.media, self._prompts, self._prompt_lens, self.response_lens, self.drawn,
         self.surprisals) = (columns[name] for name in facts)
        exp = replace(exp, sample_ids=self.numbers)
        if (self.numbers.diff() < 0).any():
            exp = exp.select(self.numbers.argsort().tolist())
        self.exp, self.held = exp, exp
        self.ranks = BatchRanks(strategy, exp.sample_ids, self.size)
        self._slots = self._slots_of(exp)

    @property
    def first_of_groups(self) -> list[int]:
        """Position in the batch of the first sample of every group."""
        return [0, *(self.group_ids.diff().nonzero()[:, 0] + 1).tolist()] if self.size else []

    @staticmethod
    def _slots_of(exp: Batch) -> dict[int, int]:
        return {number: slot for slot, number in enumerate(exp.sample_ids.tolist())}

    def shared_work(self, share_prompts: bool) -> SharedWork | None:
        """Return the work that samples of one group can share in a pass: with ``share_prompts`` an equal prompt, else
        the features of its media. None: nothing."""
        if share_prompts:
            return SharedWork((self.group_ids << 32 | self._prompts).tolist(), self._prompt_lens.tolist())
        alone = -1 - torch.arange(self.size)
        numbers = torch.where(self.media > 0, self.group_ids, alone)
        return SharedWork(numbers.tolist(), [0] * self.size) if self.media.any() else None

    def move(self, owned: Samples) -> None:
        """Move every sequence to the data rank that is to own it; ``owned[d]`` are those of data rank d, ascending,
        each on one only."""
        mesh = self.strategy.mesh
        if self.strategy.world_size == 1:
            return
        self.exp = self._received(self._of_ranks(owned))
        self.owner_of = [mesh.first_of(other) for other in self.owner_of]
        for other, numbers in zip(self.owner_of, self._of_ranks(owned)):
            for number in numbers:
                self.owner[number] = other
        self.ranks = BatchRanks(self.strategy, self.exp.sample_ids, self.size, mesh.data)
        self.fetch(owned)

    def _of_ranks(self, samples: Samples) -> Samples:
        """Return the samples of each rank, from those of each data rank."""
        return [samples[self.strategy.mesh.data_rank(rank)] for rank in range(self.strategy.world_size)]

    def fetch(self, wanted: Samples) -> None:
        """Fetch copies of the sequences ``wanted[d]`` that data rank d does not own; earlier copies are dropped.

        A rank without any sequence gets the shortest one: its empty micro-batches need a dummy
        (:func:`select_micro_batch`).
        """
        if not self.size:
            return
        shortest = int(self.lens.argmin())
        owners = {*self.owner}
        copies = [sorted(number for number in {*want} if self.owner[number] != owner) or [shortest] *
                  (owner not in owners) for owner, want in zip(self.owner_of, self._of_ranks(wanted))]  # yapf: disable
        self.held = self.exp
        if any(copies):
            self._slots = self._slots_of(self.exp)
            self.held = Batch.cat([self.exp, self._received(copies)])
        self._slots = self._slots_of(self.held)

    def _received(self, wanted: Samples) -> Batch:
        """Return the sequences ``wanted[rank]`` of this rank, in ascending order, each from its owner."""
        rank = self.strategy.rank
        sent = [self.exp.select([self._slots[number] for number in want if self.owner[number] == rank])
                for want in wanted]  # yapf: disable
        received = self._joined(self.strategy.exchange(sent))
        return received.select(received.sample_ids.argsort().tolist())

    def _joined(self, batches: list[Batch]) -> Batch:
        """Join sequences that have come from other ranks; their pictures of environments are known here from now on."""
        joined = Batch.cat(batches)
        if self.show is not None and joined.shown is not None:
            joined.shown = [tuple(map(self.show, pictures)) for pictures in joined.shown]
        return joined

    def slots(self, numbers: list[int]) -> list[int]:
        """Return the positions in ``held`` of the sequences ``numbers`` of the batch."""
        return [self._slots[number] for number in numbers]

    def micro_batch(self, part: list[int]) -> Batch:
        """Return the sequences ``part`` of the batch, which this rank holds; an empty part is a dummy."""
        return select_micro_batch(self.held, self.slots(part))

    def collect(self, numbers: list[int]) -> Batch:
        """Return the sequences ``numbers``, in that order, on every rank. For a few: their memory is not divided."""
        slots = [self._slots[number] for number in numbers if self.owner[number] == self.strategy.rank]
        gathered = self._joined(self.strategy.all_gather_object(self.exp.select(slots)))
        positions = self._slots_of(gathered)
        return gathered.select([positions[number] for number in numbers])

    def batch(self) -> Batch:
        """Return the batch as advantages read it: tokens of this rank, samples of all; rewards are set later."""
        tokens = {name: vars(self.exp)[name] for name in self.exp.declared() if name not in ("rewards", "scored")}
        samples = {name: column for name, column in self.samples.items() if name in tokens}
        extra = {name: self.samples.get(("extra", name), value) for name, value in self.exp.extra.items()}
        return Batch(**tokens | samples | {"sample_ids": torch.arange(self.size)}, extra=extra, ranks=self.ranks)

    def update(self, batch: Batch) -> None:
        """Take over the fields of :meth:`batch`, with the samples of this rank only."""
        self.exp = self.held = batch.local()
        self._slots = self._slots_of(self.exp)
        self.count()

    def count(self) -> None:
        """Count the tokens in the loss of every sample of the batch, in ``kept``, ``live`` and ``advantages``."""
        exp, mask, cu = self.exp, self.exp.loss_mask, self.exp.cu_seqlens
        counts = [segment_sum(mask, cu), segment_sum(mask & (exp.advantages != 0), cu),
                  segment_mean(exp.advantages, cu, mask)]  # yapf: disable
        table = self.ranks.gather(torch.stack([column.double() for column in counts], 1))
        self.kept, self.live, self.advantages = table.unbind(1)


def _fields_of_responses(exp: Batch) -> dict[Any, Tensor]:
    """Return the values [b] that the responses of ``exp`` have: fields by name, numbers by ("extra", name)."""
    declared = exp.declared()
    fields = {name: vars(exp)[name] for name, field in declared.items() if field.axis == "B" and field.source}
    return fields | {("extra", name): values for name, values in exp.extra.items() if NUMBERS.get(name).axis == "B"}


def _facts(exp: Batch) -> dict[str, Tensor]:
    """Return what every rank has to know of the sequences of ``exp``, [b] each."""
    mask, cu = exp.loss_mask, exp.cu_seqlens
    has_media = [bool(keys) for keys in exp.media or [()] * exp.num_seqs]
    return {
        "lens": exp.seq_lens.long(), "media": torch.tensor(has_media, dtype=torch.long),
        "prompts": torch.tensor(_prompts(exp), dtype=torch.long),
        "prompt_lens": torch.tensor(exp.prompt_lens or [0] * exp.num_seqs, dtype=torch.long),
        "response_lens": response_lengths(mask, cu), "drawn": segment_sum(mask, cu),
        "surprisals": -segment_sum(exp.rollout_logprobs.double(), cu, mask)
    }  # yapf: disable


def _prompts(exp: Batch) -> list[int]:
    """Return a checksum of 32 bits of the prompt of each sequence, which is that of equal prompts on every rank.

    Responses of one group may have begun otherwise: environments open them.
    """
    ids, starts = exp.token_ids.numpy(), exp.cu_seqlens.tolist()
    return [crc32(ids[start:start + prompt.stop].tobytes(), crc32(" ".join(prompt.keys).encode()))
            for start, (prompt, *_) in zip(starts, exp.spans)]  # yapf: disable
