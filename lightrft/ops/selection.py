"""Selection of the tokens of a mini-batch that a loss treats differently."""
import torch
from torch import Tensor

from lightrft.ops.segment import masked_mean


def covariance(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """``(x - x[mask].mean()) * (y - y[mask].mean())`` where mask, else 0: float64 [T]; its mean is Cov(x, y)."""
    x, y = x.double(), y.double()
    return torch.where(mask, (x - masked_mean(x, mask)) * (y - masked_mean(y, mask)), 0)


def share(ratio: float, mask: Tensor) -> int:
    """``floor(ratio * mask.sum())``, but at least 1."""
    return max(int(ratio * int(mask.sum())), 1)


def draw(candidates: Tensor, count: int, seed: int) -> Tensor:
    """bool [T]: ``count`` of the ``candidates`` (all, when there are fewer), drawn with ``seed``; on the CPU."""
    index = candidates.nonzero().flatten()
    chosen = torch.zeros_like(candidates)
    chosen[index[torch.randperm(len(index), generator=torch.Generator().manual_seed(seed))[:count]]] = True
    return chosen


def largest(x: Tensor, count: int, mask: Tensor) -> Tensor:
    """bool [T]: the ``count`` largest of ``x[mask]`` (all, when there are fewer); of equal ones the first."""
    order = torch.where(mask, x, -torch.inf).argsort(descending=True, stable=True)
    chosen = torch.zeros_like(mask)
    chosen[order[:count]] = True
    return chosen & mask
