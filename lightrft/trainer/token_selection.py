"""The tokens that a policy loss chooses from a whole mini-batch (``selects``), before its backward passes."""
from dataclasses import replace

import torch
from torch import Tensor

from lightrft.algorithms.base import POLICY_LOSSES
from lightrft.config.passes import bypasses
from lightrft.config.schema import Config
from lightrft.strategy.strategy_base import Prepared, StrategyBase
from lightrft.trainer.logprob_pass import run_passes
from lightrft.trainer.replay_buffer import MiniBatch
from lightrft.types import Experience


class TokenSelection:
    """Sets ``exp.selected``, by statistics over the mini-batch of all ranks; does nothing for a loss that chooses none.

    The result is the same on every rank and does not depend on the cut into micro-batches.
    """

    def __init__(self, config: Config, strategy: StrategyBase, actor: Prepared) -> None:
        self.config, self.strategy, self.actor = config, strategy, actor
        self.selects = POLICY_LOSSES.get(config.algorithm.policy_loss).selects

    def mark(self, exp: Experience, mini: MiniBatch, seed: int, fresh: bool) -> None:
        """Choose among the tokens of ``mini`` (a collective).

        Args:
            exp: the whole rollout batch.
            seed: of the choice, the same on every rank.
            fresh: the policy is still the one of the rollout, so that the trainer's old log-probs are the current ones.
        """
        if self.selects is None:
            return
        known = fresh and exp.old_logprobs is not None and not bypasses(self.config)
        logprobs = exp.old_logprobs if known else self._current(exp, mini)
        member = torch.zeros(exp.num_seqs, dtype=torch.bool)
        member[mini.samples] = True
        mask = exp.loss_mask & member.repeat_interleave(exp.seq_lens.long())
        exp.selected = self.selects(logprobs, replace(exp, loss_mask=mask), self.config.algorithm, seed)

    def _current(self, exp: Experience, mini: MiniBatch) -> Tensor:
        """Log-probs [T] of the policy now, 0 outside ``mini``."""
        model = self.actor.model
        model.eval()
        return run_passes(self.strategy, exp, mini.micro_batches,
                          lambda e: model(e, temperature=self.config.rollout.temperature)[0])
