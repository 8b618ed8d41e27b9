"""Training on unpaired good and bad answers: KTO."""
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.config.preference_schema import KTOConfig
from lightrft.datasets.judged import Judged, JudgedDataset
from lightrft.datasets.media_store import MediaStore
from lightrft.ops.preference import kto, kto_kl
from lightrft.trainer.offline.offline_trainer import Loss, LossBatch
from lightrft.trainer.offline.preference_trainer import PreferenceTrainer
from lightrft.trainer.offline.reference import response_sums, summed
from lightrft.trainer.offline.sft_trainer import pack_rows
from lightrft.types import Experience
from lightrft.utils.tensors import upload


@dataclass(frozen=True)
class JudgedBatch(LossBatch):
    """Rows with the mismatched sequences of its rows, from which the KL is estimated."""
    mismatched: Experience | None = None


class KTOTrainer(PreferenceTrainer[Judged]):
    """Trains on the loss of KTO, averaged over the answers of the batch of all ranks."""
    config: KTOConfig
    kl = 0.0  # of the current batch

    @classmethod
    def read(cls, config: KTOConfig, tokenizer: PreTrainedTokenizerBase, split: str,
             media: MediaStore | None) -> JudgedDataset:
        """Read judged answers."""
        return JudgedDataset(config.data, tokenizer, split, media)

    def pack(self, rows: Sequence[Judged]) -> JudgedBatch:
        """Pack the answers and, separately, their prompts with other answers."""
        exp = pack_rows([row.answer for row in rows])
        exp.labels = torch.tensor([float(row.desirable) for row in rows])
        return JudgedBatch(exp, len(rows), "answers", mismatched=pack_rows([row.mismatched for row in rows]))

    def sequences(self, batch: LossBatch) -> Iterator[Experience]:
        """Yield the answers and the mismatched sequences."""
        assert isinstance(batch, JudgedBatch) and batch.mismatched is not None, "a batch of this trainer has them"
        yield from (batch.exp, batch.mismatched)

    def fill(self, batch: LossBatch, parts: list[list[int]]) -> None:
        """Add log-probs of the reference, and estimate the KL of the whole batch, without gradient."""
        exp, others = self.sequences(batch)
        with self.timer("ref"):
            exp.ref_sums, passes = self.reference.sums(exp, parts), self.plan_of(others)
            reference = self.reference.sums(others, passes)
        self.actor.model.eval()
        self.kl = kto_kl(response_sums(self.strategy, self.actor.model, others, passes), reference).item()

    def loss_of(self, exp: Experience, total: float) -> Loss:
        """Return the loss of the answers, and their implicit rewards."""
        cfg, good = self.config.preference, exp.host.labels.bool()
        count = exp.num_seqs if exp.host.drawn.any() else 0  # the sequence of a rank without answers is none
        sums = summed(self.actor.model(exp)[0], exp)[:count]
        ref, desirable = exp.ref_sums[:count], exp.labels[:count].bool()
        losses = kto(sums, ref, desirable, self.kl, cfg.beta, cfg.desirable_loss_weight, cfg.undesirable_loss_weight)
        rewards, sides = cfg.beta * (sums - ref).detach(), {"chosen": good[:count], "rejected": ~good[:count]}
        metrics = {"kl": torch.full_like(rewards, self.kl)}
        for name, side in sides.items():
            index = upload(side.nonzero()[:, 0], rewards.device)
            metrics |= {f"rewards/{name}": rewards[index], f"logps/{name}": sums[index]}
        return (losses.sum() / total).float(), metrics
