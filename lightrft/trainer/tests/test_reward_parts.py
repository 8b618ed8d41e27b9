"""The parts of the reward on their way to gdpo, where each sample may have others."""
from dataclasses import replace

import pytest
import torch

from lightrft.algorithms import ADVANTAGES
from lightrft.config.schema import AlgorithmConfig, RewardConfig
from lightrft.rewards.base import Outcome
from lightrft.rewards.spec import RewardPart
from lightrft.tests.support import runs
from lightrft.trainer.advantage_calculator import get_advantage_calculator
from lightrft.trainer.scores import fill_rewards, log_row, take_number
from lightrft.trainer.tests.test_advantage_calculator import batch, per_sample
from lightrft.types import Episode, number, NUMBERS, Prompt
from lightrft.utils.errors import UserError
from lightrft.utils.play import Play
from lightrft.utils.score import Score

no_picture = runs.no_picture

GDPO = ADVANTAGES.get("gdpo")


def row(parts, weights, reward=0.0):
    return Episode(Prompt("u", [1], ""), 0, 0, score=Score(reward, parts, weights=weights))


def test_columns_are_parts_by_name():
    rows = [row({"math": 1.0, "format": 0.0, "format/extra": 9.0}, {"math": 0.9, "format": 0.1}),
            row({"exact": 0.5}, {"exact": 1.0}),
            row({"math": None, "format": 1.0}, {"math": 0.9, "format": 0.1}, reward=None)]  # yapf: disable
    exp = batch([0.0] * 3)
    fill_rewards(exp, rows, GDPO)
    values, weights = exp.reward_parts, exp.part_weights
    nan = torch.nan
    torch.testing.assert_close(values, torch.tensor([[nan, 0, 1], [0.5, nan, nan], [nan, 1, nan]]), equal_nan=True)
    torch.testing.assert_close(weights, torch.tensor([[0, .1, .9], [1, 0, 0], [0, .1, .9]]))


class TwoParts(runs.Judge):
    """``letters`` and the length for even prompts, ``letters`` alone for odd ones."""

    def parts_of(self, item):
        """Parts by data source."""
        short = RewardPart("short", fast=lambda item: Outcome(1 / (1 + len(item.response))))
        return [(self.part, 1.0), (short, 0.25)] if item.data_source == "even" else [(self.part, 2.0)]


@pytest.fixture
def declared(monkeypatch):
    """Numbers of a response and of a token."""
    monkeypatch.setattr(NUMBERS, "_entries", {})
    number("doubt", dtype=torch.int64, missing=-1)
    number("delay", "T")


def test_a_declared_number_of_a_reward_or_an_environment_is_in_the_batch_and_in_the_rows(declared):
    rows = [row({"math": 1.0, "math/doubt": 3.0, "math/other": 5.0}, {"math": 1.0}), row({"math": 0.0}, {"math": 1.0}),
            row({}, {})]  # yapf: disable
    rows[2].play = Play(metrics={"doubt": 2.0, "others": 1.0})
    exp = batch([0.0] * 3)
    for each in rows:
        for name in NUMBERS:
            take_number(name, each)
    fill_rewards(exp, rows, GDPO)
    assert torch.equal(exp.extra["doubt"], torch.tensor([3, -1, 2]))
    assert [log_row(each).get("numbers") for each in rows] == [{"doubt": 3.0}, None, {"doubt": 2.0}]


@pytest.mark.parametrize("given, wanted", [
    (row({"math/doubt": 1.0, "exact/doubt": 1.0},
         {"math": 0.5, "exact": 0.5}), "the reward math and from the reward exact"),
    (replace(row({"math/doubt": 1.0}, {"math": 1.0}), extra={"doubt": 1}), "the reward math and from the rollout"),
    (row({"math/delay": 1.0}, {"math": 1.0}), "'delay' of response 0 .* is 1.0; set a list with a number for each of")
])
def test_a_number_of_two_places_or_of_tokens_is_refused(declared, given, wanted):
    with pytest.raises(UserError, match=wanted):
        for name in NUMBERS:
            take_number(name, given)


