"""Language-modelling loss on rows of other data, alongside the loss of a policy in each of its optimizer steps.

Paper: Ouyang et al. 2022 (InstructGPT, "PPO-ptx"), https://arxiv.org/abs/2203.02155, equation 2: the objective of the
policy plus ``gamma * E[log pi(x)]`` over the pretraining distribution.
"""
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightrft.config.schema import Config
from lightrft.datasets.loader import check_batch, PromptLoader
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.sft_dataset import Learning, PretrainingDataset, SFTExample
from lightrft.models.config_json import context_of
from lightrft.models.loss import GPTLMLoss
from lightrft.models.packed_model import PackedModel
from lightrft.ops.aggregate import Denominators
from lightrft.preflight.planned import limit_rows
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.trainer.metric_sums import MetricSums
from lightrft.trainer.optimizer_step import Passes
from lightrft.trainer.batch_plan import MicroBatchLimits, plan_mini_batch, select_micro_batch
from lightrft.trainer.offline.sft_trainer import pack_rows
from lightrft.types import Experience

METRIC = "policy/ptx_loss"  # nats per token, before the weight


def read_pretraining(config: Config, tokenizer: PreTrainedTokenizerBase,
                     media: MediaStore | None) -> Sequence[SFTExample]:
    """Read the rows of ``--pretrain_data``; none without that option.

    Raises:
        UserError: rows cannot be used, or are fewer than one batch.
    """
    ptx = config.ptx
    if not ptx.pretrain_data:
        return []
    limit_rows(config, {}, context_of(str(config.model.pretrain)))
    rows = PretrainingDataset(ptx.as_data_config(config.data), tokenizer, config.pretrain_len, media=media,
                              learning=Learning(whole=ptx.pretrain_mode))
    check_batch(config.pretraining_rows, len(rows), "ptx_batch_size")  # before any model is loaded
    return rows


@dataclass(frozen=True)
class PretrainingPasses(Passes):
    """Passes over one batch of rows, of ``tokens`` tokens on all ranks."""
    tokens: int = 0


class PretrainingLoss:
    """Draws one batch of rows per optimizer step of the policy: ``ptx_coef`` times their mean NLL per token.

    The mean is over the tokens in the loss of the whole batch, of all ranks and micro-batches; log-probs are those of
    temperature 1. Every rank draws the same rows; ``loader`` holds the position in them.

    Raises:
        UserError: there are fewer rows than one batch has.
    """
    nll = GPTLMLoss()

    def __init__(self, config: Config, strategy: StrategyBase, rows: Sequence[SFTExample]) -> None:
        train, self.coef, self.strategy = config.train, config.ptx.ptx_coef, strategy
        self.loader = PromptLoader(rows, config.pretraining_rows, config.data.shuffle, train.seed, "ptx_batch_size")
        self.limits = MicroBatchLimits(train.micro_train_batch_size, train.max_tokens_per_micro_batch)

    def draw(self, actor: Prepared, sums: MetricSums) -> PretrainingPasses:
        """Return the passes over the next batch; their loss adds :data:`METRIC` to ``sums``."""
        exp = pack_rows(next(self.loader))
        data = self.strategy.mesh.data
        plan = plan_mini_batch(list(range(exp.num_seqs)), exp.lens, data.size, self.limits,
                               attention=cast(PackedModel, actor.model).attention)
        total = Denominators(exp.loss_mask.sum().item(), exp.num_seqs)
        return PretrainingPasses(partial(select_micro_batch, exp), plan[data.index],
                                 lambda part: self._loss(actor, part, total, sums), exp.num_tokens)

    def _loss(self, actor: Prepared, part: Experience, total: Denominators, sums: MetricSums) -> Tensor:
        """Return the weighted share of a micro-batch in the loss."""
        loss, metrics = self.nll(actor.model(part)[0], part, total)
        sums.add_tokens({METRIC: metrics["loss"]}, part.loss_mask)
        return self.coef * loss
