"""Advantages from the rewards that follow a token, against a critic, a greedy response or nothing."""
import torch
from torch import Tensor

from lightrft.algorithms.base import action_mask, advantage, from_outcome
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.returns import discounted_returns, gae as estimate
from lightrft.types import Experience


@advantage("gae", needs_critic=True, takes_steps=True, reads=("lambd", ))
def gae(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """Generalised advantage estimation with a learned critic.

    Paper: Schulman et al. 2016, https://arxiv.org/abs/1506.02438
    Equation: A_t = sum_l (gamma * lambda)^l * (r_{t+l} + gamma * V_{t+l+1} - V_{t+l}) (eq. 16)
    Degenerate: one action token: A = r - V.
    Deviation: time counts action tokens only; the tokens of an environment between two turns are skipped.

    Returns:
        Advantages [T]. The caller computes the critic's target, ``advantages + values``, before any whitening.
    """
    return estimate(exp.token_rewards, exp.values, action_mask(exp), exp.cu_seqlens, cfg.gamma, cfg.lambd)[0]


@advantage("reinforce", takes_steps=True, reads=())
def reinforce(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """The plain discounted return, no baseline and no normalisation.

    Paper: Williams 1992, https://doi.org/10.1007/BF00992696
    Equation: A_t = sum_l gamma^l * r_{t+l}
    Degenerate: rewards that never differ still push every token; add a baseline or --advantages_norm.
    Deviation: none.

    Returns:
        Advantages [T].
    """
    return discounted_returns(exp.token_rewards, action_mask(exp), exp.cu_seqlens, cfg.gamma)


@advantage("remax", needs_greedy=True, reads=())
def remax(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """ReMax: the reward of the prompt's greedy response is the baseline.

    Paper: Li et al. 2023, https://arxiv.org/abs/2310.10505
    Equation: A_i = r_i - r(greedy response to the same prompt) (algorithm 1)
    Degenerate: a greedy response without a reward: 0 for its whole group, counted in reward/greedy_unscored.
    Deviation: the baseline goes through the same length penalty, running scale and clip as the rewards; the running
        statistics see sampled responses only. The KL of the greedy response is not in the baseline.

    Returns:
        Advantages [T].
    """
    known = exp.scored & ~exp.baseline_rewards.isnan()
    return from_outcome(exp, torch.where(known, exp.rewards - exp.baseline_rewards, 0), cfg)
