"""Whole groups of samples that can be selected, joined and renumbered, and the counts of their generation."""
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightrft.trainer.samples import Rows, pack_samples
from lightrft.types import Experience
from lightrft.utils.logging import get_logger

_CARRIED = {
    "rows": "without --dynamic_sampling the %d samples carried over in the checkpoint are dropped",
    "open": "without --oversample the %d groups under way in the checkpoint are dropped",
}


def tell_dropped(state: dict[str, Any], *kinds: str) -> None:
    """Warn that "rows" or "open" groups, which another source left in a checkpoint's ``state``, are dropped."""
    for kind in kinds:
        if state.get(kind):
            get_logger().warning(_CARRIED[kind], len(state[kind]))


@dataclass
class Groups:
    """Whole groups of all ranks, one after another: packed samples and their rows."""
    exp: Experience
    rows: Rows
    size: int  # samples per group

    def __len__(self) -> int:
        return len(self.rows) // self.size

    def keep(self, samples: Tensor) -> "Groups":
        """Return the groups of the samples where ``samples`` [B] is True."""
        index = samples.nonzero()[:, 0].tolist()
        return Groups(self.exp.select(index), [self.rows[i] for i in index], self.size)

    def split(self, count: int) -> tuple["Groups", "Groups"]:
        """Return the first ``count`` groups, and the others."""
        first = torch.arange(len(self.rows)) < count * self.size
        return self.keep(first), self.keep(~first)

    def __add__(self, other: "Groups") -> "Groups":
        if not (self.rows and other.rows):
            return self if self.rows else other
        return Groups(Experience.cat([self.exp, other.exp]), self.rows + other.rows, self.size)

    def numbered(self) -> "Groups":
        """Return the same groups, numbered by index instead of by the draw of their prompts."""
        exp = self.exp.select(list(range(len(self.rows))))
        exp.sample_ids = torch.arange(len(self.rows))
        exp.group_ids = exp.sample_ids // self.size
        return Groups(exp, [row | {"group_id": i // self.size} for i, row in enumerate(self.rows)], self.size)

    @classmethod
    def none(cls, size: int) -> "Groups":
        """Return an empty set of groups."""
        return cls(pack_samples([], size), [], size)


@dataclass
class Tally:
    """Counts and sums of everything that was generated for one step."""
    carried: int  # groups carried over from earlier steps
    rounds: int = 0
    first: int = 0  # groups of the first round
    drawn: int = 0
    accepted: int = 0
    tokens: float = 0.0
    logprobs: float = 0.0  # this and the following fields are sums over samples and their tokens
    samples: int = 0
    truncated: int = 0
    rewards: float = 0.0
    scored: int = 0
    causes: Counter[str] = field(default_factory=Counter)  # causes of unscored samples

    def add(self, groups: Groups, accepted: int) -> None:
        """Add one round."""
        exp = groups.exp
        self.rounds, self.drawn, self.accepted = self.rounds + 1, self.drawn + len(groups), self.accepted + accepted
        self.first = self.first or len(groups)
        self.tokens += exp.loss_mask.sum().item()
        self.logprobs += exp.rollout_logprobs[exp.loss_mask].double().sum().item()
        self.samples, self.truncated = self.samples + exp.num_seqs, self.truncated + int(exp.truncated.sum())
        self.causes.update(row["error"] for row in groups.rows if row["reward"] is None)
        self.rewards, self.scored = self.rewards + exp.rewards.sum().item(), self.scored + int(exp.scored.sum())

    def metrics(self, seconds: float) -> dict[str, float]:
        """Return metrics of all generated groups, rejected ones included; ``seconds``: time of generation."""
        counts = {
            "group/refilled": self.drawn - self.first,
            "group/rejected": self.drawn - self.accepted,
            "rollout/rounds": self.rounds,
            "rollout/carried": self.carried,
            "rollout/tokens": self.tokens,
            "rollout/tokens_per_s": self.tokens / max(seconds, 1e-9),
            "reward/generated_scored": self.scored,
        }
        if not self.rounds:
            return counts
        unscored = {f"reward/generated_unscored/{cause}": count for cause, count in self.causes.items()}
        return counts | unscored | {
            "rollout/entropy_estimate": -self.logprobs / max(self.tokens, 1),
            "rollout/generated_truncated_frac": self.truncated / self.samples,
            "reward/generated_mean": self.rewards / max(self.scored, 1),
        }
