"""The experience maker that trainers use: rewards are computed while other responses are still being generated."""
from lightrft.rewards.base import Score
from lightrft.rollout.engine import Completion
from lightrft.trainer.experience_maker import NaiveExperienceMaker, reward_input
from lightrft.types import Prompt, Sample


class FastExperienceMaker(NaiveExperienceMaker):
    """Scoring starts as soon as a group is finished and is collected after the log-prob passes."""

    def generate_samples(self, groups: list[tuple[int, Prompt]], step: int | str) -> list[Sample]:
        """Drive the engine; every finished group is decoded and handed to the reward workers at once."""
        done: dict[int, list[Sample]] = {}
        self._handles = {}

        def finished(i: int, completions: list[Completion]) -> None:
            done[i] = self.samples_of(*groups[i], completions)
            self._submit(i, done[i])

        self.engine.generate(self._requests(groups, step), self.sampling, finished)
        return [sample for i in range(len(groups)) for sample in done[i]]

    def _submit(self, i: int, samples: list[Sample]) -> None:
        self._handles[i] = self.rewards.submit([reward_input(sample.prompt, sample.text) for sample in samples])

    def score(self, samples: list[Sample]) -> list[Score]:
        """Wait for the scores of the groups of the last :meth:`generate_samples`, in its order."""
        return [score for i in sorted(self._handles) for score in self.rewards.collect(self._handles[i])]
