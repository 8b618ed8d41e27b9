"""ReMax: the reward of the prompt's greedy response is the baseline.

Paper: Li et al. 2023, https://arxiv.org/abs/2310.10505
Equation: A_i = r_i - r(greedy response to the same prompt) (algorithm 1)
Degenerate: a greedy response without a reward: 0 for its whole group, counted in reward/greedy_unscored.
Deviation: the baseline goes through the same length penalty, running scale and clip as the rewards; the running
    statistics see sampled responses only. The KL of the greedy response is not in the baseline.
"""
import torch
from torch import Tensor

from lightrft.algorithms.base import advantage, from_outcome
from lightrft.config.schema import AlgorithmConfig
from lightrft.types import Experience


@advantage("remax", needs_greedy=True, reads=())
def remax(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Return advantages [T]."""
    known = exp.scored & ~exp.baseline_rewards.isnan()
    return from_outcome(exp, torch.where(known, exp.rewards - exp.baseline_rewards, 0), cfg)
