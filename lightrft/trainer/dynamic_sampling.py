"""Dynamic sampling (``--dynamic_sampling``): a step draws prompts until a batch of groups has rewards that differ."""
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightrft.config.schema import Config
from lightrft.datasets.loader import PromptLoader
from lightrft.ops.segment import group_stats
from lightrft.strategy.base import StrategyBase
from lightrft.trainer.advantage_calculator import trainable_samples
from lightrft.trainer.carried_groups import check_saved, finished_state, load_finished, warn_dropped
from lightrft.trainer.fast_exp_maker import FastExperienceMaker, Rollout
from lightrft.trainer.metric_sums import staleness_metrics
from lightrft.trainer.shards import Shards
from lightrft.types import Batch, Episode
from lightrft.utils.logging import get_logger


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


class DynamicSource:
    """Source of batches with dynamic sampling (DAPO, arXiv:2503.14476, eq. 11).

    A group is accepted when it has two scored samples whose rewards, before shaping, differ by more than
    ``zero_spread``, and a sample that stays in the loss. Generation continues in rounds until a batch of groups is
    accepted, ``max_gen_rounds`` are over or the data is used up. Surplus groups are kept for the next step, with their
    rollout log-probs and weight version, on the rank that generated them. All ranks decide alike, in the order of the
    draws, and seeds depend on the number of the draw, so the result does not depend on the number of ranks. Rounds end
    with all of their scores: groups that were drawn as soon as another one is rejected would depend on how long rewards
    take.

    Args:
        limit: prompts to draw in the whole run; None: no limit.
    """

    def __init__(self, config: Config, maker: FastExperienceMaker, loader: PromptLoader, limit: int | None) -> None:
        self.config, self.maker, self.loader, self.limit = config, maker, loader, limit
        self.batch, self.strategy = config.rollout.rollout_batch_size, maker.strategy
        self.waiting: list[Episode] = []  # of this rank, group by group
        self.numbers: list[int] = []  # of the waiting groups of all ranks, in the order of their draws

    @property
    def exhausted(self) -> bool:
        """True when no further step can be made."""
        return not self._left() and not self.numbers

    def _left(self) -> int:
        """Return the number of prompts that may still be drawn for one batch."""
        left = self.batch if self.limit is None else self.limit - self.loader.position
        return max(0, min(left, self.batch))

    def make(self, step: int, kl_coef: float = 0.0) -> Rollout:
        """Make the rollout of one step; it is empty when no group was accepted."""
        tally = Tally(carried=min(len(self.numbers), self.batch))
        while len(self.numbers) < self.batch and tally.rounds < self.config.rollout.max_gen_rounds and self._left():
            self._round(min(self._left(), self._wanted(tally)), tally)
        chosen, self.numbers = self.numbers[:self.batch], self.numbers[self.batch:]
        rollout = self._rollout(chosen, step, kl_coef) if chosen else self._empty(tally, step)
        rollout.metrics |= staleness_metrics(rollout.shards, step) if chosen else {}
        rollout.metrics |= tally.metrics(self.maker.timer.seconds("rollout"))
        return rollout

    def _wanted(self, tally: Tally) -> int:
        """Return how many prompts should fill the batch at this step's acceptance rate; a whole batch if it is 0."""
        missing = self.batch - len(self.numbers)
        if not tally.drawn:
            return missing
        return min(self.batch, -(-missing * tally.drawn // tally.accepted)) if tally.accepted else self.batch

    def _round(self, count: int, tally: Tally) -> None:
        """Generate and score ``count`` prompts; append the accepted groups to ``waiting``, in the order of draws."""
        drawn, saved = self.loader.draw(count), not self.config.checkpoint.disable_ckpt
        check_saved((prompt for _, prompt in drawn if saved), "dynamic_sampling", columns=False)
        episodes, wait_for_scores = self.maker.generate(drawn, "draw")
        wait_for_scores()
        exp = Batch.of(episodes)
        exp.scored = torch.tensor([episode.reward is not None for episode in episodes], dtype=torch.bool)
        exp.rewards = torch.tensor([episode.reward or 0.0 for episode in episodes], dtype=torch.float32)
        accepted = [episode for episode, good in zip(episodes, self._accepts(exp).tolist()) if good]
        causes = Counter(episode.score.error for episode in episodes if episode.score and episode.reward is None)
        gathered = self.strategy.all_gather_object(({episode.group_id for episode in accepted}, causes))
        numbers = sorted(chain.from_iterable(numbers for numbers, _ in gathered))
        tally.add(count, len(numbers), exp, sum((causes for _, causes in gathered), Counter()), self.strategy)
        self.waiting, self.numbers = self.waiting + accepted, self.numbers + numbers

    def _accepts(self, exp: Batch) -> Tensor:
        """bool [B]: the samples of the groups that are accepted."""
        stats = group_stats(exp.rewards, exp.group_ids, exp.scored)
        taught = group_stats(trainable_samples(exp, self.config.reward).float(), exp.group_ids, exp.scored).mean > 0
        return taught & (stats.size > 1) & (stats.spread > self.config.algorithm.zero_spread)

    def _rollout(self, chosen: list[int], step: int, kl_coef: float) -> Rollout:
        """Train on the groups ``chosen``, whose order becomes that of the batch."""
        positions = {number: position for position, number in enumerate(chosen)}
        episodes = [episode for episode in self.waiting if episode.group_id in positions]
        self.waiting = [episode for episode in self.waiting if episode.group_id not in positions]
        for episode in episodes:
            episode.group_id = positions[episode.group_id]
        return self.maker.complete(episodes, step, kl_coef)

    def _empty(self, tally: Tally, step: int) -> Rollout:
        get_logger().warning(
            "step %d: no update, none of %d groups has rewards that differ (--zero_spread %g) after %d rounds",
            step + 1, tally.drawn, self.config.algorithm.zero_spread, tally.rounds)
        shards = Shards(self.strategy, Batch.of([]))
        nothing = "rollout/prompts", "rollout/samples", "rollout/kept_samples", "rollout/mismatch/tokens"
        return Rollout(shards, self.maker.plan(shards, step), [], dict.fromkeys(nothing, 0))

    def state_dict(self) -> dict[str, Any]:
        """Return the waiting groups of all ranks, in order, on rank 0, which writes them; a collective."""
        episodes = chain.from_iterable(self.strategy.gather_object(self.waiting, []))
        return {"rows": [finished_state(episode) for episode in sorted(episodes, key=lambda episode: episode.group_id)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; drop groups of another size than this run's, with a warning."""
        warn_dropped(state, "open")
        rows = state.get("rows")
        if not rows:
            return
        sizes, size = {*Counter(row["group_id"] for row in rows).values()}, self.config.rollout.n_samples_per_prompt
        if sizes == {size}:
            episodes = load_finished(state)
            self.numbers = [*dict.fromkeys(episode.group_id for episode in episodes)]
            dealt = {*self.maker.deal(self.numbers)}
            self.waiting = [episode for episode in episodes if episode.group_id in dealt]
            self.maker.keep_shown(self.waiting)
        else:
            get_logger().warning(
                "groups of %s samples carried over in the checkpoint are dropped: "
                "--n_samples_per_prompt is %d now", ", ".join(map(str, sorted(sizes))), size)
