"""The reward relative to the best sample of the group."""
import torch
from torch import Tensor

from lightrft.algorithms.base import advantage, from_outcome
from lightrft.config.schema import AlgorithmConfig
from lightrft.types import Experience


@advantage("group_max", needs_group=True, reads=())
def group_max(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """[T]: r_i minus the largest reward among the scored samples of its group."""
    rivals = (exp.group_ids[:, None] == exp.group_ids[None, :]) & exp.scored
    best = exp.rewards.expand_as(rivals).masked_fill(~rivals, float("-inf")).amax(dim=1)
    return from_outcome(exp, torch.where(exp.scored, exp.rewards - best, 0), cfg)
