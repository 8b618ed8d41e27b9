"""Checks and estimates that all trainers have."""
from collections.abc import Iterator

from lightrft.config.options import show
from lightrft.config.tree import build, flatten
from lightrft.models.activations import ModelShape
from lightrft.preflight.base import Preflight
from lightrft.preflight.checks import Finding
from lightrft.preflight.checks.run_plan import backward, MARGIN, memory_verdict
from lightrft.preflight.cost import GIB, known_model
from lightrft.preflight.hardware import Machine
from lightrft.preflight.memory import memory_lines
from lightrft.preflight.shared_rules import missing_optimizer, training_problems
from lightrft.strategy.memory import ModelSize

MODES: tuple[bool | str, ...] = (False, "selective", True)  # of --gradient_checkpointing, the fastest first
LARGE = 10**9  # parameters from which all activations are recomputed, where they cannot be counted


class TrainingPreflight(Preflight):
    """Checks and estimates of a trainer."""

    def problems(self, world_size: int, cuda: bool, local_ranks: int) -> Iterator[str]:
        """Yield the problems of the options that all trainers have."""
        yield from super().problems(world_size, cuda, local_ranks)
        yield from training_problems(self.config, world_size, cuda)

    def missing_packages(self) -> Iterator[str]:
        """Yield the missing package of the optimizer."""
        yield from missing_optimizer(self.config.train)

    def estimates(self, machine: Machine) -> list[str]:
        """List the contents of a step, the memory, and what the tree estimates besides."""
        size, shape = self._known_model(machine)
        return [
            *self.summary(machine.ranks), *memory_lines(self.config, machine.ranks, size, machine.device, shape),
            *self._verdict_lines(machine), *self.further_estimates(machine, size)
        ]

    def further_estimates(self, machine: Machine, size: ModelSize | None) -> list[str]:
        """List what is estimated besides the memory; ``size``: of the trained model, if it is known."""
        return []

    def verdict(self, machine: Machine) -> Finding | None:
        """Compare the estimate with the memory of a GPU."""
        if not machine.device.cuda:
            return None
        size, shape = self._known_model(machine)
        if size is None:
            return None
        return memory_verdict(self.config, machine.ranks, size, machine.device, shape)

    def recomputation(self, machine: Machine) -> tuple[bool | str, str]:
        """Choose as few as the plan of the backward pass leaves room for, with the margin of the verdict."""
        size, shape = self._known_model(machine) if machine.device.cuda else (None, None)
        if size is None:
            return False, "no model" if machine.device.cuda else "no GPU"
        if shape is None:
            return size.total > LARGE, f"{size.total / 1e9:.2g} billion parameters, activations not counted"
        needed: dict[bool | str, float] = {}
        for mode in MODES:
            plan = build(type(self.config), flatten(self.config) | {"gradient_checkpointing": mode})
            needed[mode] = backward(plan, machine.ranks, size, machine.device, shape)
            if needed[mode] * (1 + MARGIN) <= machine.device.free:
                break
        gib = {other: f"{value / GIB:.1f}" for other, value in needed.items()}
        reason = f"backward takes {gib.pop(mode)} of {machine.device.free / GIB:.1f} GiB"
        return mode, "; ".join([reason, *(f"{show(other)} would take {value}" for other, value in gib.items())])

    def _known_model(self, machine: Machine) -> tuple[ModelSize | None, ModelShape | None]:
        m = self.config.model
        return known_model(m.pretrain, machine.device.cuda, self.has_logits, m.freeze_prefix)

    def _verdict_lines(self, machine: Machine) -> list[str]:
        """Say that a plan fits on a GPU, and warn if it leaves little; one that does not fit is an error."""
        found = self.verdict(machine)
        if found is None or found.verdict == "fail":
            return []
        return [found.text if found.verdict == "ok" else f"warning: {found.text}; {found.remedy}"]
