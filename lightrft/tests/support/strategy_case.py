"""One strategy under test, and what its checks read."""
import gc
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from lightrft.config.shared_schema import StrategyConfig
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.strategy.deepspeed.deepspeed_strategy import DeepspeedStrategy, import_deepspeed
from lightrft.strategy.deepspeed.partitions import ZeroOptimizer
from lightrft.strategy.optimizer import OptimSpec
from lightrft.strategy.sharding import full_shape
from lightrft.tests.support.sharded import wholes
from lightrft.tests.support.tiny_lm import MICRO_BATCHES, SPEC, TinyLM, loss_of, share


def freeze_imports(cfg: StrategyConfig) -> None:
    """Hide what is imported, itself too, from the search for garbage in each ``prepare`` of DeepSpeed, and then what
    has become old."""
    if cfg.strategy == "deepspeed":
        import_deepspeed()
        import_module("lightrft.tests.support.young_garbage")
    gc.freeze()


@dataclass
class Case:
    """A strategy that is set up, a folder all ranks see, and the optimizer."""
    strategy: StrategyBase
    folder: Path
    spec: OptimSpec = SPEC

    def prepare(self, **options) -> Prepared:
        with self.strategy.init_model_context():
            model = TinyLM(**options)
        return self.strategy.prepare(model, self.spec)

    def backward(self, prepared: Prepared, step: int, count: int = MICRO_BATCHES, scale: float = 1.0) -> None:
        strategy = self.strategy
        batches = share(step, strategy.rank, strategy.world_size, strategy.device, count)
        for number, batch in enumerate(batches):
            loss = loss_of(prepared.model, batch, scale)
            strategy.backward(loss, prepared, last=number == len(batches) - 1)

    def train(self, prepared: Prepared, steps: range, max_norm: float = 1.0, count: int = MICRO_BATCHES) -> list[float]:
        norms = []
        for step in steps:
            self.backward(prepared, step, count)
            norms.append(self.strategy.optimizer_step(prepared, max_norm))
        return norms

    def weights(self, prepared: Prepared) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.strategy.full_params(prepared.model)}

    def state(self, prepared: Prepared) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in wholes(self.strategy.state_dict(prepared)).items()}

    @cached_property
    def four_steps(self) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
        """Norms of four steps that nothing disturbs, and the states after two of them and after all."""
        prepared = self.prepare()
        first, at_2 = self.train(prepared, range(2)), self.state(prepared)
        return first + self.train(prepared, range(2, 4)), at_2, self.state(prepared)


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], atol: float = 0.0) -> None:
    assert list(first) == list(second), f"names differ: {set(first) ^ set(second)}"
    for name, value in first.items():
        difference = (value.cpu().double() - second[name].cpu().double()).abs()
        assert difference.numel() == 0 or difference.max() <= atol, f"{name} differs by {difference.max()}"


def whole_gradients(strategy: StrategyBase, prepared: Prepared) -> dict[str, Tensor]:
    """Every gradient, put together from the ranks' parts; a collective."""
    if not isinstance(prepared.optimizer, ZeroOptimizer):
        named = prepared.model.named_parameters()
        return wholes({name: param.grad for name, param in named if param.grad is not None})
    parts, slices, found = strategy.gradients(prepared), prepared.optimizer.partitions.slices, {}
    for name, shape in shapes(prepared).items():
        if name not in slices:  # frozen
            continue
        whole = torch.zeros(shape, device=strategy.device)
        if name in parts:
            whole.view(-1)[slices[name].start:slices[name].start + len(parts[name])] = parts[name]
        found[name] = strategy.all_reduce(whole)
    return found


def shapes(prepared: Prepared) -> dict[str, torch.Size]:
    """The full shape of every parameter."""
    return {name: full_shape(param) for name, param in prepared.model.named_parameters()}


def communicates_at_the_end(strategy: StrategyBase, prepared: Prepared) -> bool:
    """True if passes before the last of a step communicate nothing, so that ranks may differ in their number."""
    if isinstance(strategy, DeepspeedStrategy):
        return strategy.cfg.zero_stage < 2
    placement = strategy._placements[prepared.model]
    return placement.keep_full and not placement.every
