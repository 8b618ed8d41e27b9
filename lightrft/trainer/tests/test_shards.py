"""A rollout batch that is spread over ranks: every sequence is where it is needed, whole, and nothing is lost."""
import os
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightrft.algorithms import ADVANTAGES
from lightrft.tests.support.ragged import ours
from lightrft.config.schema import AlgorithmConfig, Config, RewardConfig, RolloutConfig
from lightrft.ops.segment import group_stats
from lightrft.strategy.base import Prepared
from lightrft.tests.support import runs
from lightrft.tests.support.threads import World
from lightrft.tests.support.warm import warm_environ, warm_python
from lightrft.trainer.advantage_calculator import get_advantage_calculator
from lightrft.trainer.carried_groups import finished_state, load_finished, load_group
from lightrft.trainer.dynamic_sampling import DynamicSource
from lightrft.trainer.fast_exp_maker import FastExperienceMaker
from lightrft.trainer.logprob_pass import LogprobPass
from lightrft.trainer.metric_sums import number_metrics
from lightrft.trainer.partial_rollout import OversamplingSource, Progress
from lightrft.trainer.batch_plan import BatchPlan, MicroBatchLimits, plan_mini_batch
from lightrft.trainer.samples import group_seeds
from lightrft.trainer.scores import fill_rewards, log_row, take_number
from lightrft.trainer.shards import BatchRanks, Shards
from lightrft.types import Batch, Episode, number as declare, NUMBERS, Prompt, Segment
from lightrft.utils.play import Play
from lightrft.utils.score import Score
from lightrft.utils.timer import Timer

GROUPS, SIZE = 5, 2
LENGTHS = [3, 9, 4, 4, 7, 1, 12, 2, 5, 6]  # response tokens


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """A number that some responses have, and one that none has, which is no metric."""
    monkeypatch.setattr(NUMBERS, "_entries", {})
    declare("calls", missing=-1.0)
    declare("unset")


FORKED = {2: 1, 6: 5}  # number: tokens of the first branch


