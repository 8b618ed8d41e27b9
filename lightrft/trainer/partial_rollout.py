"""Partial rollout (``--oversample``): a step does not wait for its longest responses; the next step continues them."""
from itertools import chain
from math import ceil
from typing import Any, NamedTuple

import torch

from lightrft.config.schema import Config
from lightrft.datasets.loader import PromptLoader
from lightrft.strategy.plain_pickle import reads_again
from lightrft.trainer.dynamic_sampling import warn_dropped
from lightrft.trainer.fast_exp_maker import FastExperienceMaker, Rollout
from lightrft.trainer.metric_sums import staleness_metrics
from lightrft.trainer.samples import ResponseGroup
from lightrft.types import Batch, Episode, Prompt
from lightrft.utils.errors import UserError
from lightrft.utils.logging import get_logger


class Progress(NamedTuple):
    """Progress of a group, known on every rank."""
    open: bool  # some response is unfinished
    oldest: int | None  # version of the oldest weights that drew a token; None: no token is drawn yet
    tokens: int

    @classmethod
    def of(cls, group: ResponseGroup) -> "Progress":
        """Measure a group of this rank."""
        return cls(bool(group.open), group.oldest(-1) if group.tokens else None, group.tokens)

    def version(self, step: int) -> int:
        """Return the version of the oldest token; ``step`` if there is none."""
        return step if self.oldest is None else self.oldest


def _renumbered(chosen: dict[int, ResponseGroup]) -> list[Episode]:
    """Return the responses of the groups, which are given by index in the batch, with this index as their group."""
    return [response for index, group in chosen.items() for response in group.renumbered(index)]


def check_saved(prompt: Prompt) -> None:
    """Raise :class:`UserError` for a column that a checkpoint with the unfinished group could not keep."""
    values = {**prompt.columns, "reference": prompt.reference}
    if reads_again(values):
        return
    name, value = next((item for item in values.items() if not reads_again(item[1])), ("", values))
    raise UserError(f"--oversample keeps rows in checkpoints, and {name!r} of row {prompt.uid} holds an object that is "
                    f"not read again, because that could run code (of {type(value).__name__}, or in it). Give plain "
                    "values (texts, numbers, lists, dicts, arrays), build the object in the reward or the environment, "
                    "or add --disable_ckpt")


