"""Teacher of a student on fixed data: a live model, or its most probable tokens from files."""
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from lightrft.config.sft_schema import KDConfig
from lightrft.ops.divergence import top_tokens
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.materialize import Builder
from lightrft.trainer.frozen_model import free_memory, FrozenModel
from lightrft.trainer.offline.reference import Planner
from lightrft.trainer.batch_plan import select_micro_batch
from lightrft.trainer.offline.teacher_cache import TeacherCache
from lightrft.types import Experience, MediaSource
from lightrft.utils.progress import phase
from lightrft.utils.tensors import upload


class Teacher(Protocol):
    """Source of the teacher's distributions."""

    def taught(self, exp: Experience) -> tuple[Tensor, ...]:
        """Return log-probs [N, V] at ``exp.actions``; of a sparse teacher those of its ``k`` likeliest tokens and, in
        the last column, of all others together [N, k + 1], and the ids of these tokens [N, k]."""


class LiveTeacher:
    """A teacher that computes on every micro-batch.

    Args:
        build: loads it.
        vocab: tokens that count.
        media: source of the pictures, videos and sounds of the rows.
    """

    def __init__(self, config: KDConfig, strategy: StrategyBase, build: Builder, vocab: int,
                 media: MediaSource | None) -> None:
        self.top_k, self.vocab = config.teacher.kd_top_k, vocab
        self.frozen = FrozenModel(build, strategy, config.strategy.fsdp_shard_size, config.teacher.teacher_offload)
        self.frozen.connect(media, config.data)

    @torch.no_grad()
    def taught(self, exp: Experience) -> tuple[Tensor, ...]:
        """Compute the teacher's log-probs, or its most likely tokens with theirs."""

        def read(logprobs: Tensor, part: slice) -> tuple[Tensor, ...]:
            return top_tokens(logprobs, self.top_k)[::-1] if self.top_k else (logprobs, )

        with self.frozen.here() as model:
            return model(exp, read=read, vocab=self.vocab)


class CachedTeacher:
    """A sparse teacher whose tokens are computed once, before training, and kept in files; then it is freed.

    Args:
        live: builds the teacher, where a row is not in the cache.
    """

    def __init__(self, cache: TeacherCache, live: Callable[[], LiveTeacher], strategy: StrategyBase) -> None:
        self.cache, self.live, self.strategy = cache, live, strategy

    def taught(self, exp: Experience) -> tuple[Tensor, ...]:
        """Read the tokens and log-probs from the cache; no model computes."""
        return tuple(upload(values, self.strategy.device) for values in self.cache.read(exp.host))

    def fill(self, batches: Iterator[Experience], plan: Planner) -> None:
        """Compute the missing entries of ``batches``; a collective."""
        live: LiveTeacher | None = None
        for exp in batches:
            if lacking := self.cache.lacking(exp):
                live, part = live or self.live(), exp.select(lacking)
                self._compute(live, part, plan(part))
        if live is None:
            return
        del live
        free_memory(self.strategy.device)
        self.cache.write()
        self.cache.open()

    def _compute(self, live: LiveTeacher, exp: Experience, parts: list[list[int]]) -> None:
        for part in phase(parts, "teacher", "micro-batch"):
            micro_batch = select_micro_batch(exp, part)
            logprobs, ids = (values.cpu() for values in live.taught(micro_batch.to(self.strategy.device)))
            if part:
                self.cache.add(micro_batch, (logprobs, ids))
