"""Whole groups of samples that can be selected, joined and renumbered, and the counts of their generation."""
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightrft.strategy.base import StrategyBase
from lightrft.trainer.scores import ScoredSample
from lightrft.types import Batch
from lightrft.utils.logging import get_logger

_CARRIED = {
    "rows": "without --dynamic_sampling the %d samples carried over in the checkpoint are dropped",
    "open": "without --oversample the %d unfinished groups in the checkpoint are dropped",
}


def warn_dropped(state: dict[str, Any], *kinds: str) -> None:
    """Warn that "rows" or "open" groups, which another source left in a checkpoint's ``state``, are dropped."""
    for kind in kinds:
        if state.get(kind):
            get_logger().warning(_CARRIED[kind], len(state[kind]))


@dataclass
class ScoredGroups:
    """Whole groups of this rank, one after another: packed samples and their scores."""
    exp: Batch
    scored: list[ScoredSample]

    @property
    def numbers(self) -> list[int]:
        """Number of each group: of the draw of its prompt."""
        return self.exp.group_ids.unique_consecutive().tolist()

    def keep(self, samples: Tensor) -> "ScoredGroups":
        """Return the groups of the samples where ``samples`` [B] is True."""
        index = samples.nonzero()[:, 0].tolist()
        return ScoredGroups(self.exp.select(index), [self.scored[i] for i in index])

    def split(self, numbers: list[int]) -> tuple["ScoredGroups", "ScoredGroups"]:
        """Return the groups ``numbers`` that are here, and the others."""
        first = torch.isin(self.exp.group_ids, torch.tensor(numbers, dtype=torch.long))
        return self.keep(first), self.keep(~first)

    def __add__(self, other: "ScoredGroups") -> "ScoredGroups":
        if not (self.scored and other.scored):
            return self if self.scored else other
        return ScoredGroups(Batch.cat([self.exp, other.exp]), self.scored + other.scored)

    def renumbered(self, order: list[int]) -> "ScoredGroups":
        """Return the same groups, numbered by their index in ``order``, which becomes the order of the batch."""
        places = {number: place for place, number in enumerate(order)}
        group_ids = [places[number] for number in self.exp.group_ids.tolist()]
        scored = [replace(each, group_id=group_id) for each, group_id in zip(self.scored, group_ids)]
        return ScoredGroups(replace(self.exp, group_ids=torch.tensor(group_ids, dtype=torch.long)), scored)

    @classmethod
    def none(cls) -> "ScoredGroups":
        """Return an empty set of groups."""
        return cls(Batch.of([]), [])


@dataclass
class Tally:
    """Counts and sums of everything that was generated for one step, on all ranks."""
    carried: int  # groups carried over from earlier steps
    rounds: int = 0
    first: int = 0  # groups of the first round
    drawn: int = 0
    accepted: int = 0
    sums: Tensor = field(default_factory=lambda: torch.zeros(6, dtype=torch.float64))
    causes: Counter[str] = field(default_factory=Counter)  # causes of unscored samples

    def add(self, drawn: int, accepted: int, exp: Batch, causes: Counter[str], strategy: StrategyBase) -> None:
        """Add one round; ``exp`` holds this rank's samples of it."""
        self.rounds, self.drawn, self.accepted = self.rounds + 1, self.drawn + drawn, self.accepted + accepted
        self.first = self.first or drawn
        logprobs = exp.rollout_logprobs[exp.loss_mask].double()
        own = [exp.loss_mask.sum(), logprobs.sum(), exp.num_seqs, exp.truncated.sum(), exp.rewards.sum(),
               exp.scored.sum()]  # yapf: disable
        self.sums = self.sums + strategy.all_reduce(torch.tensor(own, dtype=torch.float64))
        self.causes += causes

    def metrics(self, seconds: float) -> dict[str, float]:
        """Return metrics of all generated groups, rejected ones included; ``seconds``: time of generation."""
        tokens, logprobs, samples, truncated, rewards, scored = self.sums.tolist()
        counts = {
            "group/refilled": self.drawn - self.first,
            "group/rejected": self.drawn - self.accepted,
            "rollout/rounds": self.rounds,
            "rollout/carried": self.carried,
            "rollout/tokens": tokens,
            "rollout/tokens_per_s": tokens / max(seconds, 1e-9),
            "reward/generated_scored": int(scored),
        }
        if not self.rounds:
            return counts
        unscored = {f"reward/generated_unscored/{cause}": count for cause, count in sorted(self.causes.items())}
        return counts | unscored | {
            "rollout/entropy_estimate": -logprobs / max(tokens, 1),
            "rollout/generated_truncated_frac": truncated / samples,
            "reward/generated_mean": rewards / max(scored, 1),
        }
