"""Base of the classes that check and estimate a run before it starts: one for each tree of options.

A tree names its class in ``PREFLIGHT``. A class has everything that is checked, estimated and reported of its tree
alone; a tree that names none has that of the tree it derives from.
"""
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from lightrft.config.shared_schema import Tree
from lightrft.models.activations import ModelShape
from lightrft.preflight.checks import Finding
from lightrft.preflight.hardware import Device, Machine
from lightrft.preflight.shared_rules import common_problems, unused
from lightrft.rollout.engines import ByPhase
from lightrft.strategy.memory import ModelSize

TrainingPhases = tuple[float, float, float, float]  # bytes between steps, and in log-probs, backward and optimizer


class Preflight:
    """Checks and estimates of a run. Those here are of a command that trains nothing, and of memory without a rollout.
    """
    config: Tree
    has_rollout = False  # generates between the updates
    has_logits = True  # of the whole vocabulary, from the head of the model

    def __init__(self, config: Tree) -> None:
        self.config = config

    @property
    def trains_critic(self) -> bool:
        """True if a critic is trained, as some advantage estimators need."""
        return False

    def problems(self, world_size: int, cuda: bool, local_ranks: int) -> Iterator[str]:
        """Yield one sentence per problem of a run on ``world_size`` ranks, ``local_ranks`` on each machine."""
        yield from common_problems(self.config)

    def missing_packages(self) -> Iterator[str]:
        """Yield packages that the run needs and this machine lacks."""
        yield from ()

    def warnings(self) -> Iterator[str]:
        """Yield warnings about choices that are allowed but rarely intended."""
        yield from unused(self.config)

    def summary(self, world_size: int) -> list[str]:
        """Describe a step of the run, in one line."""
        return []

    def estimates(self, machine: Machine) -> list[str]:
        """List what the run takes on ``machine``."""
        return []

    def verdict(self, machine: Machine) -> Finding | None:
        """Compare the estimate with the memory of a GPU; None on a CPU, or if nothing is known of the model.

        A command that trains nothing leaves it to the engine, which knows how much memory it was given, or to a server
        that loads at once.
        """
        return None

    def recomputation(self, machine: Machine) -> tuple[bool | str, str]:
        """Choose the activations that the backward pass computes again (``--gradient_checkpointing``), with the reason.
        """
        return False, "nothing is trained"

    def by_phase(self, held: TrainingPhases) -> ByPhase:
        """Return the bytes by phase of what the trainer holds."""
        return (0, *held[1:], 0)

    def not_trained(self, world_size: int, size: ModelSize, device: Device) -> dict[str, ByPhase]:
        """Return the bytes of all but the trained models, by purpose and phase."""
        return {}

    def pretraining_tokens(self, world_size: int) -> int:
        """Count the tokens of a micro-batch of other rows in the steps of a policy."""
        return 0

    def media_tokens(self, world_size: int, tokens: int) -> int:
        """Count the most tokens of unique media in a micro-batch of ``tokens``."""
        return tokens

    def of_engine(self, world_size: int, device: Device, shape: ModelShape | None) -> dict[str, ByPhase]:
        """Return the rows of :mod:`~lightrft.preflight.overhead` of a rollout engine."""
        return {}

    def no_cache(self, world_size: int, size: ModelSize, device: Device) -> Iterator[str]:
        """Yield the error of an engine without room for a key-value cache."""
        yield from ()

    def engine_changes(self, world_size: int) -> Iterator[dict[str, Any]]:
        """Yield changes to the memory of an engine and to the ranks that share one, the nearest first."""
        yield from ()

    def short_cache(self, world_size: int, shape: ModelShape | None, device: Device,
                    held: dict[str, ByPhase]) -> Iterator[tuple[str, str]]:
        """Yield the cache for which what is ``held`` may leave no room, and the remedy."""
        yield from ()

    def cache_notes(self) -> Iterator[str]:
        """Yield what a table of the memory leaves out of the engine's."""
        yield from ()


def preflight(config: Tree) -> Preflight:
    """Return the checks and estimates of a tree."""
    module, _, name = config.PREFLIGHT.rpartition(".")
    return getattr(import_module(module), name)(config)
