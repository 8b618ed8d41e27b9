"""AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101), in float32 and in 8 bits."""
from typing import Any

from lightrft.config.shared_schema import OptimConfig
from lightrft.strategy.optimizers.base import optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


@optimizer("adamw_8bit", moments=MOMENTS, coded={"exp_avg": True, "exp_avg_sq": False}, reads=("adam_betas", ))
@optimizer("adamw", moments=MOMENTS, reads=("adam_betas", ))
def adamw(groups: list[dict[str, Any]], cfg: OptimConfig) -> Any:
    """Build PyTorch's fused AdamW, which does the whole update in one pass, on CUDA and on CPU."""
    import torch
    beta1, beta2 = cfg.adam_betas
    fused = not groups[0]["params"][0].is_meta  # in a plan they have no values
    return torch.optim.AdamW(groups, betas=(beta1, beta2), fused=fused)
