"""Four ranks that hold the samples of two: what they count, move and report is that of two ranks (test_sharding.py)."""
from typing import Any

import pytest
from torch import nn

from lightrft.config.schema import AlgorithmConfig, RewardConfig, StrategyConfig
from lightrft.ops.segment import moments
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.fsdp import FSDPV2Strategy
from lightrft.strategy.mesh import Axes
from lightrft.trainer.advantage_calculator import get_advantage_calculator
from lightrft.trainer.batch_plan import BatchPlan, gathered, MicroBatchLimits
from lightrft.trainer.metric_sums import MetricSums, response_metrics
from lightrft.trainer.scores import fill_rewards
from lightrft.trainer.shards import BatchRanks, Shards
from lightrft.types import Batch, Episode, Prompt, Segment
from lightrft.utils.score import Score

LENGTHS = [3, 9, 4, 4, 7, 1, 12, 2, 5, 6, 8]  # response tokens of the samples, two per group


def sample(number: int) -> Episode:
    """A scored sample whose tokens tell its number; one of them forks."""
    segment = Segment([number + 10] * LENGTHS[number], [-number / 7] * LENGTHS[number], version=number % 3)
    made = Episode(Prompt(str(number // 2), [1, 2], "p"), number // 2, number % 2, [segment], "stop",
                   score=Score(number / 3 % 1, {"a": number / 3 % 1}, weights={"a": 1.0}))  # yapf: disable
    if number == 4:
        made.fork(Prompt("2", [1, 3, 4], "q"))
        made.add([Segment([14], [-0.5], version=1)], "stop")
    return made


def rollout_of(strategy: StrategyBase) -> tuple[Shards, BatchPlan, dict[str, float]]:
    """Generate, share out, score and move the samples, as the trainer does."""
    data = strategy.mesh.data
    episodes = [sample(number) for number in strategy.mesh.engines.of(range(len(LENGTHS)))]
    shards = Shards(strategy, Batch.of(episodes))
    plan = BatchPlan(shards.lens, 4, MicroBatchLimits(2, 1000), data.index, data.size, "0")
    numbers, metrics = shards.numbers, response_metrics(shards, 1.0)
    shards.move(plan.owned())
    calculator = get_advantage_calculator(AlgorithmConfig(advantage_estimator="reinforce", advantages_norm=True),
                                          RewardConfig(), 14)  # yapf: disable
    batch, owners = shards.batch(), BatchRanks(strategy, numbers, shards.size)
    metrics |= fill_rewards(batch, episodes, calculator.estimator, owners) | calculator(batch, 0.0)
    shards.update(batch)
    return shards, plan, metrics


def update_of(strategy: StrategyBase, shards: Shards, plan: BatchPlan) -> dict[str, Any]:
    """Sum metrics over two epochs of micro-batches, of which the second one fetches copies."""
    data, sums, trained = strategy.mesh.data, MetricSums(), []
    for epoch in (0, 1):
        minis = plan.epoch(epoch)
        shards.fetch(gathered([mini.plan for mini in minis], data.size))
        for part in (part for mini in minis for part in mini.micro_batches):
            exp = shards.micro_batch(part)
            sums.add_tokens({"advantage": exp.advantages, "logprob": exp.rollout_logprobs}, exp.loss_mask)
            sums.peak("peak", exp.advantages.abs().max() - 10)
            trained.append(exp.token_ids.tolist())
    sums.reduce(strategy)
    logprobs = moments(shards.exp.rollout_logprobs, shards.ranks)
    return {"means": [sums.mean(key) for key in sums.keys()], "peak": sums.vector("peak").tolist(), "trained": trained,
            "moments": logprobs, "kept": shards.kept.tolist(), "of all": shards.collect([7, 0, 3]).token_ids.tolist(),
            "advantages": shards.advantages.tolist(), "total": shards.ranks.total(shards.exp.advantages.sum()).item(),
            "owned": plan.owned()[data.index], "held": shards.held.sample_ids.tolist()}  # yapf: disable


def data_ranks(outer: StrategyBase) -> None:
    """Two ranks, and four of which two train the same samples: the second group holds, sums and plans the same."""
    twice = FSDPV2Strategy(StrategyConfig(strategy="fsdp"), axes=Axes(tp=2))
    twice.setup()
    share, engines = twice.mesh.data, twice.mesh.engines
    assert (share.index, share.size, share.replica) == (outer.rank // 2, 2, outer.rank % 2)
    assert (engines.index, engines.size, engines.replica) == (outer.rank, 4, 0), "each rank generates its own"
    with pytest.raises(ValueError, match="mesh of this strategy has tp 2, and no model divides .*; make .* without"):
        twice.prepare(nn.Linear(2, 2))
    shards, plan, metrics = rollout_of(twice)
    assert shards.ranks.share == share and shards.numbers.tolist() == list(range(outer.rank, len(LENGTHS), 4))
    found = update_of(twice, shards, plan), metrics
    expected: Any = None
    if outer.rank % 2:
        pair = FSDPV2Strategy(StrategyConfig(strategy="fsdp"), ranks=[1, 3])
        pair.setup()
        shards, plan, metrics = rollout_of(pair)
        expected = update_of(pair, shards, plan), metrics
    update, metrics = outer.all_gather_object(expected)[1::2][share.index]
    assert found[0] == update, (found[0], update)
    assert found[1] == pytest.approx(metrics, rel=1e-6), "statistics of responses, which four ranks generated"
