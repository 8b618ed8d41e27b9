"""One optimizer step over the micro-batches of a mini-batch, and the schedule of its learning rate.

Policies, critics and supervised models share it.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.config.schema import OptimConfig
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.strategy.optimizer import OptimSpec
from lightrft.types import Experience, NUMBERS
from lightrft.utils.errors import ExpectedError
from lightrft.utils.logging import get_logger
from lightrft.utils.progress import phase
from lightrft.utils.timer import Timer


class NonFiniteTraining(ExpectedError, RuntimeError):
    """Several optimizer steps in a row had a non-finite loss or gradient."""


def none_applied(steps: int) -> NonFiniteTraining:
    """Return the error of a run of ``steps`` steps that has changed nothing."""
    return NonFiniteTraining(f"the loss or the gradient of all {steps} steps was not finite, and none was applied: the "
                             "model is the one of --pretrain. Lower the learning rate, or look for broken weights")


@dataclass
class StepResult:
    """Result of one optimizer step: loss over all ranks, learning rate, and gradient norm before clipping.

    ``outcome`` is "done", or the reason for no step: "empty" (no token was kept) or "bad" (something was not finite).
    """
    loss: float
    lr: float
    grad_norm: float = 0.0
    outcome: str = "done"


@dataclass(frozen=True)
class Passes:
    """Additional micro-batches of an optimizer step, whose loss has other data and denominators.

    Attributes:
        take: returns the sequences of a micro-batch.
        micro_batches: sequence indices of this rank; every rank has equally many.
        loss_of: a micro-batch -> its share of the loss.
    """
    take: Callable[[list[int]], Experience]
    micro_batches: list[list[int]]
    loss_of: Callable[[Experience], Tensor]


class OptimizerStep:
    """Runs the optimizer steps of one model and counts the bad ones.

    A step is not made when its mini-batch keeps no token, or when a loss or gradient is not finite on any rank.
    ``max_bad_steps`` bad ones in a row raise :class:`NonFiniteTraining`.
    """

    def __init__(self, cfg: OptimConfig, strategy: StrategyBase, timer: Timer) -> None:
        self.cfg, self.strategy, self.timer, self.bad_in_a_row = cfg, strategy, timer, 0

    def run(self, prepared: Prepared, take: Callable[[list[int]], Experience], micro_batches: list[list[int]],
            kept_tokens: float, loss_of: Callable[[Experience], Tensor], extra: Passes | None = None) -> StepResult:
        """Back-propagate ``loss_of`` each micro-batch (its share of one global loss) and step.

        Args:
            take: returns the sequences of a micro-batch; an empty one is a dummy without tokens in the loss.
            micro_batches: sequence indices of this rank; every rank has equally many. kept_tokens: tokens in the loss
            of the whole mini-batch, over all ranks. extra: additional parts of the loss; alone they cause no step.
        """
        prepared.model.train()
        passes = [Passes(take, micro_batches, loss_of), *([extra] if extra else [])]
        own, lr = self._backward(prepared, passes), prepared.scheduler.get_last_lr()[0]
        total = 0.0
        for mine, value in zip(own.tolist(), self.strategy.sum_data_ranks(own).tolist()):
            if not math.isfinite(value):  # that of any rank is not
                self.strategy.discard_gradients(prepared)
                return self._bad("loss", mine, lr, passes)
            total += value
        if not kept_tokens:
            self.strategy.discard_gradients(prepared)
            return StepResult(total, lr, outcome="empty")
        with self.timer("optimizer"):
            norm = self.strategy.optimizer_step(prepared, self.cfg.max_norm)
        if not math.isfinite(norm):
            return self._bad("gradient norm", norm, lr, passes)
        self.bad_in_a_row = 0
        return StepResult(total, lr, norm)

    def _backward(self, prepared: Prepared, passes: list[Passes]) -> Tensor:
        """Accumulate the gradients of all micro-batches; return their losses on this rank, float64 on the host.

        The host waits for the device once, at the end.
        """
        losses, work = [], [(each, part) for each in passes for part in each.micro_batches]
        for number, (each, part) in enumerate(phase(work, "update", "micro-batch")):
            micro_batch = each.take(part).to(self.strategy.device)
            with self.timer("forward"):
                loss = each.loss_of(micro_batch)
            with self.timer("backward"):
                self.strategy.backward(loss, prepared, last=number == len(work) - 1)
            losses.append(loss.detach().double())
        with self.timer("backward"):
            return torch.stack(losses).cpu()

    def _bad(self, what: str, value: float, lr: float, passes: list[Passes]) -> StepResult:
        self.bad_in_a_row += 1
        hint = _hint(_nan_numbers(passes))
        get_logger().warning(f"optimizer step skipped on all ranks: {what} is not finite (here {value}){hint}")
        if self.bad_in_a_row >= self.cfg.max_bad_steps:
            raise NonFiniteTraining(
                f"{self.bad_in_a_row} optimizer steps in a row had a non-finite {what}; none was applied{hint}. Lower "
                "the learning rate, look for huge rewards or broken weights, or raise --max_bad_steps")
        return StepResult(float("nan"), lr, outcome="bad")


def _nan_numbers(passes: list[Passes]) -> list[str]:
    """Return the names of declared numbers that are NaN for a sequence, or for a token in the loss."""
    names = set()
    for exp in (each.take(part) for each in passes for part in each.micro_batches if part):
        for name, values in exp.extra.items():
            values = values[exp.loss_mask] if NUMBERS.get(name).axis == "T" else values
            names |= {name} if values.isnan().any() else set()
    return sorted(names)


def _hint(numbers: list[str]) -> str:
    """Return what NaN in ``numbers`` may mean; empty without any."""
    if not numbers:
        return ""
    return (f"; NaN in this batch: {', '.join(map(repr, numbers))}. If the loss or the advantage reads such a number, "
            "declare it with missing=0, or leave out the responses without it")


def mean(values: list[float]) -> float:
    """Return the mean; 0 where there is no value."""
    return sum(values) / len(values) if values else 0.0


def step_metrics(name: str, results: list[StepResult]) -> dict[str, float]:
    """Return ``NAME/{loss,grad_norm,lr,optimizer_steps,skipped_steps,empty_steps}`` over the steps of one rollout.

    ``lr`` is the rate of the last step; skipped are the steps that were not finite, empty those without a kept token.
    The loss is NaN where every step was skipped.
    """
    done = [result for result in results if result.outcome == "done"]
    outcomes = [result.outcome for result in results]
    return {
        f"{name}/loss": mean([result.loss for result in done or results]),
        f"{name}/grad_norm": mean([result.grad_norm for result in done]),
        f"{name}/lr": results[-1].lr,
        f"{name}/optimizer_steps": len(done),
        f"{name}/skipped_steps": outcomes.count("bad"),
        f"{name}/empty_steps": outcomes.count("empty"),
    }


def lr_schedule(name: str, total_steps: int, warmup_ratio: float, min_ratio: float) -> Callable[[int], float]:
    """Return the factor on the peak learning rate at optimizer step 0, 1, ...: linear warm-up, then ``name``.

    Args:
        name: ``constant``, ``linear`` (to 0) or ``cosine_with_min_lr`` (to ``min_ratio``).
        total_steps: optimizer steps of the whole run.
        warmup_ratio: share of ``total_steps`` spent warming up, rounded up.
        min_ratio: floor of the cosine.
    """
    warmup = math.ceil(round(total_steps * warmup_ratio, 6))  # 100 * 0.07 is a little more than 7
    decay = {
        "constant": lambda x: 1.0,
        "linear": lambda x: 1.0 - x,
        "cosine_with_min_lr": lambda x: min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * x)),
    }[name]

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return decay(min((step - warmup) / max(total_steps - warmup, 1), 1.0))

    return factor


def optim_spec(cfg: OptimConfig, lr: float, total_steps: int) -> OptimSpec:
    """Return the optimizer and the schedule that the options ask for, with the peak learning rate ``lr``."""
    return OptimSpec(lr, cfg, schedule_of(cfg, total_steps))


def schedule_of(cfg: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Return the schedule that the options ask for."""
    return lr_schedule(cfg.lr_scheduler, total_steps, cfg.lr_warmup_ratio, cfg.lr_min_ratio)
