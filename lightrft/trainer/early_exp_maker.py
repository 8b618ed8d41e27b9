"""The experience maker of ``--overlap_passes``: finished samples are scored and passed through the models at once."""
from collections.abc import Iterable

from lightrft.trainer.early_passes import EarlyPasses
from lightrft.trainer.fast_exp_maker import FastExperienceMaker
from lightrft.types import Experience, Prompt, Sample


class EarlyExperienceMaker(FastExperienceMaker):
    """What :class:`.logprob_pass.LogprobPass` would compute is there before the rollout is gathered."""

    def generate_samples(self, groups: list[tuple[int, Prompt]], step: int | str) -> list[Sample]:
        """As without the option; ends when all ranks' passes are through."""
        rollout = self.config.rollout
        size = rollout.n_samples_per_prompt
        self.early = EarlyPasses(self.strategy, self.logprobs.wanted(rollout.rollout_batch_size * size),
                                 self.logprobs.limits, size)
        with self.timer("early_passes"), self.early, self.timer("rollout"):
            return super().generate_samples(groups, step)

    def _begins_early(self, prompts: Iterable[Prompt]) -> bool:
        return True

    def _begin(self, fresh: list[tuple[int, Sample]]) -> None:
        super()._begin(fresh)
        self.early.add([sample for _, sample in fresh])

    def _gather(self, local: Experience) -> Experience:
        self.early.fill(local)
        return super()._gather(local)
