"""Supervised fine-tuning on the same packed batches, strategies and checkpoints as reinforcement learning."""
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightrft.config.rm_schema import GRMConfig
from lightrft.config.sft_schema import SFTConfig
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.sft_dataset import Learning, SFTDataset, SFTExample
from lightrft.models.loss import GPTLMLoss
from lightrft.ops.aggregate import Denominators
from lightrft.strategy.base import StrategyBase
from lightrft.trainer.load_balance import LoadBalance
from lightrft.trainer.metric_sums import MetricSums
from lightrft.trainer.offline.offline_trainer import Batch, Loss, OfflineTrainer
from lightrft.trainer.replay_buffer import take
from lightrft.types import Experience


def pack_rows(rows: Sequence[SFTExample]) -> Experience:
    """Pack conversations into one Experience; the loss mask covers the tokens of the assistant."""
    lens = [len(row.token_ids) for row in rows]  # no token is drawn: all are prompts
    return Experience.pack([row.token_ids for row in rows], [row.loss_mask for row in rows],
                           media=[row.media for row in rows], prompt_lens=lens)


class SFTTrainer(OfflineTrainer[SFTExample]):
    """Trains on NLL per assistant token; ``eval/loss`` is its mean over the held-out conversations.

    With ``aux_loss_coef`` the load-balancing loss of the experts is added in training.
    """
    nll = GPTLMLoss()

    def __init__(self, config: SFTConfig | GRMConfig, strategy: StrategyBase, *args: Any, **options: Any) -> None:
        super().__init__(config, strategy, *args, **options)
        coef = config.train.aux_loss_coef
        self.balance = LoadBalance(coef, strategy, self.actor) if coef else None

    @classmethod
    def read(cls, config: SFTConfig, tokenizer: PreTrainedTokenizerBase, split: str,
             media: MediaStore | None) -> SFTDataset:
        """Read conversations."""
        data = config.data
        learning = Learning(data.output_key, data.multiturn, data.pretrain_mode)
        return SFTDataset(data.as_data_config(), tokenizer, data.max_len, split, media, learning)

    def pack(self, rows: Sequence[SFTExample]) -> Batch:
        """Divide the loss by the number of assistant tokens."""
        exp = pack_rows(rows)
        return Batch(exp, exp.loss_mask.sum().item(), "loss_tokens")

    def fill(self, batch: Batch, parts: list[list[int]]) -> None:
        """Implement :meth:`OfflineTrainer.fill`: measure the load of the experts."""
        if self.balance and torch.is_grad_enabled():
            self.balance.measure(partial(take, batch.exp), parts)

    def _counted(self, exp: Experience, total: float, sums: MetricSums) -> Tensor:
        loss = super()._counted(exp, total, sums)
        if self.balance is None or not torch.is_grad_enabled():
            return loss
        return loss + self.balance.share(sums, "aux_loss")

    def loss_of(self, exp: Experience, total: float) -> Loss:
        """Return the NLL of the assistant's tokens."""
        logprobs, _ = self.actor.model(exp)
        return self.nll(logprobs, exp, Denominators(total, exp.num_seqs))[0], {}
