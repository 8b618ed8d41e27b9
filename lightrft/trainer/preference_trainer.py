"""Base of the trainers on preferences: the policy, and a reference whose log-probs are ready before a batch."""
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Generic

from torch import nn
from transformers import PreTrainedTokenizerBase

from lightrft.models.loader import load_actor
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.materialize import Builder
from lightrft.trainer.offline_trainer import Batch, OfflineTrainer, Row
from lightrft.trainer.reference import CachedReference, LiveReference, NoReference, Reference
from lightrft.trainer.reference_cache import ReferenceCache
from lightrft.types import Experience, MediaSource
from lightrft.utils.timer import Timer


class PreferenceTrainer(OfflineTrainer[Row], Generic[Row]):
    """Base of the trainers on preferences; its tree has a :class:`ReferenceModelConfig`."""

    def __init__(self, config: Any, strategy: StrategyBase, model: nn.Module | Builder,
                 tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], eval_rows: Sequence[Row] = (),
                 timer: Timer | None = None, media: MediaSource | None = None) -> None:
        super().__init__(config, strategy, model, tokenizer, rows, eval_rows, timer, media)
        self.rows = rows
        self.reference = self._reference(media) if self.needs_reference else NoReference()

    @classmethod
    def load(cls, config: Any) -> nn.Module:
        """Load the policy."""
        return load_actor(config.model, deferred=True)

    @property
    def needs_reference(self) -> bool:
        """True if the loss reads log-probs of the reference."""
        return True

    def sequences(self, batch: Batch) -> Iterator[Experience]:
        """Yield all sequences of which the reference's log-probs are needed."""
        yield batch.exp

    def before_loop(self, fresh: bool) -> None:
        """Fill the cache of the reference."""
        if isinstance(self.reference, CachedReference):
            with self.timer("ref"):
                self.reference.fill((exp for batch in self.batches() for exp in self.sequences(batch)), self.plan_of)

    def _reference(self, media: MediaSource | None) -> Reference:
        cfg: Any = self.config.model
        live = partial(LiveReference, self.config, self.strategy, self.actor, media)
        if cfg.ref_cache_dir is None:
            return live()
        cache = ReferenceCache(cfg.ref_cache_dir, cfg.ref_pretrain or cfg.pretrain, bool(cfg.bf16), self.strategy)
        return CachedReference(cache, live, self.strategy)
