"""Source of the rollout batch of a step: the next prompts, or groups that dynamic sampling or oversampling choose."""
from typing import Any

from lightrft.config.schema import Config
from lightrft.datasets.loader import PromptLoader
from lightrft.trainer.carried_groups import warn_dropped
from lightrft.trainer.dynamic_sampling import DynamicSource
from lightrft.trainer.fast_exp_maker import FastExperienceMaker, Rollout
from lightrft.trainer.partial_rollout import OversamplingSource


class PromptSource:
    """Takes the next batch of prompts and all of their groups in every step."""
    exhausted = False  # the number of steps already limits the data

    def __init__(self, maker: FastExperienceMaker, loader: PromptLoader) -> None:
        self.maker, self.loader = maker, loader

    def make(self, step: int, kl_coef: float = 0.0) -> Rollout:
        """Make the rollout of one step."""
        return self.maker.make(next(self.loader), step, kl_coef)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: no group is carried over."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume without groups; warn of those that a run with dynamic sampling or oversampling left."""
        warn_dropped(state, "open", "rows")


def get_group_source(config: Config, maker: FastExperienceMaker, loader: PromptLoader,
                     total_steps: int) -> PromptSource | DynamicSource | OversamplingSource:
    """Return the source that the options ask for, in a run of ``total_steps`` steps."""
    if config.rollout.oversample > 1:
        return OversamplingSource(config, maker, loader, total_steps)
    if not config.rollout.dynamic_sampling:
        return PromptSource(maker, loader)
    return DynamicSource(config, maker, loader,
                         None if config.train.max_steps else loader.draws(config.train.num_episodes))
