"""Log-probs of whole responses: of any model over a batch, and of the frozen reference, live or read from a cache."""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightrft.config.offline_schema import OfflineConfig
from lightrft.models.loader import load_actor
from lightrft.ops.segment import segment_sum
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.trainer.frozen_model import free_memory, FrozenModel
from lightrft.trainer.offline.reference_cache import ReferenceCache
from lightrft.trainer.batch_plan import select_micro_batch
from lightrft.types import Experience, MediaSource
from lightrft.utils.progress import phase

Parts = list[list[int]]  # micro-batches of this rank
Planner = Callable[[Experience], Parts]


def summed(logprobs: Tensor, exp: Experience) -> Tensor:
    """Sum log-probs [T] over the tokens in the loss, in float64: [B]."""
    return segment_sum(logprobs.double(), exp.cu_seqlens, exp.drawn)


@torch.no_grad()
def response_sums(strategy: StrategyBase, model: nn.Module, exp: Experience, parts: Parts) -> Tensor:
    """Compute log-probs by ``model``, summed over the tokens in the loss: float64 [B] on the CPU of every rank."""
    found = []
    for part in phase(parts, "log-probs", "micro-batch"):
        micro_batch = select_micro_batch(exp, part).to(strategy.device)
        found.append(summed(model(micro_batch)[0], micro_batch)[:len(part)])
    sums = torch.zeros(exp.num_seqs, dtype=torch.float64)
    sums[[index for part in parts for index in part]] = torch.cat(found).cpu()
    return strategy.sum_data_ranks(sums)


class Reference(Protocol):
    """Source of the log-probs of the reference model."""

    def sums(self, exp: Experience, parts: Parts) -> Tensor:
        """Return summed log-probs of the responses in ``exp``: float64 [B] on the CPU of every rank."""


class NoReference:
    """The reference of a loss that has none: 0 everywhere."""

    def sums(self, exp: Experience, parts: Parts) -> Tensor:
        """Return zeros."""
        return torch.zeros(exp.num_seqs, dtype=torch.float64)


class LiveReference:
    """A reference that computes at every batch: with LoRA the policy without its adapters, else a second model.

    Args:
        config: its model group is a :class:`~lightrft.config.preference_schema.ReferenceModelConfig`.
        actor: the policy.
        media: source of the pictures, videos and sounds of the rows.
    """

    def __init__(self, config: OfflineConfig, strategy: StrategyBase, actor: Prepared,
                 media: MediaSource | None) -> None:
        cfg: Any = config.model
        self.strategy, self.actor = strategy, actor
        self.frozen: FrozenModel | None = None
        if not cfg.lora_rank:
            build = partial(load_actor, cfg, path=cfg.ref_pretrain, train=False, deferred=True)
            self.frozen = FrozenModel(build, strategy, config.strategy.fsdp_shard_size, cfg.ref_offload)
            self.frozen.connect(media, config.data)

    def sums(self, exp: Experience, parts: Parts) -> Tensor:
        """Compute the log-probs of the reference, summed over each response; a collective."""
        with self._model() as model:
            return response_sums(self.strategy, model, exp, parts)

    @contextmanager
    def _model(self) -> Iterator[nn.Module]:
        """Context in which the reference is on the device."""
        if self.frozen is not None:
            with self.frozen.here() as model:
                yield model
            return
        actor: Any = self.actor.model
        with actor.adapter_disabled():
            yield actor


class CachedReference:
    """A reference whose log-probs are computed once, before training, and kept in files; then it is freed.

    Args:
        live: builds the reference, where a row is not in the cache.
    """

    def __init__(self, cache: ReferenceCache, live: Callable[[], LiveReference], strategy: StrategyBase) -> None:
        self.cache, self.live, self.strategy = cache, live, strategy

    def sums(self, exp: Experience, parts: Parts) -> Tensor:
        """Read the sums from the cache; no model computes."""
        return self.cache.read(exp)

    def fill(self, batches: Iterator[Experience], plan: Planner) -> None:
        """Compute the missing entries of ``batches``; a collective."""
        live: LiveReference | None = None
        for exp in batches:
            lacking = self.cache.lacking(exp)
            if lacking:
                live, part = live or self.live(), exp.select(lacking)
                self.cache.add(part, live.sums(part, plan(part)))
        if live is None:
            return
        del live
        free_memory(self.strategy.device)
        if self.strategy.is_main:
            self.cache.write()
        self.strategy.barrier()
