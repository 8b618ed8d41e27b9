"""Scored samples, from the reward to the log: rewards of whole rollout batches, and of the steps of responses."""
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightrft.algorithms.base import Advantage
from lightrft.datasets.records import prefill_of
from lightrft.datasets.token_texts import decode_behind
from lightrft.ops.segment import HERE, Ranks
from lightrft.rewards.base import Score
from lightrft.strategy.base import StrategyBase
from lightrft.types import Batch, Episode, RolloutBatch
from lightrft.types.fields import numbers_of

Steps = list[tuple[int, float]]  # where each step ends, and its reward


@dataclass(frozen=True)
class ScoredSample:
    """Score of one sample. ``reward`` None means unscored; that is not a reward of 0, and ``error`` is its cause.

    The texts are those of the log; they are None where no log needs them. ``greedy_reward`` and ``greedy_length``
    belong to the greedy response of the prompt; the length is None where the estimator needs no such response.
    """
    group_id: int
    index: int
    reward: float | None
    parts: dict[str, float | None] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    finish_reason: str = "stop"
    uid: str = ""
    prompt: str | None = None
    response: str | None = None
    reference: Any = None
    greedy_reward: float | None = None
    greedy_length: int | None = None
    steps: Steps = field(default_factory=list)  # by tokens of the sequence
    fault: str | None = None  # cause of a reward of 0 that the response itself is to blame for
    numbers: dict[str, float] = field(default_factory=dict)  # declared by lightrft.types.number

    @classmethod
    def of(cls, sample: Episode, score: Score, texts: bool, greedy: tuple[float | None, int] | None = None,
           steps: Steps | None = None) -> "ScoredSample":
        """Join a sample, its score and the rewards of its ``steps``; ``greedy`` is the score of the prompt's greedy
        response and its length."""
        prompt = sample.prompt
        said = {"prompt": prompt.text, "response": sample.text, "reference": prompt.reference} if texts else {}
        reward, length = greedy or (None, None)
        return cls(sample.group_id, sample.index, score.total, score.parts, score.weights, score.error,
                   sample.finish_reason, prompt.uid, greedy_reward=reward, greedy_length=length, steps=steps or [],
                   fault=score.fault, numbers=numbers_of(sample), **said)

    def row(self) -> dict[str, Any]:
        """Return the fields as a row of the log, without those that this run has not."""
        row = dict(vars(self))
        for given, names in ((self.response is not None, ("prompt", "response", "reference")),
                             (self.greedy_length is not None, ("greedy_reward", "greedy_length")),
                             (bool(self.steps), ("steps", )), (self.fault is not None, ("fault", )),
                             (bool(self.numbers), ("numbers", ))):  # yapf: disable
            for name in () if given else names:
                del row[name]
        return row


def _columns(samples: list[ScoredSample]) -> dict[tuple[str, str], Tensor]:
    """Return the numbers of ``samples``, float64 [n] by kind and name; NaN where a sample has none."""
    columns: dict[tuple[str, str],
                  list[float | None]] = {("sample", "reward"): [each.reward for each in samples],
                                         ("sample", "greedy_reward"): [each.greedy_reward for each in samples],
                                         ("sample", "greedy_length"): [each.greedy_length or 0 for each in samples]}
    for kind, tables in (("part", [each.parts for each in samples]), ("weight", [each.weights for each in samples]),
                         ("error", [{each.error: 1} if each.error else {} for each in samples]),
                         ("fault", [{each.fault: 1} if each.fault else {} for each in samples])):  # yapf: disable
        for name in set().union(*tables):
            columns[kind, name] = [table.get(name) for table in tables]
    return {
        key: torch.tensor([torch.nan if v is None else v for v in values], dtype=torch.float64)
        for key, values in columns.items()
    }


