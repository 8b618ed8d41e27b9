"""Importance ratios and the clipped surrogate of PPO, per token."""
from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def safe_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """``exp(new - old)`` where mask, else 1: [T]. A NaN or inf outside the mask reaches neither value nor gradient.

    The log-ratio is limited to +-20 nats, beyond which the gradient is 0.
    """
    return torch.where(mask, new - old, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


class Clipped(NamedTuple):
    """A clipped token loss and where a bound was active, all [T]."""
    loss: Tensor
    low: Tensor  # bool, the lower bound replaced the ratio (A < 0)
    high: Tensor  # bool, the upper bound replaced the ratio (A > 0)
    dual: Tensor  # bool, the dual bound replaced the ratio (A < 0)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None) -> Clipped:
    """``max(-ratio * A, -ratio.clamp(1 - low, 1 + high) * A)``; with ``dual``, at most ``-dual * A`` where A < 0.

    PPO (arXiv:1707.06347, eq. 7); bounds apart: DAPO's Clip-Higher (arXiv:2503.14476); dual clip: arXiv:1912.09729.
    """
    plain, bounded = -ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages
    loss, replaced = torch.maximum(plain, bounded), bounded > plain
    capped = torch.zeros_like(replaced)
    if dual is not None:
        capped = (advantages < 0) & (loss > -dual * advantages)
        loss = torch.where(capped, -dual * advantages, loss)
    return Clipped(loss, replaced & (advantages < 0), replaced & (advantages > 0), capped)
