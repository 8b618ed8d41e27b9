"""Partial rollout (``--oversample``): a step does not wait for its longest responses; the next step continues them."""
from itertools import chain
from math import ceil
from typing import Any, NamedTuple

import torch

from lightrft.config.schema import Config
from lightrft.datasets.loader import PromptLoader
from lightrft.trainer.carried_groups import check_saved, group_state, load_group, warn_dropped
from lightrft.trainer.fast_exp_maker import FastExperienceMaker, Rollout
from lightrft.trainer.metric_sums import staleness_metrics
from lightrft.trainer.samples import group_seeds
from lightrft.types import by_group, Episode, Prompt, Segment
from lightrft.utils.logging import get_logger


class Progress(NamedTuple):
    """Progress of a group, known on every rank."""
    open: bool  # some response is unfinished
    oldest: int | None  # version of the oldest weights that drew a token; None: no token is drawn yet

    @classmethod
    def of(cls, group: list[Episode]) -> "Progress":
        """Measure a group of this rank."""
        begun = (episode.branches[0].segments for episode in group)
        oldest = min((segments[0].version for segments in begun if segments), default=None)
        return cls(any(episode.open for episode in group), oldest)

    def version(self, step: int) -> int:
        """Return the version of the oldest token; ``step`` if there is none."""
        return step if self.oldest is None else self.oldest


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
        self.config, self.maker, self.strategy, self.loader = config, maker, maker.strategy, loader
        self.total_steps = total_steps
        self.batch, self.size, self.max_staleness = (rollout.rollout_batch_size, rollout.n_samples_per_prompt,
                                                     rollout.max_staleness)
        self.most = ceil(rollout.oversample * self.batch - 1e-9)  # 1.1 * 10 is 11
        self.saved = not config.checkpoint.disable_ckpt
        self.groups: dict[int, list[Episode]] = {}  # of this rank, by number
        self.progress: dict[int, Progress] = {}  # of all ranks, in the order in which they are trained

    exhausted = False  # every step has a whole batch

    def make(self, step: int, kl_coef: float = 0.0) -> Rollout:
        """Make the rollout of one step."""
        missing = min(self.most, (self.total_steps - step) * self.batch) - len(self.progress)
        drawn = dict(self.loader.draw(max(0, missing)))
        check_saved(drawn.values() if self.saved else (), "oversample")
        self.progress |= {number: Progress(True, None) for number in drawn}
        running = {number: each for number, each in self.progress.items() if each.open}
        due = {number for number, each in running.items() if each.version(step) + self.max_staleness <= step}
        wanted = max(0, self.batch - len(self.progress) + len(running))
        mine = self._deal(list(running), drawn)
        episodes = [*chain.from_iterable(mine.values())]
        wait_for_scores = self.maker.advance(episodes, len(self.maker.deal(range(wanted))), due)[1]
        with self.maker.timer("gather"):
            own, tokens = {number: Progress.of(group) for number, group in mine.items()}, 0
            for progress, count in self.strategy.all_gather_object((own, _drawn_by(step, episodes))):
                self.progress, tokens = self.progress | progress, tokens + count
        old, chosen = self._take(step)
        rollout = self.maker.complete(chosen, step, kl_coef, wait_for_scores)
        rollout.metrics |= staleness_metrics(rollout.shards, step) | self._metrics(chosen) | {
            "rollout/tokens": tokens,
            "rollout/tokens_per_s": tokens / max(self.maker.timer.seconds("rollout"), 1e-9),
            "rollout/partial/due": len(due),
            "rollout/partial/groups": old,
        }
        return rollout

    def _deal(self, running: list[int], drawn: dict[int, Prompt]) -> dict[int, list[Episode]]:
        """Deal the running groups; return those of this rank, of which some come from other ranks or are new."""
        shares = self.strategy.mesh.engines.all(running)
        sent = [[episode for number in share for episode in self.groups.pop(number, ())] for share in shares]
        begun = by_group(self.maker.exchange(sent))
        dealt = {number: begun[number] if number in begun else self.maker.open(number, drawn[number], "draw")
                 for number in self.maker.deal(running)}  # yapf: disable
        self.groups |= dealt
        return dealt

    def _take(self, step: int) -> tuple[int, list[Episode]]:
        """Remove the batch of finished groups with the oldest tokens; the others keep their order.

        Returns:
            The number of its groups that have tokens of earlier steps, and the episodes of this rank, which are
            numbered by the positions of their groups in the batch.
        """
        order = sorted(self.progress, key=lambda number: (self.progress[number].version(step + 1), number))
        chosen = [number for number in order if not self.progress[number].open][:self.batch]
        old = sum(self.progress[number].version(step) < step for number in chosen)
        episodes = [episode for number in chosen for episode in self.groups.get(number, ())]
        self.progress = {number: self.progress[number] for number in order if number not in set(chosen)}
        self.groups = {number: self.groups[number] for number in self.progress if number in self.groups}
        positions = {number: position for position, number in enumerate(chosen)}
        for episode in episodes:
            episode.group_id = positions[episode.group_id]
        return old, episodes

    def _metrics(self, chosen: list[Episode]) -> dict[str, float]:
        versions = [{each.version for each in _drawn(episode)} for episode in chosen]
        left = [episode for group in self.groups.values() for episode in group if episode.open and episode.drawn_len]
        own = sum(len(each) > 1 for each in versions), len(left), sum(response.drawn_len for response in left)
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
        groups = dict(chain.from_iterable(self.strategy.gather_object([*self.groups.items()], [])))
        return {"open": [group_state(groups[number]) for number in self.progress if number in groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; drop groups that this run cannot continue, with a warning."""
        carried = [load_group(each) for each in state.get("open", ())]
        sizes = [len(group) for group in carried]
        if carried and ({*sizes} != {self.size} or len(carried) > self.batch):
            get_logger().warning(
                "the %d groups of %d samples carried over in the checkpoint are dropped: a batch now has groups of "
                "%d samples, %d groups", len(carried), sizes[0], self.size, self.batch)
        else:
            self.progress = {group[0].group_id: Progress.of(group) for group in carried}
            self.groups = {group[0].group_id: group for group in self.maker.deal(carried)}
            for group in carried:
                self.maker.keep_shown(group)
            for group in carried:  # earlier versions keep no seeds
                for episode, seed in zip(group, group_seeds(self.config, "draw", group[0].group_id)):
                    episode.seed = episode.seed or seed
        warn_dropped(state, "rows")


def _drawn_by(version: int, episodes: list[Episode]) -> int:
    """Count the tokens that weights of ``version`` drew."""
    segments = chain.from_iterable(map(_drawn, episodes))
    return sum(len(segment.token_ids) for segment in segments if segment.version == version)


def _drawn(episode: Episode) -> list[Segment]:
    """Return the segments that the policy drew, of all branches."""
    return [segment for branch in episode.branches for segment in branch.segments if segment.drawn]
