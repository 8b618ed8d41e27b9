"""Core of the trainers on fixed data: same batches, strategies and checkpoints as reinforcement learning, no
rollout."""
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightrft.config.offline_schema import OfflineConfig
from lightrft.datasets.loader import PromptLoader
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.rows import place_of
from lightrft.models.loader import load_actor
from lightrft.models.packed_model import PackedModel
from lightrft.models.vocabulary import check_rows
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.materialize import Builder
from lightrft.trainer.base_trainer import BaseTrainer
from lightrft.trainer.load_balance import LoadBalance
from lightrft.trainer.metric_sums import MetricSums
from lightrft.trainer.model_media import connect_media, feature_cache
from lightrft.trainer.optimizer_step import none_applied, optim_spec, OptimizerStep, step_metrics
from lightrft.trainer.batch_plan import MicroBatchLimits, plan_mini_batch, select_micro_batch
from lightrft.trainer.run_log import RunLog
from lightrft.types import Experience, MediaSource
from lightrft.utils.logging import get_logger
from lightrft.utils.timer import Timer


class Named(Protocol):
    """A row, which its ``uid`` names."""

    @property
    def uid(self) -> str:
        """Number of the data set and of the row in it."""


Row = TypeVar("Row", bound=Named)
Loss = tuple[Tensor, dict[str, Tensor]]
HELD_OUT = 1024  # rows that are packed and evaluated at once


@dataclass(frozen=True)
class LossBatch:
    """Rows of one optimizer step, or all held-out rows, packed; equal on every rank.

    Attributes:
        exp: their sequences.
        total: number of ``unit`` ("loss_tokens", "pairs") by which the loss is divided, of all ranks together.
        bound: a number per sequence; those with the same number (a pair) share a micro-batch. None: each is alone.
    """
    exp: Experience
    total: float
    unit: str
    bound: list[int] | None = None


