"""Pass@k: a response is worth what it adds to the best of k responses to its prompt.

Paper: Tang et al. 2025, https://arxiv.org/abs/2503.19595 (the mean over subsets: https://arxiv.org/abs/2505.15201)
Equation: A_i = mean over S of max(0, r_i - max(S)), S every k - 1 other responses; k = n: best minus second best
Degenerate: a group with one scored sample or no spread: 0.
Deviation: k is --pass_k, at most the number of scored samples; divided by the group's standard deviation plus
    --std_eps only with --norm_group_std; continuous rewards are taken as they are.
"""
from math import comb

import torch
from torch import Tensor

from lightrft.algorithms.base import advantage, from_outcome, group_scale, reward_groups
from lightrft.config.schema import AlgorithmConfig
from lightrft.types import Experience


@advantage("grpo_passk", needs_group=True, reads=("pass_k", "norm_group_std", "std_eps"))
def grpo_passk(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Return advantages [T]."""
    group, live = reward_groups(exp, cfg)
    outcome = torch.zeros_like(exp.rewards)
    for number in exp.group_ids[live].unique():
        members = (exp.group_ids == number) & live
        outcome[members] = added_to_best(exp.rewards[members], cfg.pass_k)
    return from_outcome(exp, outcome / group_scale(group, cfg), cfg)


def added_to_best(rewards: Tensor, k: int) -> Tensor:
    """[n]: ``mean(max(0, r_i - max(S)))`` over the subsets S of k - 1 other rewards; k = 0 or above n means n."""
    n = len(rewards)
    k = min(k or n, n)
    values, order = rewards.double().sort()
    # chance that the best of S is the j-th smallest reward, one that lies below r_i
    chance = torch.tensor([comb(j, k - 2) / comb(n - 1, k - 1) for j in range(n)], dtype=values.dtype)
    above = torch.tril(values[:, None] - values, diagonal=-1)  # r_i - r_j
    return torch.empty_like(rewards).index_copy_(0, order, (above @ chance).to(rewards.dtype))