@dataclass(frozen=True)
class RewardTable:
    """Rewards of the B samples of a rollout batch, the same on every rank. NaN stands for a number that is missing."""
    rewards: Tensor  # float64 [B]
    greedy: Tensor  # float64 [B, 2]: reward and length of the prompt's greedy response
    parts: dict[str, Tensor]  # float64 [B] each, by name; NaN where a part does not judge the sample
    weights: dict[str, Tensor]  # float64 [B] each: weight of a part in the reward of the sample
    errors: Counter[str]  # causes of unscored samples
    faults: Counter[str]  # causes of rewards of 0 that the response is to blame for

    @classmethod
    def gather(cls, samples: list[ScoredSample], ranks: Ranks = HERE) -> "RewardTable":
        """Gather the rewards of all ranks; ``ranks`` holds the indices of this rank's ``samples`` in the batch."""
        table = ranks.columns(_columns(samples))
        found: dict[str, dict[str, Tensor]] = {kind: {} for kind in ("sample", "part", "weight", "error", "fault")}
        for (kind, name), column in sorted(table.items(), key=lambda item: item[0]):  # ranks agree on the order
            found[kind][name] = column
        own, weights = found["sample"], {name: column.nan_to_num() for name, column in found["weight"].items()}
        errors, faults = (Counter({cause: int(column.nansum()) for cause, column in found[kind].items()})
                          for kind in ("error", "fault"))  # yapf: disable
        return cls(own["reward"], torch.stack([own["greedy_reward"], own["greedy_length"]], 1), found["part"], weights,
                   errors, faults)

    def fill(self, batch: RolloutBatch, estimator: Advantage) -> dict[str, float]:
        """Fill the rewards of ``batch`` before shaping, and what its estimator needs; return ``reward/*``."""
        batch.scored = ~self.rewards.isnan()
        batch.rewards = torch.where(batch.scored, self.rewards, 0.0).float()
        if estimator.needs_parts:
            none = torch.full_like(self.rewards, torch.nan)
            batch.reward_parts = self._columns([self.parts.get(name, none) for name in self.weights])
            batch.part_weights = self._columns(self.weights.values())
        if estimator.needs_greedy:
            batch.baseline_rewards, batch.baseline_lengths = self.greedy.float().unbind(1)
        return self.metrics() | (self._greedy_metrics(batch.group_ids) if estimator.needs_greedy else {})

    def _columns(self, values: Iterable[Tensor]) -> Tensor:
        columns = torch.stack([*values], 1) if self.weights else self.rewards.new_zeros(len(self.rewards), 0)
        return columns.float()

    def metrics(self) -> dict[str, float]:
        """Return ``reward/<part>/{mean,std}`` over the samples that each part judged, and counts of unscored ones and
        of faults by cause."""
        metrics: dict[str, float] = {"reward/unscored": int(self.rewards.isnan().sum())}
        for name, column in self.parts.items():
            values = column[~column.isnan()].float()
            metrics[f"reward/{name}/mean"] = values.mean().item() if len(values) else 0.0
            metrics[f"reward/{name}/std"] = values.std(correction=0).item() if len(values) else 0.0
        return metrics | {f"reward/{kind}/{cause}": count for kind, causes in (("unscored", self.errors),
                                                                               ("faults", self.faults))
                          for cause, count in sorted(causes.items())}  # yapf: disable

    def _greedy_metrics(self, group_ids: Tensor) -> dict[str, float]:
        by_prompt = dict(zip(group_ids.tolist(), self.greedy[:, 0].tolist()))
        known = [reward for reward in by_prompt.values() if reward == reward]
        return {
            "reward/greedy_mean": sum(known) / max(len(known), 1), "reward/greedy_unscored": len(by_prompt) - len(known)
        }


def on_tokens(sample: Episode, steps: Steps, tokenizer: PreTrainedTokenizerBase) -> Steps:
    """Move step ends from characters of the answer, a prefill and ``sample.text``, to the tokens of the sequence that
    write the last one.

    A step that ends in what an environment appended gets its reward at the last token drawn before it (or the first
    one drawn), because no other token is an action.
    """
    if not steps:
        return []
    start, found = len(sample.prompt.token_ids), Steps()
    drawn = [i for i, own in enumerate(sample.loss_mask) if own]
    low, begun = 0, len(prefill_of(sample.prompt.messages) or "")
    for end, reward in steps if drawn else ():
        low = _tokens_of(sample.token_ids, start, end - begun, low, tokenizer)
        at = start + low - 1
        found.append((max((i for i in drawn if i <= at), default=drawn[0]), reward))
    return found


def _tokens_of(ids: list[int], start: int, end: int, low: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the fewest tokens from ``start`` on, more than ``low`` - 1, whose text has at least ``end`` characters."""
    prompt, low, high = ids[:start], max(low, 1), len(ids) - start
    while low < high:
        middle = (low + high) // 2
        text, = decode_behind(tokenizer, [(prompt, ids[start:start + middle])])
        if len(text.rstrip("\ufffd")) >= end:  # the first bytes of a character are none yet
            high = middle
        else:
            low = middle + 1
    return low


def spread_steps(exp: Batch, numbers: list[int], scored: list[ScoredSample], strategy: StrategyBase) -> Tensor:
    """Return ``step_rewards`` [T] of the sequences of ``exp``, wherever they were scored; a collective.

    Args:
        numbers: indices in the batch of the samples ``scored`` on this rank; ``exp.sample_ids`` are such indices.
    """
    own = {number: each.steps for number, each in zip(numbers, scored)}
    known = {number: steps for part in strategy.all_gather_object(own) for number, steps in part.items()}
    out = torch.full((exp.num_tokens, ), torch.nan)
    for start, number in zip(exp.cu_seqlens.tolist(), exp.sample_ids.tolist()):
        for at, reward in known[number]:
            out[start + at] = out[start + at].nan_to_num() + reward
    return out