class OfflineTrainer(BaseTrainer, Generic[Row]):
    """Trains a model on batches of rows: ``Trainer(config, strategy, model, tokenizer, rows, eval_rows).fit()``.

    A trainer is a subclass with ``read`` (rows of a split), ``load`` (the model), ``pack`` (rows -> :class:`LossBatch`)
    and ``loss_of`` (micro-batch -> its share of the loss, and metrics); ``fill`` is for numbers that the whole batch
    needs first. Its options are a subclass of :class:`OfflineConfig`; its command runs :func:`train_rows`.
    """

    def __init__(self, config: OfflineConfig, strategy: StrategyBase, model: nn.Module | Builder,
                 tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], eval_rows: Sequence[Row] = (),
                 timer: Timer | None = None, media: MediaSource | None = None) -> None:
        train, timer = config.train, timer or Timer()
        self.config, self.eval_rows = config, eval_rows
        self.loader = PromptLoader(rows, train.train_batch_size, config.data.shuffle, train.seed, config.BATCH)
        total = train.max_steps or self._steps(train.max_epochs)
        for split, some in (("train", rows), ("eval", eval_rows)):
            check_rows(model, str(config.model.pretrain), tokenizer, self._tokens(some, split))
        spec = optim_spec(train, train.learning_rate, total)
        self.actor = strategy.prepare(model, spec, config.strategy.fsdp_shard_size)
        connect_media(self.actor.model, media, strategy, feature_cache(config.data))
        coef = train.aux_loss_coef
        self.balance = LoadBalance(coef, strategy, self.actor) if coef else None
        self.optimizer_step = OptimizerStep(train, strategy, timer)
        super().__init__(config.checkpoint, strategy, {"actor": self.actor}, RunLog(config, strategy), tokenizer, timer,
                         total, train.eval_steps)

    def _steps(self, epochs: int) -> int:
        """Return the full batches in ``epochs`` passes; log how many rows they leave over at the end."""
        loader, steps = self.loader, self.loader.steps(epochs)
        if left := loader.draws(epochs) - steps * loader.batch_size:
            get_logger().info(f"{left} of {loader.draws(1)} {self.config.ROWS} are left over in the last epoch, which "
                              f"ends with its last full batch of {loader.batch_size}; with a --train_batch_size that "
                              f"divides {loader.draws(epochs)} none is")
        return steps

    @classmethod
    @abstractmethod
    def read(cls, config: Any, tokenizer: PreTrainedTokenizerBase, split: str,
             media: MediaStore | None) -> Sequence[Row]:
        """Read the rows of a split, "train" or "eval", of a ``config`` of the trainer's own tree."""

    @classmethod
    def load(cls, config: Any) -> nn.Module:
        """Load the model to train, a policy by default; its weights may stay in their files."""
        return load_actor(config.model, deferred=True)

    @classmethod
    def describe(cls, model: nn.Module, tokenizer: PreTrainedTokenizerBase, state: Mapping[str, Any]) -> None:
        """Add entries to the config of ``model`` for its exports; the base class adds none.

        Args:
            state: of :meth:`extra_state`, or a part of it.
        """

    @abstractmethod
    def pack(self, rows: Sequence[Row]) -> LossBatch:
        """Pack rows on the CPU."""

    @abstractmethod
    def loss_of(self, exp: Experience, total: float) -> Loss:
        """Return a micro-batch's share of the loss, and values [n] by metric, of which the mean over the whole batch is
        reported.

        Args:
            exp: bound sequences are neighbours, in the order of the batch. A rank without sequences gets a single one
                without tokens in the loss; its loss is 0, and depends on the model.
            total: that of the :class:`LossBatch`.
        """

    def fill(self, batch: LossBatch, parts: list[list[int]]) -> None:
        """Compute the statistics of the whole batch that the loss needs, without gradients; ``parts``: micro-batches of
        this rank."""

    def train_step(self) -> dict[str, float]:
        """Run one optimizer step on the next batch."""
        name, sums = self.config.METRICS[0], MetricSums()
        with self.timer("update_other"):
            batch, parts = self._planned(next(self.loader))
            micro_batch = partial(select_micro_batch, batch.exp)
            if self.balance:
                self.balance.measure(micro_batch, parts)
            result = self.optimizer_step.run(self.actor, micro_batch, parts, batch.total,
                                             lambda exp: self._balanced(exp, batch.total, sums))
            counts = {f"{name}/tokens": batch.exp.num_tokens, f"{name}/{batch.unit}": batch.total}
            return step_metrics(name, [result]) | counts | self._means(name, sums)

    def evaluate(self) -> dict[str, float]:
        """Return ``eval/loss`` and the means of the other metrics over all held-out rows."""
        return self.measure(self.eval_rows) if self.eval_rows else {}

    @torch.no_grad()
    def measure(self, rows: Sequence[Row]) -> dict[str, float]:
        """Return ``eval/loss`` and the means of the other metrics over ``rows``."""
        sums, loss, total = MetricSums(), torch.zeros((), dtype=torch.float64), 0.0
        self.actor.model.eval()
        for equal in _equal_parts(rows):
            batch, parts = self._planned(equal)
            for part in parts:
                micro_batch = select_micro_batch(batch.exp, part).to(self.strategy.device)
                loss += self._counted(micro_batch, batch.total, sums).double().cpu() * batch.total
            total += batch.total
        return {"eval/loss": self.strategy.sum_data_ranks(loss).item() / total} | self._means("eval", sums)

    def batches(self) -> Iterator[LossBatch]:
        """Yield all training rows and then all held-out ones, each once."""
        size = self.config.train.train_batch_size
        for rows in (self.loader.dataset, self.eval_rows):
            yield from (self.pack(rows[at:at + size]) for at in range(0, len(rows), size))

    def _tokens(self, rows: Sequence[Row], split: str) -> Iterator[tuple[str, list[int]]]:
        """Yield the name of each row and the tokens of its sequences."""
        for row in rows:
            yield place_of(row.uid, split), self.pack([row]).exp.token_ids.tolist()

    def _planned(self, rows: Sequence[Row]) -> tuple[LossBatch, list[list[int]]]:
        """Return the batch of ``rows``, filled, and the micro-batches of this rank."""
        batch = self.pack(rows)
        parts = self.plan_of(batch.exp, batch.bound)
        self.fill(batch, parts)
        return batch, parts

    def plan_of(self, exp: Experience, bound: list[int] | None = None) -> list[list[int]]:
        """Return the micro-batches of this rank for ``exp``; ``bound`` as in :class:`LossBatch`."""
        train = self.config.train
        limits = MicroBatchLimits(train.micro_train_batch_size * self.config.SEQUENCES,
                                  train.max_tokens_per_micro_batch)
        data = self.strategy.mesh.data
        plan = plan_mini_batch(list(range(exp.num_seqs)), exp.seq_lens.tolist(), data.size, limits, bound,
                               attention=cast(PackedModel, self.actor.model).attention)
        return plan[data.index]

    def _balanced(self, exp: Experience, total: float, sums: MetricSums) -> Tensor:
        """Return the loss of a micro-batch in training, with ``aux_loss_coef`` that of the load of the experts too."""
        loss = self._counted(exp, total, sums)
        return loss if self.balance is None else loss + self.balance.share(sums, "aux_loss")

    def _counted(self, exp: Experience, total: float, sums: MetricSums) -> Tensor:
        """Return the loss of a micro-batch, and add its metrics to ``sums``."""
        loss, metrics = self.loss_of(exp, total)
        for name, values in metrics.items():
            sums.add_tokens({name: values}, torch.ones_like(values, dtype=torch.bool))
        return loss

    def _means(self, name: str, sums: MetricSums) -> dict[str, float]:
        """Average the metrics over all ranks; metrics without an item in the batch are left out."""
        if not sums.keys():
            return {}
        sums.reduce(self.strategy)
        return {f"{name}/{key}": sums.mean(key) for key in sums.counted()}

    def _finish(self) -> None:
        """Extend :meth:`BaseTrainer._finish`: a run that has applied no step is an error."""
        if 0 < self.optimizer_step.bad_in_a_row == self.step >= self.total_steps:
            raise none_applied(self.step)
        super()._finish()

    def extra_state(self) -> dict[str, Any]:
        """Return sampler position and bad steps in a row."""
        return {"loader": self.loader.state_dict(), "bad_in_a_row": self.optimizer_step.bad_in_a_row}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`extra_state`."""
        self.loader.load_state_dict(state["loader"])
        self.optimizer_step.bad_in_a_row = state["bad_in_a_row"]


def _equal_parts(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Cut rows into equal parts of at most ``HELD_OUT``; statistics of a batch (the KL of KTO) are those of a part."""
    count = -(-len(rows) // HELD_OUT)
    for i in range(count):
        yield rows[len(rows) * i // count:len(rows) * (i + 1) // count]
