"""Supervised fine-tuning on the same packed batches, strategies and checkpoints as reinforcement learning."""
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.config.sft_schema import SFTConfig
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.sft_dataset import Learning, SFTDataset, SFTExample
from lightrft.models.loss import GPTLMLoss
from lightrft.ops.aggregate import Denominators
from lightrft.trainer.offline.offline_trainer import Loss, LossBatch, OfflineTrainer
from lightrft.types import Experience
from lightrft.types.fields import flatten


def pack_rows(rows: Sequence[SFTExample]) -> Experience:
    """Pack conversations into one Experience; the loss mask covers the tokens of the assistant."""
    lens = [len(row.token_ids) for row in rows]  # no token is drawn: all are prompts
    exp = Experience.pack([row.token_ids for row in rows], [row.loss_mask for row in rows],
                          media=[row.media for row in rows], prompt_lens=lens)
    if any(row.weights for row in rows):
        exp.token_weights = flatten((row.weights or [1.0] * len(row.token_ids) for row in rows), torch.float32)
    return exp


class SFTTrainer(OfflineTrainer[SFTExample]):
    """Trains on NLL per assistant token; ``eval/loss`` is its mean over the held-out conversations."""
    nll = GPTLMLoss()

    @classmethod
    def read(cls, config: SFTConfig, tokenizer: PreTrainedTokenizerBase, split: str,
             media: MediaStore | None) -> SFTDataset:
        """Read conversations."""
        data = config.data
        return SFTDataset(data.as_data_config(), tokenizer, data.max_len, split, media, Learning.of(data))

    def pack(self, rows: Sequence[SFTExample]) -> LossBatch:
        """Divide the loss by the number of assistant tokens."""
        exp = pack_rows(rows)
        return LossBatch(exp, exp.loss_mask.sum().item(), "loss_tokens")

    def loss_of(self, exp: Experience, total: float) -> Loss:
        """Return the NLL of the assistant's tokens."""
        logprobs, _ = self.actor.model(exp)
        return self.nll(logprobs, exp, Denominators(total, exp.num_seqs))[0], {}