def sample(number):
    """A sample whose tokens tell its number; two of them fork."""
    n, first = LENGTHS[number], FORKED.get(number, 0)
    made = Episode(Prompt(str(number // SIZE), [1, 2], "p"), number // SIZE, number % SIZE,
                   extra={"calls": number} if number % 3 else {})  # yapf: disable
    for at, size in enumerate(filter(None, (first, n - first))):
        if at:
            made.fork(replace(made.prompt, token_ids=[1, 3, 4]))
        made.add([Segment([number + 10] * size, [-number / 10] * size, version=0)])
    made.finish_reason = "length" if number == 6 else "stop"
    return made


def score(number):
    """A score, one of them missing, with parts that not every sample has."""
    if number == 7:
        return Score(None, {"a": None}, "lost", {"a": 1.0})
    parts = {"a": number / 3} | ({"b": 0.5 - number % 3} if number > 3 else {})
    return Score(sum(parts.values()), parts, weights=dict.fromkeys(parts, 1.0))


def scored(number):
    """A sample with its score, and that of the greedy response."""
    return replace(sample(number), score=score(number), greedy=(None if number == 7 else number // SIZE / 10, 3))


def mine(strategy):
    """The samples that a rank generates: groups dealt one by one."""
    groups = range(strategy.rank, GROUPS, strategy.world_size)
    return [group * SIZE + index for group in groups for index in range(SIZE)]


def shards_of(strategy):
    shards = Shards(strategy, Batch.of([sample(number) for number in mine(strategy)]))
    buffer = BatchPlan(shards.lens, 4, MicroBatchLimits(2, 1000), strategy.rank, strategy.world_size, "0")
    shards.move(buffer.owned())
    return shards, buffer


def whole():
    return Batch.of([sample(number) for number in range(GROUPS * SIZE)])


def check(exp, numbers):
    """``exp`` holds exactly the sequences ``numbers``, with every field."""
    expected = whole().select(numbers)
    assert torch.equal(exp.extra["calls"], expected.extra["calls"])
    for name, value in vars(expected).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(vars(exp)[name], value), name
    assert exp.forks == expected.forks and exp.branches.lens == expected.branches.lens


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_sequence_moves_to_its_owner(ranks):

    def work(strategy):
        shards, buffer = shards_of(strategy)
        check(shards.exp, buffer.owned()[strategy.rank])
        for mini in buffer.epoch(0):
            for part in mini.micro_batches:
                if part:
                    check(shards.micro_batch(part), part)
                else:
                    assert not shards.micro_batch(part).loss_mask.any(), "a dummy, also where no sequence lives"
        return buffer.owned()[strategy.rank]

    homes = World(ranks).run(work)
    assert sorted(number for home in homes for number in home) == list(range(GROUPS * SIZE))
    assert ranks < 7 or [] in homes, "no rank is without a sequence"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_groups_may_differ_in_size(ranks):
    """Groups of 3, 1, 4 and 2 samples, of which no rank has neighbours: positions, groups, numbers and statistics."""
    keys = [(group, index) for group, size in enumerate([3, 1, 4, 2]) for index in range(size)]

    def work(strategy):
        own = [i for i in reversed(range(10)) if i % strategy.world_size == strategy.rank]
        samples = [replace(sample(i), group_id=keys[i][0], index=keys[i][1]) for i in own]
        shards = Shards(strategy, Batch.of(samples))
        assert shards.numbers.tolist() == own and shards.exp.sample_ids.tolist() == own[::-1]
        batch = shards.batch()
        batch.rewards, batch.scored = torch.arange(10.0), torch.ones(10, dtype=torch.bool)
        stats = group_stats(batch.rewards, batch.group_ids, batch.scored)
        return (batch.keys, shards.first_of_groups, stats.mean.tolist(), batch.extra["calls"].tolist(),
                number_metrics(shards))

    for done, first, means, numbers, metrics in World(ranks).run(work):
        assert done == keys and first == [0, 3, 4, 8]
        assert means == [1.0] * 3 + [3.0] + [5.5] * 4 + [8.5] * 2
        assert numbers == [i if i % 3 else -1 for i in range(10)]
        assert metrics == pytest.approx({"response/calls/mean": 2.3, "response/calls/min": -1, "response/calls/max": 8})


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_an_epoch_fetches_what_it_trains_and_drops_it(ranks):

    def work(strategy):
        shards, buffer = shards_of(strategy)
        shards.exp.old_logprobs = shards.exp.rollout_logprobs * 2
        for epoch in (1, 2):
            plans = [mini.plan for mini in buffer.epoch(epoch)]
            wanted = [sorted({i for plan in plans for part in plan[rank] for i in part}) for rank in range(ranks)]
            shards.fetch(wanted)
            for number in wanted[strategy.rank]:
                one = shards.micro_batch([number])
                check(one, [number])
                assert torch.equal(one.old_logprobs, one.rollout_logprobs * 2), "a field that was set after the move"
        shards.fetch(buffer.owned())
        return shards.held.num_seqs, len(buffer.owned()[strategy.rank])

    for held, home in World(ranks).run(work):
        assert held == max(home, 1), "copies of an epoch are kept"


def test_a_few_sequences_can_be_everywhere():
    for exp in World(3).run(lambda strategy: shards_of(strategy)[0].collect([8, 0, 3])):
        check(exp, [8, 0, 3])


class Tenth(torch.nn.Module):
    """A policy whose log-probs are a tenth of the tokens."""
    attention = 0.0

    def forward(self, exp, temperature):
        return exp.token_ids / 10.0, None


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_sequences_move_before_the_update_for_a_forward_pass_only(kl):
    config = Config(algorithm=AlgorithmConfig(init_kl_coef=kl, use_kl_loss=True),
                    rollout=RolloutConfig(n_samples_per_prompt=SIZE))

    def work(strategy):
        exchanges, exchange = [], strategy.exchange
        strategy.exchange = lambda outgoing: exchanges.append(1) or exchange(outgoing)
        idle = SimpleNamespace(sleep=lambda: None, reload=lambda: None)
        logprobs = LogprobPass(config, strategy, Prepared(Tenth()), None, Prepared(Tenth()), idle)
        calculator = get_advantage_calculator(config.algorithm, config.reward, 14)
        maker = FastExperienceMaker(config, strategy, idle, None, None, logprobs=logprobs, calculator=calculator,
                                    timer=Timer())
        rollout = maker.complete([scored(number) for number in reversed(mine(strategy))], 0)
        before = len(exchanges)
        rollout.shards.fetch(rollout.plan.owned())
        for number in rollout.plan.owned()[strategy.rank]:
            found = rollout.shards.micro_batch([number])
            assert found.token_ids.tolist() == sample(number).joined.token_ids
            assert kl == 0.0 or torch.equal(found.ref_logprobs, found.token_ids / 10.0)
        return before, len(exchanges) - before, rollout.exp.sample_ids.tolist() == mine(strategy)

    assert World(3).run(work) == [(1, 0, False) if kl else (0, 1, True)] * 3
    assert World(1).run(work) == [(0, 0, True)]


@pytest.mark.parametrize("more", [{}, {"reward_clip": 0.5, "overlong_buffer": True, "mask_truncated": True}], ids=str)
@pytest.mark.parametrize("name", ours(ADVANTAGES))
def test_advantages_do_not_depend_on_the_ranks(name, more):
    """Every estimator, with the KL in the reward, running statistics, high-entropy tokens and a number of a reward."""

    def work(strategy):
        shards, _ = shards_of(strategy)
        exp, numbers = shards.exp, torch.tensor(mine(strategy), dtype=torch.long)
        for field, factor in (("old_logprobs", 1.1), ("ref_logprobs", 0.7), ("values", -0.3), ("entropies", 0.9)):
            vars(exp)[field] = torch.where(exp.loss_mask, factor * exp.token_ids.float().sin(), 0.0)
        cfg = AlgorithmConfig(advantage_estimator=name, high_entropy_token_ratio=0.4, whiten_flat_groups=True,
                              advantages_norm=not ADVANTAGES.get(name).whitens, advantage_clip=1.0)
        reward = RewardConfig(reward_running_norm=True, **more)
        calculator, batch = get_advantage_calculator(cfg, reward, 14), shards.batch()
        ranks = BatchRanks(strategy, numbers, shards.size)
        episodes = [scored(number) for number in numbers.tolist()]
        for episode in episodes:
            episode.score.parts |= {"a/unset": episode.index} if episode.index % 2 else {}
            for declared in NUMBERS:
                take_number(declared, episode)
        metrics = fill_rewards(batch, episodes, calculator.estimator, ranks) | calculator(batch, 0.2)
        shards.update(batch)
        return shards.collect(list(range(GROUPS * SIZE))), metrics, calculator.state_dict()

    (one, metrics, state), = World(1).run(work)
    assert one.advantages.any() and metrics["reward/unscored/lost"] == 1
    odd = one.indices % 2 == 1
    torch.testing.assert_close(one.extra["unset"], torch.where(odd, one.indices.float(), torch.nan), equal_nan=True)
    for ranks in (2, 3, 7):
        for other, found, moments in World(ranks).run(work):
            assert found == pytest.approx(metrics, abs=1e-5) and moments == state
            for field, value in vars(one).items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(vars(other)[field], value, atol=1e-5, rtol=1e-5, equal_nan=True)
            torch.testing.assert_close(dict(other.extra), dict(one.extra), equal_nan=True)


def test_bound_sequences_share_a_micro_batch():
    """Pairs and groups, also where the limits would part them; the plan covers everything once, and ranks agree."""
    lens, bound = [5, 50, 7, 8, 60, 9, 30, 31, 6, 40], [0, 1, 0, 2, 1, 2, 3, 3, 4, 1]
    for limits in (MicroBatchLimits(1, 1000), MicroBatchLimits(3, 1000), MicroBatchLimits(0, 60)):
        for ranks in (1, 2, 3):
            plan = plan_mini_batch(list(range(10)), lens, ranks, limits, bound)
            where = {i: (rank, k) for rank, parts in enumerate(plan) for k, part in enumerate(parts) for i in part}
            assert sorted(where) == list(range(10)) and len({len(parts) for parts in plan}) == 1
            for unit in set(bound):
                assert len({where[i] for i in range(10) if bound[i] == unit}) == 1, (limits, ranks, plan)
    buffer = BatchPlan(torch.tensor(lens), 2, MicroBatchLimits(2, 1000), 0, 1, "s", bound)
    for epoch in (0, 1):
        minis = buffer.epoch(epoch)
        assert sorted(i for mini in minis for i in mini.samples) == list(range(10))
        assert [len({bound[i] for i in mini.samples}) for mini in minis] == [2, 2, 1], "two units per optimizer step"
    live = torch.zeros(10, dtype=torch.bool)
    live[4] = True
    mini = next(mini for mini in buffer.epoch(0) if 4 in mini.samples)
    assert sorted(i for part in mini.of(live)[0] for i in part) == [1, 4, 9], "a unit is dropped as a whole or not"


def test_the_self_test_keeps_bound_sequences_together(tmp_path):
    home = runs.write_home(tmp_path)
    trainer = runs.ready(home, tmp_path / "run", self_test=True, micro_train_batch_size=1)
    plan, seen = trainer.maker.plan, []

    def pairs(shards, step):
        buffer = plan(shards, step)
        buffer.bound = shards.group_ids.tolist()
        return buffer

    trainer.maker.plan = pairs
    loss_of = trainer.update.policy_loss.__call__
    trainer.update.policy_loss = lambda logprobs, entropy, exp, *args: seen.append(exp.group_ids.tolist()) or loss_of(
        logprobs, entropy, exp, *args)
    rollout = trainer.maker.make(next(trainer.loader), 0)
    trainer.update.run(rollout, 0, 0.0)
    assert not trainer.update.self_test.due and len(seen) > 4
    assert all(len(groups) % 2 == 0 and groups[::2] == groups[1::2] for groups in seen), seen


def maker_of(strategy):
    maker = SimpleNamespace(strategy=strategy, media=None)
    maker.deal = partial(FastExperienceMaker.deal, maker)
    maker.keep_shown = partial(FastExperienceMaker.keep_shown, maker)
    return maker


def unfinished(number):
    """A group of two responses, of which the second has begun."""
    group = Episode.group(Prompt(f"{number}", [1, 2], "p"), number, group_seeds(Config(), "draw", number)[:SIZE])
    finished, begun = group
    finished.add([Segment([number + 10, 3], [-1.0, -2.0], version=4)], "stop")
    begun.add([Segment([7], [-3.0], version=4)], "abort")
    return group


@pytest.mark.parametrize("before,after", [(1, 3), (3, 1), (3, 2)])
def test_groups_under_way_are_written_by_one_rank_and_dealt_again(before, after):
    config = Config(rollout=RolloutConfig(rollout_batch_size=GROUPS, n_samples_per_prompt=SIZE, oversample=2.0))
    groups = [unfinished(number) for number in (3, 0, 4, 1, 2)]

    def save(strategy):
        source = OversamplingSource(config, maker_of(strategy), None, 10)
        source.progress = {group[0].group_id: Progress.of(group) for group in groups}
        source.groups = {group[0].group_id: group for group in groups[strategy.rank::strategy.world_size]}
        return source.state_dict()

    state, *others = World(before).run(save)
    assert all(len(other["open"]) < len(groups) for other in others), "each rank holds all groups"

    def load(strategy):
        source = OversamplingSource(config, maker_of(strategy), None, 10)
        source.load_state_dict(state)
        return source.groups, source.progress

    found = World(after).run(load)
    dealt = {number: group for own, _ in found for number, group in own.items()}
    assert dealt == {group[0].group_id: group for group in groups}
    assert all([*progress] == [3, 0, 4, 1, 2] and progress[0] == Progress(True, 4) for _, progress in found)


@pytest.mark.parametrize("before,after", [(1, 3), (3, 1), (3, 2)])
def test_waiting_groups_are_written_by_one_rank_and_dealt_again(before, after):
    config = Config(rollout=RolloutConfig(rollout_batch_size=GROUPS, n_samples_per_prompt=SIZE, dynamic_sampling=True))

    def save(strategy):
        source = DynamicSource(config, maker_of(strategy), None, None)
        source.waiting, source.numbers = [*map(scored, mine(strategy))], list(range(GROUPS))
        return source.state_dict()

    state, *others = World(before).run(save)
    assert not any(other["rows"] for other in others)

    def load(strategy):
        source = DynamicSource(config, maker_of(strategy), None, None)
        source.load_state_dict(state)
        check(Batch.of(source.waiting), mine(strategy))
        assert source.waiting == [*map(scored, mine(strategy))]
        return source.numbers

    assert World(after).run(load) == [list(range(GROUPS))] * after


def test_checkpoints_of_earlier_versions_are_read():
    """They hold the tokens of groups packed, or the scores apart from the responses."""
    episodes = [replace(scored(number), closed=[], seed=0) for number in range(GROUPS * SIZE)]  # none forked
    rows = [{
        "group_id": episode.group_id, "index": episode.index, "reward": episode.score.total, "parts":
        episode.score.parts, "weights": episode.score.weights, "error": episode.score.error, "finish_reason":
        episode.finish_reason, "uid": episode.prompt.uid, "prompt": None, "response": None, "reference": None,
        "greedy_reward": episode.greedy[0], "greedy_length": 3, "steps": [(2, 0.5)], "fault": None, "numbers": {}
    } for episode in episodes]
    expected = [
        replace(episode, steps=[(2, 0.5)], extra={}, prompt=replace(episode.prompt, text="")) for episode in episodes
    ]
    packed = {name: value for name, value in vars(Batch.of(expected)).items() if value is not None}
    loaded = load_finished({"exp": packed, "rows": rows})
    for episode, same in zip(loaded, expected, strict=True):
        assert episode.logprobs == pytest.approx(same.logprobs), "the packed ones are float32"
        episode.segments = same.segments
    assert loaded == expected
    states = [{
        name: value for name, value in replace(episode, score=None).state().items()
        if name not in ("score", "steps", "greedy")
    } for episode in expected[:SIZE]]
    group = load_group({
        "number": 0, "prompt": vars(expected[0].prompt), "responses": states, "scored":
        [row | {"response": "text"} for row in reversed(rows[:SIZE])]
    })
    assert group == expected[:SIZE]


def test_the_log_of_a_waiting_response_is_the_same_behind_a_checkpoint():
    """With the chat and the tools that its environment has answered."""
    chat, tools = [{"role": "user", "content": "hi"}], [{"type": "function", "function": {"name": "f"}}]
    episode = replace(scored(0), prompt=Prompt("u", [1, 2], "<hi>", messages=chat, template_kwargs={"tools": tools}),
                      play=Play([{"role": "assistant", "content": "x"}], turns=1))  # yapf: disable
    again, = load_finished({"rows": [finished_state(episode)]})
    assert log_row(again) == log_row(episode) and log_row(again)["messages"][:1] == chat


@pytest.mark.dist
def test_the_memory_benchmark_finds_the_same_advantages_with_less_traffic():
    script = Path(__file__).parents[3] / "benchmarks" / "gather_memory.py"
    shape = ["--ranks", "2", "--prompts", "8", "--samples", "2", "--tokens", "256"]
    done = subprocess.run([warm_python(), str(script), *shape], capture_output=True, text=True, timeout=240,
                          env=os.environ | warm_environ(nested=True))  # yapf: disable
    assert done.returncode == 0, done.stderr[-2000:]
    gathered, moved = ([cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[2:])
    assert gathered[4] == moved[4] == "equal" and float(moved[3]) < float(gathered[3])


def test_an_empty_batch_has_shards():
    shards, = World(1).run(lambda strategy: Shards(strategy, Batch.of([])))
    shards.fetch([[]])
    assert shards.size == 0 and shards.held.num_seqs == 0
