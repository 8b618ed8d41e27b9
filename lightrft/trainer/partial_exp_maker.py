"""The experience maker of ``--oversample``: it stops generating when enough groups are finished."""
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain

from lightrft.rollout.engine import Completion, Request
from lightrft.trainer.fast_exp_maker import FastExperienceMaker
from lightrft.trainer.open_groups import OpenGroup
from lightrft.trainer.samples import Rows, reward_input
from lightrft.types import Prompt, Sample


class PartialExperienceMaker(FastExperienceMaker):
    """Takes groups that are under way some way further.

    Groups are dealt to ranks one by one, and so is the number of those that must be finished: each rank stops by
    itself, after the same token in every run. What it has generated is gathered, so that nothing hangs on the rank.
    """

    def advance(self, groups: list[OpenGroup], wanted: int, due: set[int]) -> Callable[[], Rows]:
        """Generate until ``wanted`` of ``groups`` (none is finished) are, and those with a number in ``due`` as well.

        Returns:
            A function that waits for the rewards: the rows of all samples whose scoring began now, which are those left
            of groups that are finished now, and perhaps some of others, in the order of their numbers.
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
        """The engine on this rank's groups; samples of which the rewards are under way now."""
        version, opened, done = self.engine.weight_version, [group.open for group in mine], set[int]()
        late = {group.number for group in mine} & due
        self._expect(len(mine))

        def arrived(ended: list[tuple[int, int, Completion]]) -> None:
            for i, k, completion in ended:
                mine[i].responses[opened[i][k]].add(completion, version)
            samples = self.samples_of(mine[i].ended(opened[i][k]) for i, k, _ in ended)
            self._begin([(i, sample) for (i, *_), sample in zip(ended, samples)])

        def finished(i: int, completions: list[Completion]) -> bool:
            mine[i].add(completions, version, opened[i])
            self._finish(i, mine[i])
            done.add(i)
            late.discard(mine[i].number)
            return len(done) >= quota and not late

        early = self._begins_early([group.prompt for group in mine])
        asked = self._continued(mine) if quota or late else []  # ranks that share an engine have to call it together
        found = self.engine.generate(asked, self.sampling, finished, arrived if early else None)
        for i in sorted(set(range(len(found))) - done):
            mine[i].add(found[i], version, opened[i])
            if not mine[i].open:  # its last response ended while it was being stopped
                self._finish(i, mine[i])
        return self._begun()

    def _begins_early(self, prompts: Iterable[Prompt]) -> bool:
        """A row goes along with its group from step to step, so it has to be complete without the group."""
        alone = self.greedy is None and not any(self.rewards.compares(reward_input(prompt, "")) for prompt in prompts)
        return alone and super()._begins_early(prompts)

    def _finish(self, i: int, group: OpenGroup) -> None:
        """Score what is left of a group whose responses are all finished."""
        begun = {row["index"] for row in group.rows} | self._samples[i].keys()
        rest = [j for j in range(len(group.responses)) if j not in begun]
        self._begin([(i, sample) for sample in self.samples_of(map(group.ended, rest))])
        self.rewards.finish(self._handles[i])

    def _continued(self, groups: list[OpenGroup]) -> list[Request]:
        """What is left to generate; a response draws by the seed that it began with."""
        whole = self._requests([(group.number, group.prompt) for group in groups], "draw")
        return [
            replace(request, seeds=[request.seeds[j]
                                    for j in group.open], prefixes=[group.responses[j].token_ids for j in group.open])
            for request, group in zip(whole, groups)
        ]
