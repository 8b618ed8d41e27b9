"""Whole groups of samples that can be kept, joined and numbered anew, and what it took to make them."""
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
    """Warn of what another source left in the ``state`` of a checkpoint: "rows" or "open" groups."""
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
        """The samples where ``samples`` [B] bool."""
        index = samples.nonzero()[:, 0].tolist()
        return Groups(self.exp.select(index), [self.rows[i] for i in index], self.size)

    def split(self, count: int) -> tuple["Groups", "Groups"]:
        """The first ``count`` groups, and the others."""
        first = torch.arange(len(self.rows)) < count * self.size
        return self.keep(first), self.keep(~first)

    def __add__(self, other: "Groups") -> "Groups":
        if not (self.rows and other.rows):
            return self if self.rows else other
        return Groups(Experience.cat([self.exp, other.exp]), self.rows + other.rows, self.size)

    def numbered(self) -> "Groups":
        """The same, numbered by their place instead of by the draw of their prompts."""
        exp = self.exp.select(list(range(len(self.rows))))
        exp.sample_ids = torch.arange(len(self.rows))
        exp.group_ids = exp.sample_ids // self.size
        return Groups(exp, [row | {"group_id": i // self.size} for i, row in enumerate(self.rows)], self.size)

    @classmethod
    def none(cls, size: int) -> "Groups":
        """No groups."""
        return cls(pack_samples([], size), [], size)


@dataclass
class Tally:
    """What was generated for one step."""
    carried: int  # groups that were there before
    rounds: int = 0
    first: int = 0  # groups of the first round
    drawn: int = 0
    accepted: int = 0
    tokens: float = 0.0
    logprobs: float = 0.0  # sums of these and of what follows, over samples and their tokens
    samples: int = 0
    truncated: int = 0
    rewards: float = 0.0
    scored: int = 0
    causes: Counter[str] = field(default_factory=Counter)  # of those that are not scored

    def add(self, groups: Groups, accepted: int) -> None:
        """Count one round."""
        exp = groups.exp
        self.rounds, self.drawn, self.accepted = self.rounds + 1, self.drawn + len(groups), self.accepted + accepted
        self.first = self.first or len(groups)
        self.tokens += exp.loss_mask.sum().item()
        self.logprobs += exp.rollout_logprobs[exp.loss_mask].double().sum().item()
        self.samples, self.truncated = self.samples + exp.num_seqs, self.truncated + exp.truncated.sum().item()
        self.causes.update(row["error"] for row in groups.rows if row["reward"] is None)
        self.rewards, self.scored = self.rewards + exp.rewards.sum().item(), self.scored + exp.scored.sum().item()

    def metrics(self, seconds: float) -> dict[str, float]:
        """Of all that was generated, rejected groups included; ``seconds`` is what generation took."""
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
