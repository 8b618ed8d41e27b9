"""Checks of :class:`OptimizerStep` for any number of ranks; started by test_optimizer_step, in its process or by
torchrun."""
import json
import math
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lightrft.config.schema import OptimConfig, StrategyConfig
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.strategy.optimizer import OptimSpec
from lightrft.strategy.strategy import get_strategy
from lightrft.trainer.optimizer_step import NonFiniteTraining, OptimizerStep, StepResult, step_metrics
from lightrft.trainer.batch_plan import select_micro_batch
from lightrft.types import Experience, number, NUMBERS
from lightrft.utils.timer import Timer

CHECKS: dict[str, Callable[[StrategyBase], None]] = {}


def check(function: Callable[[StrategyBase], None]) -> Callable[[StrategyBase], None]:
    """Register a check."""
    CHECKS[function.__name__] = function
    return function


class Line(nn.Module):
    """Two weights; token t is worth ``weights . (1, token)``."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1, bias=False)
        nn.init.constant_(self.line.weight, 0.5)

    def forward(self, exp: Experience) -> Tensor:
        """[T]."""
        tokens = exp.token_ids.float()
        return self.line(torch.stack([torch.ones_like(tokens), tokens], -1))[:, 0]


class Case:
    """A model, its optimizer step, and four sequences of two tokens: two per rank, one per micro-batch."""

    def __init__(self, strategy: StrategyBase, max_bad_steps: int = 3) -> None:
        with strategy.init_model_context():
            model = Line()
        self.strategy = strategy
        self.prepared: Prepared = strategy.prepare(model, OptimSpec(0.1, schedule=lambda step: 1.0 / (1 + step)))
        self.step = OptimizerStep(OptimConfig(max_bad_steps=max_bad_steps), strategy, Timer())
        self.exp = Experience(token_ids=torch.arange(1, 9), cu_seqlens=torch.arange(0, 9, 2, dtype=torch.int32),
                              loss_mask=torch.ones(8, dtype=torch.bool))

    def run(self, spoil: Callable[[Tensor, int], Tensor] | None = None, kept: float = 8.0) -> StepResult:
        """A step on the mean square; ``spoil(loss, micro-batch)`` changes the loss of the last rank only."""
        mine = [[i] for i in range(4)][self.strategy.rank::self.strategy.world_size]
        seen = []

        def loss_of(exp: Experience) -> Tensor:
            loss = self.prepared.model(exp).square().sum() / 8
            if not kept:
                loss = loss * 0.0
            seen.append(exp)
            last = self.strategy.rank == self.strategy.world_size - 1
            return spoil(loss, len(seen) - 1) if spoil and last else loss

        return self.step.run(self.prepared, partial(select_micro_batch, self.exp), mine, kept, loss_of)

    def weights(self) -> list[float]:
        """The full weight."""
        return [x for _, value in self.strategy.full_params(self.prepared.model) for x in value.flatten().tolist()]

    @property
    def rate(self) -> float:
        """The learning rate that comes next."""
        return self.prepared.scheduler.get_last_lr()[0]


def nan_loss(loss: Tensor, number: int) -> Tensor:
    """The second micro-batch is NaN."""
    return loss * math.nan if number == 1 else loss


def nan_gradient(loss: Tensor, number: int) -> Tensor:
    """A finite loss whose gradient is NaN: the derivative of a square root at 0, times 0."""
    return loss + (loss * 0.0).sqrt() * 0.0 if number == 1 else loss


@check
def a_good_step_is_the_global_one(strategy: StrategyBase) -> None:
    case = Case(strategy)
    result = case.run()
    values = torch.stack([torch.ones(8), torch.arange(1.0, 9.0)], -1)
    weight = torch.tensor([0.5, 0.5], requires_grad=True)
    loss = (values @ weight).square().mean()
    loss.backward()
    assert abs(result.loss - loss.item()) < 1e-5 and abs(result.grad_norm - weight.grad.norm().item()) < 1e-4, result
    assert all(abs(w - 0.4) < 1e-4 for w in case.weights()), case.weights()


@check
def a_bad_step_changes_nothing_and_is_counted(strategy: StrategyBase) -> None:
    for spoil in (nan_loss, nan_gradient):
        case, twin = Case(strategy), Case(strategy)
        before, rate = case.weights(), case.rate
        result = case.run(spoil)
        assert math.isnan(result.loss) and (result.outcome, result.lr) == ("bad", rate)
        assert (case.weights(), case.rate, case.step.bad_in_a_row) == (before, rate, 1)
        assert case.run() == twin.run(), "the next step feels the gradients of the bad one"
        assert case.weights() == twin.weights() and case.step.bad_in_a_row == 0


@check
def three_in_a_row_end_the_run(strategy: StrategyBase) -> None:
    for limit, spoils in ((3, [nan_loss, nan_gradient, nan_loss]), (1, [nan_gradient])):
        case = Case(strategy, limit)
        for spoil in spoils[:-1]:
            case.run(spoil)
        try:
            case.run(spoils[-1])
        except NonFiniteTraining as error:
            assert str(error).startswith(f"{limit} optimizer steps in a row") and "--max_bad_steps" in str(error)
        else:
            raise AssertionError(f"{limit} bad steps in a row did not end the run")


@check
def numbers_that_are_nan_in_the_loss_are_named(strategy: StrategyBase) -> None:
    case, nan = Case(strategy, 1), math.nan
    with patch.dict(NUMBERS._entries):
        number("calls"), number("turns"), number("delay", "T"), number("wait", "T")
        case.exp.loss_mask[::2] = False  # tokens of prompts have no number
        case.exp.extra |= {
            "calls": torch.tensor([nan, nan, 1, 1]), "turns": torch.ones(4), "delay":
            torch.tensor([nan, 1.0]).repeat(4), "wait": torch.tensor([1.0, nan]).repeat(4)
        }
        try:
            case.run(nan_loss)
        except NonFiniteTraining as error:
            assert "NaN in this batch: 'calls', 'wait'. If the loss" in str(error) and "missing=0" in str(error), error
        else:
            raise AssertionError("the step was made")


@check
def a_good_step_resets_the_count(strategy: StrategyBase) -> None:
    case = Case(strategy)
    for spoil in (nan_loss, nan_loss, None, nan_loss, nan_gradient, None):
        case.run(spoil)
    assert case.step.bad_in_a_row == 0


@check
def an_empty_mini_batch_makes_no_step(strategy: StrategyBase) -> None:
    case = Case(strategy)
    case.run(nan_loss)
    before, rate = case.weights(), case.rate
    result = case.run(kept=0.0)
    assert result == StepResult(0.0, rate, outcome="empty") and (case.weights(), case.rate) == (before, rate)
    assert case.step.bad_in_a_row == 1, "an empty mini-batch is neither good nor bad"
    case.run()
    assert case.weights() != before


@check
def metrics_tell_steps_that_were_made(strategy: StrategyBase) -> None:
    case = Case(strategy)
    results = [case.run(), case.run(nan_loss), case.run(kept=0.0), case.run()]
    metrics = step_metrics("policy", results)
    counts = [metrics[f"policy/{kind}_steps"] for kind in ("optimizer", "skipped", "empty")]
    assert counts == [2, 1, 1], counts
    assert metrics["policy/loss"] == (results[0].loss + results[3].loss) / 2
    assert metrics["policy/lr"] == results[3].lr == 0.1 / 2, "the rate that the last step used"
    empty = step_metrics("policy", [results[1]])
    assert math.isnan(empty["policy/loss"]) and (empty["policy/grad_norm"], empty["policy/skipped_steps"]) == (0.0, 1)


def main() -> None:
    """All checks on the ranks that torchrun started."""
    strategy = get_strategy(StrategyConfig(strategy="fsdp"))
    strategy.setup()
    for name, function in CHECKS.items():
        try:
            function(strategy)
        except AssertionError as error:
            raise AssertionError(f"rank {strategy.rank}, {name}: {error}") from error
    if strategy.is_main:
        print(json.dumps({"passed": list(CHECKS)}))
    strategy.teardown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
