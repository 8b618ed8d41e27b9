"""The experience maker of ``--oversample``: it stops generating when enough groups are finished."""
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from lightrft.rollout.engine import Completion, Request
from lightrft.trainer.experience_maker import Rows
from lightrft.trainer.fast_exp_maker import FastExperienceMaker
from lightrft.trainer.open_groups import OpenGroup
from lightrft.types import Sample


class PartialExperienceMaker(FastExperienceMaker):
    """Takes groups that are under way some way further.

    Groups are dealt to ranks one by one, and so is the number of those that must be finished: each rank stops by
    itself, after the same token in every run. What it has generated is gathered, so that nothing hangs on the rank.
    """

    def advance(self, groups: list[OpenGroup], wanted: int, due: set[int]) -> Callable[[], Rows]:
        """Generate until ``wanted`` of ``groups`` (none is finished) are, and those with a number in ``due`` as well.

        Returns:
            A function that waits for the rewards: the rows of all groups that are finished now, in the order of their
            numbers.
        """
        rank, world = self.strategy.rank, self.strategy.world_size
        mine = groups[rank::world]
        with self.timer("rollout"):
            samples = self._drive(mine, len(range(rank, wanted, world)), due)
            self.strategy.barrier()
        baseline = self._answer_greedily(samples)
        with self.timer("gather"):
            parts = self.strategy.all_gather_object([(group.number, group.responses) for group in mine])
        found = dict(chain.from_iterable(parts))
        for group in groups:
            group.responses = found[group.number]
        return lambda: self._gather_rows(samples, baseline)

    def _drive(self, mine: list[OpenGroup], quota: int, due: set[int]) -> list[Sample]:
        """The engine on this rank's groups; samples of those that were finished."""
        version, done = self.engine.weight_version, {}
        late = {group.number for group in mine} & due
        self._handles = {}

        def finished(i: int, completions: list[Completion]) -> bool:
            mine[i].add(completions, version)
            done[i] = self.samples_of(mine[i].number, mine[i].prompt, list(mine[i].responses))
            self._submit(i, done[i])
            late.discard(mine[i].number)
            return len(done) >= quota and not late

        asked = self._continued(mine) if quota or late else []  # ranks that share an engine have to call it together
        for i, completions in enumerate(self.engine.generate(asked, self.sampling, finished)):
            if i not in done:
                mine[i].add(completions, version)
        return [sample for i in sorted(done) for sample in done[i]]

    def _continued(self, groups: list[OpenGroup]) -> list[Request]:
        """What is left to generate; a response draws by the seed that it began with."""
        whole = self._requests([(group.number, group.prompt) for group in groups], "draw")
        return [
            replace(request, seeds=[request.seeds[j]
                                    for j in group.open], prefixes=[group.responses[j].token_ids for j in group.open])
            for request, group in zip(whole, groups)
        ]
