"""Choice of the strategy, and the strategy of one process; each other backend is imported only when it is chosen."""
import os
from argparse import Namespace
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from lightrft.config.namespace import config_of
from lightrft.config.schema import StrategyConfig
from lightrft.strategy.base import Prepared, StrategyBase, named_in
from lightrft.strategy.deepspeed import NO_DEEPSPEED
from lightrft.strategy.materialize import materialize
from lightrft.strategy.mixed_precision import ComputeCopy, round_frozen
from lightrft.strategy.optimizer import LocalOptimizer, OptimSpec, create_scheduler
from lightrft.utils.env import World
from lightrft.utils.errors import end_in_one_line, UserError
from lightrft.utils.gpu import rank_device
from lightrft.utils.launcher import adopt_launcher
from lightrft.utils.logging import silent

REDUCE_OPS = ("sum", "max", "min")


class SingleProcessStrategy(StrategyBase):
    """The whole model on one device, without a process group: the semantics that every other strategy is tested
    against."""

    def setup(self) -> None:
        """Choose the device."""
        self.device = rank_device(0, 1)

    def teardown(self) -> None:
        """Free the device's cached memory; there is no group to leave."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _prepare(self, model: nn.Module, optim: OptimSpec | None, shard_size: int) -> Prepared:
        """Place ``model`` on the device; ``shard_size`` has no meaning on one rank."""
        if optim is None:
            model.requires_grad_(False)
        if self.bf16:
            round_frozen(model)
        materialize(model, self.device)
        model.to(self.device)
        if optim is None:
            return Prepared(model)
        optimizer = LocalOptimizer(model.named_parameters(), optim, self.cfg.adam_offload)
        return Prepared(model, optimizer, create_scheduler(optimizer, optim), ComputeCopy(model) if self.bf16 else None)

    def all_reduce(self, value: Tensor, op: str = "sum") -> Tensor:
        """Return a copy; sums of bool are int64."""
        if op not in REDUCE_OPS:
            raise ValueError(f"unknown reduction {op!r}; known: {', '.join(REDUCE_OPS)}")
        return value.long() if op == "sum" and value.dtype == torch.bool else value.clone()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return ``[value]``."""
        return [value]

    def exchange(self, outgoing: list[Any]) -> list[Any]:
        """Return ``outgoing``."""
        return outgoing

    def barrier(self) -> None:
        """Wait for the work queued on the device; there are no other ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gathered(self, model: nn.Module, bucket_bytes: int,
                 names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the live parameters, detached; nothing is copied."""
        return ((name, param.detach()) for name, param in named_in(model, names))


FakeStrategy = SingleProcessStrategy  # its name in LightRFT


def get_strategy(cfg: StrategyConfig | Namespace, *, bf16: bool = False) -> StrategyBase:
    """Create the strategy that ``cfg.strategy`` names, not yet set up.

    Args:
        cfg: the options; "auto" is fsdp when torchrun started more than one rank, else single. The namespace of a
            script's own parser (:func:`lightrft.utils.cli_args.add_arguments`) stands for those in it; the trainer
            reads the others from it and sets the strategy up.
        bf16: compute in bfloat16; master weights, gradients' sums and optimizer state stay float32.

    Raises:
        ValueError: an unknown name, or "single" under torchrun with more than one rank.
    """
    adopt_launcher()
    if isinstance(cfg, Namespace):
        return _of_namespace(cfg)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    name = cfg.resolved(world_size)
    if name == "single":
        if world_size > 1:
            raise UserError(f"--strategy single with {world_size} ranks would train {world_size} separate models; "
                            "use --strategy fsdp, or start one process")
        return SingleProcessStrategy(cfg, bf16)
    if name == "fsdp":
        from lightrft.strategy.fsdp import FSDPV2Strategy
        return FSDPV2Strategy(cfg, bf16)
    if name == "deepspeed":
        if find_spec("deepspeed") is None:
            raise UserError(NO_DEEPSPEED)
        from lightrft.strategy.deepspeed.deepspeed_strategy import DeepspeedStrategy
        return DeepspeedStrategy(cfg, bf16)
    raise UserError(f"unknown strategy {name!r}; known: auto, single, fsdp, deepspeed")


def _of_namespace(args: Namespace) -> StrategyBase:
    """Create the strategy of a script that parses its command line itself; its rank is known before it is set up."""
    end_in_one_line()
    with silent():  # the trainer tells what it makes of them
        config, world = config_of(args).config, World.from_env()
    strategy = get_strategy(config.placement, bf16=bool(config.model.bf16))
    strategy.args = args
    strategy.rank, strategy.local_rank, strategy.world_size = world.rank, world.local_rank, world.world_size
    return strategy
