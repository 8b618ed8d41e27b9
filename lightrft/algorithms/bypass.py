"""Bypass: the engine's log-probs are the old log-probs, which saves the forward pass that computes them.

Paper: plain PPO, Schulman et al. 2017, https://arxiv.org/abs/1707.06347, whose old policy is the one that sampled
    (against a separate proximal policy: Hilton et al. 2021, https://arxiv.org/abs/2110.00641)
Equation: w_t = 1, rho_t = pi_t / pi_rollout_t in the policy loss
Degenerate: engine and trainer agree: none.
Deviation: none. The clip of the policy loss then bounds mismatch and update together.
"""
import torch
from torch import Tensor

from lightrft.algorithms.base import correction
from lightrft.config.schema import AlgorithmConfig
from lightrft.types import Experience


@correction("bypass")
def bypass(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """[T] of ones; the trainer puts ``rollout_logprobs`` in the place of ``old_logprobs``."""
    return torch.ones_like(exp.loss_mask, dtype=torch.float32)
