"""Sources of the rollout batch of a step: the next prompts, or with dynamic sampling the groups that can be trained."""
from typing import Any

from lightrft.config.schema import Config
from lightrft.datasets.loader import PromptLoader
from lightrft.ops.segment import group_stats
from lightrft.trainer.advantage_calculator import trainable_samples
from lightrft.trainer.overlapped_passes import OverlappedExperienceMaker
from lightrft.trainer.experience_maker import NaiveExperienceMaker, Rollout
from lightrft.trainer.fast_exp_maker import FastExperienceMaker
from lightrft.trainer.dynamic_sampling import Groups, Tally, tell_dropped
from lightrft.trainer.partial_rollout import OversamplingSource, PartialExperienceMaker
from lightrft.trainer.metric_sums import staleness_metrics
from lightrft.trainer.samples import set_rewards
from lightrft.types import Experience
from lightrft.utils.logging import get_logger


class PromptSource:
    """Takes the next batch of prompts and all of their groups in every step."""
    exhausted = False  # the number of steps already limits the data

    def __init__(self, maker: NaiveExperienceMaker, loader: PromptLoader) -> None:
        self.maker, self.loader = maker, loader

    def make(self, step: int, kl_coef: float = 0.0) -> Rollout:
        """Make the rollout of one step."""
        return self.maker.make(next(self.loader), step, kl_coef)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: no group is carried over."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume without groups; warn of those that a run with dynamic sampling or oversampling left."""
        tell_dropped(state, "open", "rows")


class DynamicSource:
    """Dynamic sampling (DAPO, arXiv:2503.14476, eq. 11): groups whose rewards do not differ are replaced by others.

    A group is accepted when it has two scored samples whose rewards, before shaping, differ by more than
    ``zero_spread``, and a sample that stays in the loss. Generation continues in rounds until a batch of groups is
    accepted, ``max_gen_rounds`` are over or the data is used up. Surplus groups are kept for the next step, with their
    rollout log-probs and weight version. Each round is gathered before any group is accepted, and seeds depend on the
    number of the draw, so the number of ranks makes no difference.

    Args:
        limit: prompts to draw in the whole run; None: no limit.
    """

    def __init__(self, config: Config, maker: NaiveExperienceMaker, loader: PromptLoader, limit: int | None) -> None:
        self.config, self.maker, self.loader, self.limit = config, maker, loader, limit
        self.batch = config.rollout.rollout_batch_size
        self.waiting = Groups.none(config.rollout.n_samples_per_prompt)

    @property
    def exhausted(self) -> bool:
        """True when no further step can be made."""
        return not self._left() and not len(self.waiting)

    def _left(self) -> int:
        """Return the number of prompts that may still be drawn for one batch."""
        left = self.batch if self.limit is None else self.limit - self.loader.position
        return max(0, min(left, self.batch))

    def make(self, step: int, kl_coef: float = 0.0) -> Rollout:
        """Make the rollout of one step; it has no rows when no group was accepted."""
        tally = Tally(carried=min(len(self.waiting), self.batch))
        while len(self.waiting) < self.batch and tally.rounds < self.config.rollout.max_gen_rounds and self._left():
            self._round(min(self._left(), self._wanted(tally)), tally)
        groups, self.waiting = self.waiting.split(self.batch)
        rollout = self._rollout(groups.numbered(), tally, step, kl_coef)
        rollout.metrics |= staleness_metrics(rollout.exp, step) if rollout.rows else {}
        rollout.metrics |= tally.metrics(self.maker.timer.seconds("rollout"))
        return rollout

    def _wanted(self, tally: Tally) -> int:
        """Return how many prompts should fill the batch at this step's acceptance rate; a whole batch if it is 0."""
        missing = self.batch - len(self.waiting)
        if not tally.drawn:
            return missing
        return min(self.batch, -(-missing * tally.drawn // tally.accepted)) if tally.accepted else self.batch

    def _round(self, count: int, tally: Tally) -> None:
        """Generate and score ``count`` prompts; append the accepted groups to ``waiting``, in the order of draws."""
        exp, rows_of = self.maker.generate(self.loader.draw(count), "draw")
        groups = Groups(exp, rows_of(), self.waiting.size)
        set_rewards(exp, groups.rows)
        stats = group_stats(exp.rewards, exp.group_ids, exp.scored)
        taught = group_stats(trainable_samples(exp, self.config.reward).float(), exp.group_ids, exp.scored).mean > 0
        good = groups.keep(taught & (stats.size > 1) & (stats.spread > self.config.algorithm.zero_spread))
        tally.add(groups, len(good))
        self.waiting = self.waiting + good

    def _rollout(self, groups: Groups, tally: Tally, step: int, kl_coef: float) -> Rollout:
        if groups.rows:
            return self.maker.complete(groups.exp, lambda: groups.rows, step, kl_coef)
        get_logger().warning(
            "step %d: no update, none of %d groups has rewards that differ (--zero_spread %g) after %d rounds",
            step + 1, tally.drawn, self.config.algorithm.zero_spread, tally.rounds)
        groups.exp.advantages = groups.exp.rollout_logprobs
        nothing = "rollout/prompts", "rollout/samples", "rollout/kept_samples", "rollout/mismatch/tokens"
        return Rollout(groups.exp, self.maker.buffer(groups.exp, step), [], dict.fromkeys(nothing, 0))

    def state_dict(self) -> dict[str, Any]:
        """Return the waiting groups."""
        tensors = {name: value for name, value in vars(self.waiting.exp).items() if value is not None}
        return {"exp": tensors, "rows": self.waiting.rows, "size": self.waiting.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; drop groups of another size than this run's, with a warning."""
        tell_dropped(state, "open")
        if state.get("rows") and state["size"] == self.waiting.size:
            self.waiting = Groups(Experience(**state["exp"]), state["rows"], state["size"])
        elif state.get("rows"):
            get_logger().warning(
                "groups of %d samples carried over in the checkpoint are dropped: "
                "--n_samples_per_prompt is %d now", state["size"], self.waiting.size)


def get_maker(config: Config) -> type[FastExperienceMaker]:
    """Return the class of experience makers that :func:`get_group_source` needs."""
    if config.rollout.overlap_passes:
        return OverlappedExperienceMaker
    return PartialExperienceMaker if config.rollout.oversample > 1 else FastExperienceMaker


def get_group_source(config: Config, maker: NaiveExperienceMaker, loader: PromptLoader,
                     total_steps: int) -> PromptSource | DynamicSource | OversamplingSource:
    """Return the source that the options ask for, in a run of ``total_steps`` steps."""
    if isinstance(maker, PartialExperienceMaker):
        return OversamplingSource(config, maker, loader, total_steps)
    if not config.rollout.dynamic_sampling:
        return PromptSource(maker, loader)
    return DynamicSource(config, maker, loader,
                         None if config.train.max_steps else loader.draws(config.train.num_episodes))
