"""Base classes of preference training: a policy with precomputed log-probs of a reference; pairs of two answers."""
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Generic

import torch
from torch import nn, Tensor
from transformers import PreTrainedTokenizerBase

from lightrft.config.offline_schema import PairConfig
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.preferences import Pair, PairDataset
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.materialize import Builder
from lightrft.trainer.frozen_model import check_inputs
from lightrft.trainer.offline.offline_trainer import LossBatch, OfflineTrainer, Row
from lightrft.trainer.offline.reference import CachedReference, LiveReference, NoReference, Reference
from lightrft.trainer.offline.reference_cache import ReferenceCache
from lightrft.trainer.offline.sft_trainer import pack_rows
from lightrft.types import Experience, MediaSource
from lightrft.utils.timer import Timer


class PreferenceTrainer(OfflineTrainer[Row], Generic[Row]):
    """Base of the trainers on preferences; its tree has a :class:`ReferenceModelConfig`."""

    def __init__(self, config: Any, strategy: StrategyBase, model: nn.Module | Builder,
                 tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], eval_rows: Sequence[Row] = (),
                 timer: Timer | None = None, media: MediaSource | None = None) -> None:
        if config.model.ref_pretrain is not None:
            check_inputs("ref_pretrain", config.model.ref_pretrain, str(config.model.pretrain), tokenizer, media)
        super().__init__(config, strategy, model, tokenizer, rows, eval_rows, timer, media)
        self.rows = rows
        self.reference = self._reference(media) if self.needs_reference else NoReference()

    @property
    def needs_reference(self) -> bool:
        """True if the loss reads log-probs of the reference."""
        return True

    def sequences(self, batch: LossBatch) -> Iterator[Experience]:
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
        if cfg.ref_cache_dir is None or self.strategy.plans:  # a plan makes no folder
            return live()
        cache = ReferenceCache(cfg.ref_cache_dir, cfg.ref_pretrain or cfg.pretrain, bool(cfg.bf16), self.strategy,
                               media.settings if media else "")
        return CachedReference(cache, live, self.strategy)


def pairs_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split values [B, ...] of the sequences of a micro-batch into those of the chosen and the rejected ones, [P, ...].

    The single sequence of a rank without pairs is in neither.
    """
    paired = values[:len(values) // 2 * 2]
    return paired[::2], paired[1::2]


def _prompt_lens(pair: Pair) -> list[int]:
    """Count the leading tokens that both sequences may share in a forward pass: those before the first one in a loss.

    With media it is all of each, because later tokens are text to the model.
    """
    answers = (pair.chosen, pair.rejected)
    if any(answer.media for answer in answers):
        return [len(answer.token_ids) for answer in answers]
    return [min(answer.loss_mask.index(True) for answer in answers)] * 2


class PairTrainer(OfflineTrainer[Pair]):
    """Packs pairs: sequence 2 i is the chosen one of pair i, 2 i + 1 the rejected one; the loss is a mean over pairs.

    ``labels`` (0.5 for a tie, else 1) of a batch have the number of the pair at both of its sequences.
    """

    @classmethod
    def read(cls, config: PairConfig, tokenizer: PreTrainedTokenizerBase, split: str,
             media: MediaStore | None) -> PairDataset:
        """Read pairs."""
        return PairDataset(config.data, tokenizer, split, media)

    def pack(self, rows: Sequence[Pair]) -> LossBatch:
        """Divide the loss by the number of pairs, and keep the sequences of each in one micro-batch."""
        exp = pack_rows([answer for pair in rows for answer in (pair.chosen, pair.rejected)])
        exp.prompt_lens = [length for pair in rows for length in _prompt_lens(pair)]
        exp.labels = torch.tensor([0.5 if pair.tie else 1.0 for pair in rows]).repeat_interleave(2)
        return LossBatch(exp, len(rows), "pairs", [i // 2 for i in range(exp.num_seqs)])
