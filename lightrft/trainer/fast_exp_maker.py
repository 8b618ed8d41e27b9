"""The experience maker of the trainers: rewards are computed while other responses are still being generated."""
from collections.abc import Iterable

from lightrft.rewards.base import Score
from lightrft.rewards.manager import Handle
from lightrft.rollout.engine import Completion
from lightrft.trainer.experience_maker import NaiveExperienceMaker
from lightrft.trainer.samples import reward_input
from lightrft.types import Prompt, Sample


class FastExperienceMaker(NaiveExperienceMaker):
    """Overlaps scoring with generation, and collects the scores after the log-prob passes.

    Scoring starts as soon as a response is finished if a worker or a server judges it on its own, because that saves
    time; otherwise as soon as its group is finished.
    """

    def generate_samples(self, groups: list[tuple[int, Prompt]], step: int | str) -> list[Sample]:
        """Generate; decode finished responses and send them to the reward workers at once."""
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
        """Allocate the state of ``count`` groups."""
        self._samples: list[dict[int, Sample]] = [{} for _ in range(count)]
        self._handles = [Handle() for _ in range(count)]

    def _begins_early(self, prompts: Iterable[Prompt]) -> bool:
        return any(self.rewards.begins_early(reward_input(prompt, "")) for prompt in prompts)

    def _begin(self, fresh: list[tuple[int, Sample]]) -> None:
        """Start scoring finished samples, each given with the index of its group."""
        for i, sample in fresh:
            self._samples[i][sample.index] = sample
        self.rewards.begin([(self._handles[i], sample.index, reward_input(sample.prompt, sample.text))
                            for i, sample in fresh])

    def _begun(self) -> list[Sample]:
        """Return the samples whose scoring has started, group by group."""
        return [group[j] for group in self._samples for j in sorted(group)]

    def score(self, samples: list[Sample]) -> list[Score]:
        """Wait for the scores of the samples that :meth:`generate_samples` returned last, in its order."""
        return [score for handle in self._handles for score in self.rewards.collect(handle)]
