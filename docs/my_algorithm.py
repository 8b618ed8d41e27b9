"""The reward relative to the best sample of the group."""
from torch import Tensor

from lightrft.algorithms.base import advantage
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.segment import expand
from lightrft.types import Experience


@advantage("group_max", needs_group=True)
def group_max(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """[T]: r_i minus the largest reward of its group."""
    same = exp.group_ids[:, None] == exp.group_ids[None, :]
    best = exp.rewards.expand_as(same).masked_fill(~same, float("-inf")).amax(dim=1)
    return expand(exp.rewards - best, exp.cu_seqlens)
