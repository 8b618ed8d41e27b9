"""The experience maker that trainers use: rewards are computed while other responses are still being generated."""
from collections.abc import Iterable

from lightrft.rewards.base import Score
from lightrft.rewards.manager import Handle
from lightrft.rollout.engine import Completion
from lightrft.trainer.experience_maker import NaiveExperienceMaker
from lightrft.trainer.samples import reward_input
from lightrft.types import Prompt, Sample


class FastExperienceMaker(NaiveExperienceMaker):
    """Scoring is collected after the log-prob passes. It starts as soon as a response is finished where that can save
    time, which is where a worker or a server judges it by itself; else as soon as its group is."""

    def generate_samples(self, groups: list[tuple[int, Prompt]], step: int | str) -> list[Sample]:
        """Drive the engine; what is finished is decoded and handed to the reward workers at once."""
        self._expect(len(groups))

        def arrived(ended: list[tuple[int, int, Completion]]) -> None:
            samples = self.samples_of((*groups[i], j, completion) for i, j, completion in ended)
            self._begin([(i, sample) for (i, *_), sample in zip(ended, samples)])

        def finished(i: int, completions: list[Completion]) -> None:
            if not self._samples[i]:
                arrived([(i, j, completion) for j, completion in enumerate(completions)])
            self.rewards.finish(self._handles[i])

        early = self._begins_early([prompt for _, prompt in groups])
        self.engine.generate(self._requests(groups, step), self.sampling, finished, arrived if early else None)
        return self._begun()

    def _expect(self, count: int) -> None:
        """Make room for that many groups."""
        self._samples: list[dict[int, Sample]] = [{} for _ in range(count)]
        self._handles = [Handle() for _ in range(count)]

    def _begins_early(self, prompts: Iterable[Prompt]) -> bool:
        return any(self.rewards.begins_early(reward_input(prompt, "")) for prompt in prompts)

    def _begin(self, fresh: list[tuple[int, Sample]]) -> None:
        """Take finished samples, each with the place of its group."""
        for i, sample in fresh:
            self._samples[i][sample.index] = sample
        self.rewards.begin([(self._handles[i], sample.index, reward_input(sample.prompt, sample.text))
                            for i, sample in fresh])

    def _begun(self) -> list[Sample]:
        """The samples whose rewards are under way, group by group."""
        return [group[j] for group in self._samples for j in sorted(group)]

    def score(self, samples: list[Sample]) -> list[Score]:
        """Wait for the scores of what :meth:`generate_samples` returned last, in its order."""
        return [score for handle in self._handles for score in self.rewards.collect(handle)]
