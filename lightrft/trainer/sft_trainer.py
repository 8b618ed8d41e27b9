"""Supervised fine-tuning on the same packed batches, strategies and checkpoints as reinforcement learning."""
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightrft.config.sft_schema import SFTConfig
from lightrft.datasets.loader import PromptLoader
from lightrft.datasets.sft_dataset import SFTExample
from lightrft.models.loss import GPTLMLoss
from lightrft.ops.aggregate import Denominators
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.materialize import Builder
from lightrft.strategy.optimizer import OptimSpec
from lightrft.trainer.base_trainer import BaseTrainer
from lightrft.trainer.optimizer_step import OptimizerStep, schedule_of, step_metrics
from lightrft.trainer.replay_buffer import MicroBatchLimits, plan_mini_batch, take
from lightrft.trainer.run_log import RunLog
from lightrft.types import Experience
from lightrft.utils.timer import Timer


def pack_rows(rows: Sequence[SFTExample]) -> Experience:
    """Pack conversations into one Experience; the loss mask covers the tokens of the assistant."""
    lens = torch.tensor([0] + [len(row.token_ids) for row in rows])
    return Experience(token_ids=torch.tensor([token for row in rows for token in row.token_ids],
                                             dtype=torch.long), cu_seqlens=lens.cumsum(0).to(torch.int32),
                      loss_mask=torch.tensor([keep for row in rows for keep in row.loss_mask], dtype=torch.bool))


class SFTTrainer(BaseTrainer):
    """Trains on NLL per assistant token: ``SFTTrainer(config, strategy, actor, tokenizer, rows, eval_rows).fit()``."""

    def __init__(self, config: SFTConfig, strategy: StrategyBase, actor: nn.Module | Builder,
                 tokenizer: PreTrainedTokenizerBase, rows: Sequence[SFTExample], eval_rows: Sequence[SFTExample] = (),
                 timer: Timer | None = None) -> None:
        train, timer = config.train, timer or Timer()
        self.config, self.eval_rows = config, eval_rows
        self.loader = PromptLoader(rows, train.train_batch_size, config.data.shuffle, train.seed)
        total = train.max_steps or self.loader.steps(train.max_epochs)
        beta1, beta2 = train.adam_betas
        spec = OptimSpec(train.learning_rate, (beta1, beta2), train.l2, schedule_of(train, total))
        self.actor = strategy.prepare(actor, spec, config.strategy.fsdp_shard_size)
        self.optimizer_step, self.loss = OptimizerStep(train, strategy, timer), GPTLMLoss()
        super().__init__(config.checkpoint, strategy, {"actor": self.actor}, RunLog(config, strategy), tokenizer, timer,
                         total, train.eval_steps)

    def train_step(self) -> dict[str, float]:
        """Run one optimizer step on the next batch."""
        with self.timer("update_other"):
            exp = pack_rows(next(self.loader))
            tokens = exp.loss_mask.sum().item()
            result = self.optimizer_step.run(self.actor, partial(take, exp), self._plan(exp), tokens,
                                             lambda e: self.micro_batch_loss(e, tokens))
        return step_metrics("sft", [result]) | {"sft/tokens": exp.num_tokens, "sft/loss_tokens": tokens}

    def _plan(self, exp: Experience) -> list[list[int]]:
        limits = MicroBatchLimits(self.config.train.micro_train_batch_size,
                                  self.config.train.max_tokens_per_micro_batch)
        world = self.strategy.world_size
        return plan_mini_batch(list(range(exp.num_seqs)), exp.seq_lens.tolist(), world, limits)[self.strategy.rank]

    def micro_batch_loss(self, exp: Experience, tokens: float) -> Tensor:
        """Return this micro-batch's share of the loss; ``tokens`` counts the tokens in the loss of the whole batch."""
        logprobs, _ = self.actor.model(exp)
        return self.loss(logprobs, exp, Denominators(tokens, exp.num_seqs))[0]

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return ``eval/loss``: mean NLL per assistant token over all held-out rows."""
        if not self.eval_rows:
            return {}
        self.actor.model.eval()
        exp = pack_rows(self.eval_rows)
        tokens = exp.loss_mask.sum().item()
        losses = [
            self.micro_batch_loss(take(exp, part).to(self.strategy.device), tokens).double().cpu()
            for part in self._plan(exp)
        ]
        return {"eval/loss": self.strategy.all_reduce(torch.stack(losses).sum()).item()}

    def extra_state(self) -> dict[str, Any]:
        """Return sampler position and bad steps in a row."""
        return {"loader": self.loader.state_dict(), "bad_in_a_row": self.optimizer_step.bad_in_a_row}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`extra_state`."""
        self.loader.load_state_dict(state["loader"])
        self.optimizer_step.bad_in_a_row = state["bad_in_a_row"]
