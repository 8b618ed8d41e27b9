"""No correction: the rollout is taken as a sample of the trainer's own policy.

Paper: the "no correction" baseline of IMPALA, Espeholt et al. 2018, https://arxiv.org/abs/1802.01561
Equation: w_t = 1
Degenerate: biased by as much as engine and trainer disagree, which is reported in every step.
Deviation: none.
"""
import torch
from torch import Tensor

from lightrft.algorithms.base import correction
from lightrft.config.schema import AlgorithmConfig
from lightrft.types import Experience


@correction("none")
def none(exp: Experience, cfg: AlgorithmConfig) -> Tensor:
    """[T] of ones."""
    return torch.ones_like(exp.loss_mask, dtype=torch.float32)