class OversamplingSource:
    """Source of batches with partial rollout (Kimi k1.5, arXiv:2501.12599; APRIL, arXiv:2509.18521).

    ``oversample`` batches of groups are active at once. Generation ends when one batch is finished; that batch is
    trained on. The other groups are carried over with all their tokens. Generation waits for a group that would exceed
    a staleness of ``max_staleness`` versions, so nothing is discarded and long responses are trained on as often as
    short ones. Groups are trained on in the order of their oldest token. Near the end only as many prompts are drawn as
    can still be trained on.

    Groups are dealt to ranks one by one, and so is the number of groups that must be finished: each rank stops by
    itself, after the same token in every run. A group moves to the rank that it is dealt to; every rank knows the
    progress of all groups and holds its own.

    Args:
        total_steps: steps of the run.
    """

    def __init__(self, config: Config, maker: FastExperienceMaker, loader: PromptLoader, total_steps: int) -> None:
        rollout = config.rollout
        self.maker, self.strategy, self.loader, self.total_steps = maker, maker.strategy, loader, total_steps
        self.batch, self.size, self.max_staleness = (rollout.rollout_batch_size, rollout.n_samples_per_prompt,
                                                     rollout.max_staleness)
        self.most = ceil(rollout.oversample * self.batch - 1e-9)  # 1.1 * 10 is 11
        self.saved = not config.checkpoint.disable_ckpt
        self.groups: list[ResponseGroup] = []  # of this rank
        self.progress: dict[int, Progress] = {}  # of all ranks, in the order in which they are trained

    exhausted = False  # every step has a whole batch

    def make(self, step: int, kl_coef: float = 0.0) -> Rollout:
        """Make the rollout of one step."""
        missing = min(self.most, (self.total_steps - step) * self.batch) - len(self.progress)
        drawn = dict(self.loader.draw(max(0, missing)))
        for prompt in drawn.values() if self.saved else ():
            check_saved(prompt)
        self.progress |= {number: Progress(True, None, 0) for number in drawn}
        running = {number: each for number, each in self.progress.items() if each.open}
        due = {number for number, each in running.items() if each.version(step) + self.max_staleness <= step}
        wanted = max(0, self.batch - len(self.progress) + len(running))
        mine = self._deal(list(running), drawn)
        wait = self.maker.advance(mine, "draw", len(self.maker.deal(range(wanted))), due)[1]
        with self.maker.timer("gather"):
            for found in self.strategy.all_gather_object([(group.number, Progress.of(group)) for group in mine]):
                self.progress |= dict(found)
        tokens = sum(self.progress[number].tokens - each.tokens for number, each in running.items())
        old, chosen = self._take(step)
        exp = Batch.of(_renumbered(chosen))

        def scored() -> list[Episode]:
            wait()
            return _renumbered(chosen)

        rollout = self.maker.complete(exp, scored, step, kl_coef)
        rollout.metrics |= staleness_metrics(rollout.shards, step) | self._metrics(chosen) | {
            "rollout/tokens": tokens,
            "rollout/tokens_per_s": tokens / max(self.maker.timer.seconds("rollout"), 1e-9),
            "rollout/partial/due": len(due),
            "rollout/partial/groups": old,
        }
        return rollout

    def _deal(self, running: list[int], drawn: dict[int, Prompt]) -> list[ResponseGroup]:
        """Deal the running groups; return those of this rank, of which some come from other ranks or are new."""
        here = {group.number: group for group in self.groups}
        shares = self.strategy.mesh.engines.all(running)
        sent = [[here.pop(number) for number in share if number in here] for share in shares]
        mine = {group.number: group for group in chain.from_iterable(self.strategy.exchange(sent))}
        dealt = [
            mine[number] if number in mine else ResponseGroup.new(number, drawn[number], self.size)
            for number in self.maker.deal(running)
        ]
        self.groups = [*here.values(), *dealt]
        return dealt

    def _take(self, step: int) -> tuple[int, dict[int, ResponseGroup]]:
        """Remove the batch of finished groups with the oldest tokens; the others keep their order.

        Returns:
            The number of its groups that have tokens of earlier steps, and those of this rank by index in the batch.
        """
        order = sorted(self.progress, key=lambda number: (self.progress[number].version(step + 1), number))
        chosen = [number for number in order if not self.progress[number].open][:self.batch]
        old = sum(self.progress[number].version(step) < step for number in chosen)
        here = {group.number: group for group in self.groups}
        self.progress = {number: self.progress[number] for number in order if number not in set(chosen)}
        self.groups = [here[number] for number in self.progress if number in here]
        return old, {index: here[number] for index, number in enumerate(chosen) if number in here}

    def _metrics(self, chosen: dict[int, ResponseGroup]) -> dict[str, float]:
        versions = [{each.version for each in response.segments if each.drawn} for group in chosen.values()
                    for response in group.responses]
        left = [response for group in self.groups for response in group.open if response.segments]
        own = sum(len(each) > 1 for each in versions), len(left), sum(response.response_len for response in left)
        samples, left_samples, left_tokens = self.strategy.all_reduce(torch.tensor(own)).tolist()
        return {
            "rollout/partial/samples": samples,
            "rollout/partial/left_groups": len(self.progress),
            "rollout/partial/left_samples": left_samples,
            "rollout/partial/left_tokens": left_tokens,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the unfinished and waiting groups of all ranks, in order, on rank 0, which writes them; a collective.
        """
        parts = self.strategy.gather_object(self.groups, [])
        groups = {group.number: group for part in parts for group in part}
        return {"open": [groups[number].state() for number in self.progress if number in groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; drop groups that this run cannot continue, with a warning."""
        carried = [ResponseGroup.load(each) for each in state.get("open", ())]
        sizes = [len(group.responses) for group in carried]
        if carried and ({*sizes} != {self.size} or len(carried) > self.batch):
            get_logger().warning(
                "the %d groups of %d samples carried over in the checkpoint are dropped: a batch now has groups of "
                "%d samples, %d groups", len(carried), sizes[0], self.size, self.batch)
        else:
            self.progress = {group.number: Progress.of(group) for group in carried}
            self.groups = list(self.maker.deal(carried))
        warn_dropped(state, "rows")