def test_the_parts_of_a_run_reach_the_estimator(home, tmp_path):
    cfg = runs.config_of(home, tmp_path, advantage_estimator="gdpo", save_trajectories=True)
    made = runs.trainer_of(cfg, runs.strategy_of(cfg), TwoParts(cfg.reward))
    made.sync_weights(0)
    made.prepared["actor"].model.eval()
    done = made.maker.make([made.loader.dataset[i] for i in range(4)], 0)
    assert done.exp.reward_parts.shape == (8, 2) and done.exp.part_weights.shape == (8, 2)
    assert done.exp.reward_parts[:, 1].isnan().tolist() == [False, False, True, True] * 2
    assert done.exp.part_weights.tolist() == [[1.0, 0.25]] * 2 + [[2.0, 0.0]] * 2 + [[1.0, 0.25]] * 2 + [[2.0, 0.0]] * 2
    total = (done.exp.reward_parts.nan_to_num() * done.exp.part_weights).sum(1)
    torch.testing.assert_close(total, done.exp.rewards)
    last = torch.tensor(per_sample(done.exp))
    scores = last.view(4, 2)
    torch.testing.assert_close(scores.sum(1), torch.zeros(4), atol=1e-5, rtol=0)
    assert (scores[1].abs() > 0).all() and not torch.allclose(scores[0].abs(), scores[1].abs()), "two parts, one part"
    runs.run(home, tmp_path / "run", advantage_estimator="gdpo")


def test_the_overlong_penalty_is_a_part():
    rows = [row({"a": 1.0}, {"a": 2.0}, reward=2.0), row({"a": 0.0}, {"a": 2.0})]
    shaping = RewardConfig(overlong_buffer=True, overlong_buffer_len=20)
    exp = batch([2.0, 0.0], [90, 80])
    fill_rewards(exp, rows, GDPO)
    get_advantage_calculator(AlgorithmConfig(advantage_estimator="gdpo"), shaping, 100)(exp)
    assert exp.reward_parts.tolist() == [[1.0, -0.5], [0.0, 0.0]] and exp.part_weights.tolist() == [[2.0, 1.0]] * 2
    assert per_sample(exp) == pytest.approx([1.0, -1.0], abs=1e-4), "2 / sqrt 2 - 1 / sqrt 2, whitened"


def test_samples_without_the_part_stay_out_of_its_statistics():
    rows = [row({"a": value}, {"a": 1.0})
            for value in (1.0, 0.0)] + [row({"b": value}, {"b": 5.0}) for value in (3., 4)]
    exp = batch([1.0, 0.0, 15.0, 20.0], groups=[0, 0, 1, 1])
    fill_rewards(exp, rows, GDPO)
    get_advantage_calculator(AlgorithmConfig(advantage_estimator="gdpo"), RewardConfig(), 100)(exp)
    got = per_sample(exp)
    assert got[0] > 0 > got[1] and got[3] == pytest.approx(-got[2]) and got[3] == pytest.approx(5 * got[0], rel=1e-4)


@pytest.mark.parametrize("options,wanted", [({"n_samples_per_prompt": 1}, "gdpo compares"),
                                            ({"reward_clip": 1.0}, "standardises"),
                                            ({"advantages_norm": True}, "already whitens")])
def test_what_gdpo_refuses(home, tmp_path, options, wanted):
    with pytest.raises(ValueError, match=wanted):
        runs.config_of(home, tmp_path, advantage_estimator="gdpo", **options | {"train_batch_size": 4})


@pytest.mark.parametrize("name", ["opo", "gpg", "cpgd", "maxrl", "grpo_passk"])
def test_a_short_run(home, tmp_path, name):
    options = {"n_samples_per_prompt": 3, "rollout_batch_size": 4, "train_batch_size": 12}
    done = runs.run(home, tmp_path, advantage_estimator=name, **options)
    assert done.metrics["policy/grad_norm"] > 0 and done.metrics["advantage/max"] > 0


def test_groups_without_a_positive_mean_are_counted():
    exp = batch([-1.0, 0.0, 1.0, 0.0, 0.0, 0.0], groups=[0, 0, 1, 1, 2, 2])
    calc = get_advantage_calculator(AlgorithmConfig(advantage_estimator="maxrl"), RewardConfig(), 100)
    metrics = calc(exp)
    assert metrics["group/nonpositive_mean_frac"] == pytest.approx(1 / 3)
    assert metrics["group/zero_spread_frac"] == pytest.approx(1 / 3)
    assert per_sample(exp) == [0, 0, 1, -1, 0, 0]
