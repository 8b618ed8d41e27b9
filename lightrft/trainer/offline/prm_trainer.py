"""Training of process reward models on solutions with a label for every step."""
from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn, Tensor
from transformers import PreTrainedTokenizerBase

from lightrft.config.rm_schema import PRMConfig
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.steps import StepDataset, StepExample
from lightrft.models.loader import load_process_reward_model
from lightrft.models.tokenizer import load_tokenizer
from lightrft.ops.preference import step_loss
from lightrft.ops.segment import seq_ids
from lightrft.trainer.offline.offline_trainer import Loss, LossBatch, OfflineTrainer
from lightrft.trainer.offline.sft_trainer import pack_rows
from lightrft.types import Experience


class PRMTrainer(OfflineTrainer[StepExample]):
    """Trains on the cross-entropy of the judgements, averaged over the steps of the batch of all ranks."""
    config: PRMConfig

    @classmethod
    def read(cls, config: PRMConfig, tokenizer: PreTrainedTokenizerBase, split: str,
             media: MediaStore | None) -> StepDataset:
        """Read labelled solutions."""
        return StepDataset(config.data, tokenizer, split, media)

    @classmethod
    def load(cls, config: PRMConfig) -> nn.Module:
        """Load the model, which then knows the format of steps."""
        form = config.data.form
        classes = form.reward_ids(load_tokenizer(str(config.model.pretrain)))
        return load_process_reward_model(config.model, form, classes, deferred=True)

    def pack(self, rows: Sequence[StepExample]) -> LossBatch:
        """Divide the loss by the number of steps."""
        exp = pack_rows(rows)
        labels = torch.tensor([*chain.from_iterable(row.labels for row in rows)])
        exp.step_labels = torch.zeros(exp.num_tokens).masked_scatter(exp.loss_mask, labels)
        return LossBatch(exp, len(labels), "steps")

    def loss_of(self, exp: Experience, total: float) -> Loss:
        """Return the cross-entropy of the judgements, and how many of them are right."""
        labels, graded = exp.step_labels[exp.actions], self.config.data.form.graded

        def read(logprobs: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            return step_loss(logprobs, labels[part], graded), logprobs.argmax(-1)

        losses, chosen = self.actor.model(exp, read=read)
        return losses.sum() / total, self._metrics_of(exp, labels, chosen)

    def _metrics_of(self, exp: Experience, labels: Tensor, chosen: Tensor) -> dict[str, Tensor]:
        """Return ``accuracy`` of steps and ``accuracy_solution``, where all steps are judged right; with reward tokens
        also ``base_rate``, the share of good steps, and ``accuracy_first_error``, of solutions with a bad step those
        whose first one is found. Steps with a label of 1/2 are left out."""
        form = self.config.data.form
        truth = (labels < 0.5).long() if form.graded else labels.long()
        known = labels != 0.5 if form.graded else torch.ones_like(labels, dtype=torch.bool)
        wrong = known & (chosen != truth)
        steps, errors = (_per_solution(exp, each) for each in (known, wrong))
        found = {"accuracy": (~wrong)[known].float(), "accuracy_solution": (errors == 0)[steps > 0].float()}
        if form.reward_tokens:
            first, judged = (_first(exp, known & (each > 0)) for each in (truth, chosen))
            found |= {"base_rate": (truth == 0)[known].float(),
                      "accuracy_first_error": (first == judged)[first < len(labels)].float()}  # yapf: disable
        return found


def _solutions(exp: Experience) -> Tensor:
    """Return the index of the solution of each step, int64 [N]."""
    return seq_ids(exp.cu_seqlens, exp.num_tokens)[exp.actions]


def _per_solution(exp: Experience, steps: Tensor) -> Tensor:
    """Count the ``steps`` (bool [N]) of each solution, [B]."""
    return torch.zeros(exp.num_seqs, device=steps.device).index_add(0, _solutions(exp), steps.float())


def _first(exp: Experience, steps: Tensor) -> Tensor:
    """Return the index of the first of the ``steps`` (bool [N]) of each solution, [B]; N where there is none."""
    index = torch.where(steps, torch.arange(len(steps), device=steps.device), len(steps))
    return index.new_full((exp.num_seqs, ), len(steps)).scatter_reduce(0, _solutions(exp), index, "amin")
