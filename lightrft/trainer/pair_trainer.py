"""Base of the trainers on pairs of a better and a worse answer."""
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightrft.config.offline_schema import PairConfig
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.preferences import Pair, PairDataset
from lightrft.trainer.offline_trainer import Batch, OfflineTrainer
from lightrft.trainer.sft_trainer import pack_rows


def pairs_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Part values [B, ...] of the sequences of a micro-batch into those of the chosen and the rejected ones, [P, ...].

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

    ``margins`` and ``labels`` (0.5 for a tie, else 1) of a batch have the numbers of the pair at both of its sequences.
    """

    @classmethod
    def read(cls, config: PairConfig, tokenizer: PreTrainedTokenizerBase, split: str,
             media: MediaStore | None) -> Sequence[Pair]:
        """Read pairs."""
        return PairDataset(config.data, tokenizer, split, media)

    def pack(self, rows: Sequence[Pair]) -> Batch:
        """Divide the loss by the number of pairs, and keep the sequences of each in one micro-batch."""
        exp = pack_rows([answer for pair in rows for answer in (pair.chosen, pair.rejected)])
        exp.prompt_lens = [length for pair in rows for length in _prompt_lens(pair)]
        exp.margins = torch.tensor([pair.margin for pair in rows]).repeat_interleave(2)
        exp.labels = torch.tensor([0.5 if pair.tie else 1.0 for pair in rows]).repeat_interleave(2)
        return Batch(exp, len(rows), "pairs", [i // 2 for i in range(exp.num_seqs)])
