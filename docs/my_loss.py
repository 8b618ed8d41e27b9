"""A policy loss with an option of its own."""
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.algorithms.base import policy_loss, ratio_metrics
from lightrft.config.options import option
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.surrogate import safe_ratio
from lightrft.types import Experience


@dataclass
class TiltedOptions(AlgorithmConfig):
    """Options of ``--policy_loss tilted``: those of every algorithm, and these."""
    tilt: float = option(0.5, "tilted: weight of the tokens whose advantage is negative", within="[0, 1]")


@policy_loss("tilted", skips_zero=True, reads=(), options=TiltedOptions)
def tilted(logprobs: Tensor, exp: Experience, cfg: TiltedOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Importance sampling with a smaller weight for tokens whose advantage is negative.

    Equation: loss_t = -w_t * rho_t * A_t, w_t = tilt where A_t < 0, else 1
    """
    ratio = safe_ratio(logprobs, exp.old_logprobs, exp.loss_mask)
    weight = torch.where(exp.advantages < 0, cfg.tilt, 1.0)
    return -weight * ratio * exp.advantages, ratio_metrics(ratio) | {"tilted_frac": (weight < 1).float()}
