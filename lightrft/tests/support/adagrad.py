"""Adagrad: the rate of each weight falls with its squared gradients so far (Duchi, Hazan and Singer, JMLR 2011)."""
from dataclasses import dataclass
from typing import Any

from lightrft.config.options import option
from lightrft.config.shared_schema import OptimConfig
from lightrft.strategy.optimizers.base import optimizer


@dataclass
class AdagradOptions(OptimConfig):
    """Options of adagrad."""
    adagrad_decay: float = option(0.0, "adagrad: divide the learning rate by 1 + this * steps", within="[0, inf)")


@optimizer("adagrad", moments=("sum", ), options=AdagradOptions)
def adagrad(groups: list[dict[str, Any]], cfg: AdagradOptions) -> Any:
    """Build PyTorch's Adagrad."""
    import torch
    return torch.optim.Adagrad(groups, lr_decay=cfg.adagrad_decay)
