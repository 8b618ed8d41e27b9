"""Registry of optimizers: how each is built, its state, and what strategies may do with it. Needs no torch.

An entry builds a ``torch.optim.Optimizer`` for parameter groups that have ``params``, ``lr`` and ``weight_decay``. The
strategies own its state: per parameter a number of steps, ``step``, and one float32 tensor per name of ``moments`` in
the shape of the parameter. State begins as zeros, which must mean the same as no state, so that checkpoints, offload,
8 bits and the plan of memory know it. Unless an entry ``needs_whole`` parameters, an update is element by element:
FSDP2 calls it with rows of them, ZeRO with slices of their elements. Training begins with a test of both.

An optimizer may declare its own options, as algorithms do (:mod:`lightrft.algorithms.base`): lines of a dataclass
derived from ``OptimConfig``.
"""
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightrft.config.foreign_values import remedies
from lightrft.config.shared_schema import OptimConfig
from lightrft.config.tree import declare
from lightrft.strategy.memory import BLOCKS
from lightrft.utils.errors import UserError
from lightrft.utils.registry import Chosen, Registry

Build = Callable[[list[dict[str, Any]], Any], Any]
Moments = tuple[str, ...] | Callable[[Any], tuple[str, ...]]
B = TypeVar("B", bound=Build)


@dataclass(frozen=True, kw_only=True)
class Optimizer(Chosen):
    """Registered optimizer.

    Attributes:
        build: ``(groups, cfg) -> torch.optim.Optimizer``; ``cfg`` is the group of the options of the optimizer.
        state: names of the moments, or ``cfg`` -> these names.
        needs_whole: an update of a part of a parameter is another one than that part of the update of the whole.
        coded: moments that rest in 8 bits -> whether they have a sign.
    """
    build: Build
    state: Moments
    needs_whole: bool = False
    coded: Mapping[str, bool] = field(default_factory=dict)

    def moments(self, cfg: OptimConfig) -> tuple[str, ...]:
        """Return the names of the moments."""
        return self.state(cfg) if callable(self.state) else self.state

    def state_bytes(self, cfg: OptimConfig) -> float:
        """Return the bytes of moments at rest per trained element, all in matrices of whole blocks."""
        return sum(1 + 4 / BLOCKS[0] if name in self.coded else 4.0 for name in self.moments(cfg))

    def refusal(self, name: str, strategy: str, zero_stage: int) -> str:
        """Return why a strategy cannot train with this optimizer, called ``name``, and what can; empty if it can."""
        divides = strategy == "fsdp" or strategy == "deepspeed" and zero_stage > 0
        if self.needs_whole and divides:
            return (f"--optim {name}: updates whole parameters, which --strategy {strategy} divides among the ranks; "
                    "use --strategy single, deepspeed with --zero_stage 0, or --optim adamw")
        if self.coded and strategy == "deepspeed":
            return (f"--optim {name}: --strategy deepspeed manages its own optimizer state, in float32; use --strategy "
                    "fsdp, or --optim adamw")
        return ""


OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", remedies("optim"),
                                           decorator="optimizer(NAME, ...) of lightrft.strategy.optimizers.base")


def optimizer(*names: str, moments: Moments, needs_whole: bool = False, coded: Mapping[str, bool] | None = None,
              reads: tuple[str, ...] = (), options: type[OptimConfig] | None = None) -> Callable[[B], B]:
    """Register the function that builds an optimizer, with its facts (:class:`Optimizer`).

    Args:
        reads: options of the package that it alone or with others reads, such as ``adam_betas``.
        options: a dataclass of options of its own.

    Raises:
        UserError: ``moments`` is a text, whose letters would be the names.
    """

    def add(build: B) -> B:
        if isinstance(moments, str):
            raise UserError(f"optimizer {', '.join(names)}: moments={moments!r} is a text; write "
                            f"moments=({moments!r}, )")
        own = declare(OptimConfig, options, reads)
        OPTIMIZERS.register(*names)(Optimizer(build=build, state=moments, needs_whole=needs_whole, coded=coded or {},
                                              reads=reads, own=own))
        return build

    return add
