"""Choice of the strategy; each backend is imported only when it is chosen."""
import os
from importlib.util import find_spec

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.deepspeed import NO_DEEPSPEED
from lightrft.utils.errors import UserError


def get_strategy(cfg: StrategyConfig, *, bf16: bool = False) -> StrategyBase:
    """Create the strategy that ``cfg.strategy`` names, not yet set up.

    Args:
        cfg: the options; "auto" is fsdp when torchrun started more than one rank, else single.
        bf16: compute in bfloat16; master weights, gradients' sums and optimizer state stay float32.

    Raises:
        ValueError: an unknown name, or "single" under torchrun with more than one rank.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    name = cfg.resolved(world_size)
    if name == "single":
        if world_size > 1:
            raise UserError(f"--strategy single with {world_size} ranks would train {world_size} separate models; "
                            "use --strategy fsdp, or start one process")
        from lightrft.strategy.fake_strategy import FakeStrategy
        return FakeStrategy(cfg, bf16)
    if name == "fsdp":
        from lightrft.strategy.fsdp.fsdpv2_strategy import FSDPV2Strategy
        return FSDPV2Strategy(cfg, bf16)
    if name == "deepspeed":
        if find_spec("deepspeed") is None:
            raise UserError(NO_DEEPSPEED)
        from lightrft.strategy.deepspeed.deepspeed_strategy import DeepspeedStrategy
        return DeepspeedStrategy(cfg, bf16)
    raise UserError(f"unknown strategy {name!r}; known: auto, single, fsdp, deepspeed")
