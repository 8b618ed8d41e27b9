"""Finished episodes that are carried over to later steps, in checkpoints, and the counts of their generation."""
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Any

import torch
from torch import Tensor

from lightrft.strategy.base import StrategyBase
from lightrft.trainer.samples import load_score
from lightrft.types import Batch, Episode, Prompt
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


def state_of(episode: Episode) -> dict[str, Any]:
    """Return a finished episode for a checkpoint, with what later stages read of its prompt."""
    prompt = episode.prompt
    used = {"uid": prompt.uid, "token_ids": prompt.token_ids, "text": prompt.text, "reference": prompt.reference,
            "media": prompt.media}  # yapf: disable
    return {"prompt": used, "group_id": episode.group_id, "index": episode.index} | episode.state()


def load_episodes(state: dict[str, Any]) -> list[Episode]:
    """Restore finished episodes from a checkpoint: from the states of each, or from the packed tokens and the rows that
    earlier versions wrote."""
    if "exp" in state:
        return [*_unpacked(state["exp"], state["rows"])]
    return [Episode.load(Prompt(**row["prompt"]), row["group_id"], row["index"], row) for row in state["rows"]]


def _unpacked(tensors: dict[str, Any], rows: list[dict[str, Any]]) -> Iterator[Episode]:
    """Yield the episodes whose tokens were packed in ``tensors``, one per row of their scores."""
    names = {"token_ids": "token_ids", "logprobs": "rollout_logprobs", "weight_versions": "weight_versions"}
    columns = {name: tensors[field].tolist() for name, field in names.items()}
    bounds = pairwise(tensors["cu_seqlens"].tolist())
    for row, (begin, end), keys in zip(rows, bounds, tensors.get("media") or repeat(())):
        drawn = [version >= 0 for version in columns["weight_versions"][begin:end]]
        start = begin + (drawn.index(True) if True in drawn else len(drawn))
        prompt = Prompt(row["uid"], columns["token_ids"][begin:start], row["prompt"] or "",
                        reference=row["reference"], media=tuple(keys))  # yapf: disable
        response: dict[str, Any] = {name: values[start:end] for name, values in columns.items()}
        response |= {"finish_reason": row["finish_reason"], "text": row["response"] or ""}
        episode = Episode.load(prompt, row["group_id"], row["index"], response)
        load_score(episode, row)
        yield episode


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
