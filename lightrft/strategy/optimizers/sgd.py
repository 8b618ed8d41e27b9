"""Stochastic gradient descent, with momentum if it is asked for."""
from dataclasses import dataclass
from typing import Any

from lightrft.config.options import option
from lightrft.config.shared_schema import OptimConfig
from lightrft.strategy.optimizers.base import optimizer


@dataclass
class SGDOptions(OptimConfig):
    """Options of sgd."""
    sgd_momentum: float = option(0.0, "momentum of --optim sgd; 0: none, and no optimizer state", within="[0, 1)")


@optimizer("sgd", moments=lambda cfg: ("momentum_buffer", ) if cfg.sgd_momentum else (), options=SGDOptions)
def sgd(groups: list[dict[str, Any]], cfg: SGDOptions) -> Any:
    """Build PyTorch's fused SGD. Its weight decay is added to the gradient."""
    import torch
    return torch.optim.SGD(groups, momentum=cfg.sgd_momentum, fused=not groups[0]["params"][0].is_meta)
