"""The greedy response of a prompt: what it is, who sees it, and how its reward is shaped."""
from types import SimpleNamespace

import pytest
import torch

from lightrft.algorithms import ADVANTAGES
from lightrft.config.schema import AlgorithmConfig, RewardConfig
from lightrft.rewards.base import Outcome
from lightrft.rollout.engine import SamplingParams
from lightrft.strategy.mesh import Mesh
from lightrft.tests.support import runs
from lightrft.tests.support.episodes import Group, generate
from lightrft.trainer.advantage_calculator import get_advantage_calculator
from lightrft.trainer.fast_exp_maker import GreedyBaseline
from lightrft.trainer.samples import decode
from lightrft.trainer.scores import fill_rewards, log_row
from lightrft.trainer.samples import reward_input
from lightrft.trainer.tests.test_advantage_calculator import batch, per_sample
from lightrft.types import Episode, Prompt, Segment
from lightrft.utils.score import Score

no_picture = runs.no_picture


def trainer(home, folder, score=runs.letters, **options):
    return runs.ready(home, folder, score, **({"advantage_estimator": "remax"} | options))


def rollout(made, step=0):
    made.engine.wake()
    return made.maker.make([made.loader.dataset[i] for i in range(4)], step)


def greedy_texts(made):
    """What the engine says at temperature 0, and how long it is, prompt by prompt."""
    params = SamplingParams(made.config.rollout.generate_max_len, 0.0,
                            stop_token_ids=made.maker.sampling.stop_token_ids)
    made.engine.wake()
    for prompt in [made.loader.dataset[i] for i in range(4)]:
        done = generate(made.engine, [Group(prompt.token_ids, [7])], params)[0]
        episode = Episode.of(prompt, 0, 0, Segment(done[0].token_ids, done[0].logprobs), done[0].finish_reason)
        yield decode(made.tokenizer, [episode], params.stop_token_ids)[0]


def test_the_baseline_is_the_reward_of_the_greedy_response(home, tmp_path):
    seen = []

    def score(item):
        seen.append(item)
        return runs.letters(item)

    made = trainer(home, tmp_path, score, save_trajectories=True, temperature=0.7, top_p=0.9)
    done = rollout(made)
    assert len(seen) == 12, "eight samples and four greedy responses"
    wanted = list(greedy_texts(made))
    rewards = [runs.letters(reward_input(sample.prompt, sample.text)).value for sample in wanted]
    assert [each.greedy[0] for each in done.episodes] == pytest.approx([r for r in rewards for _ in range(2)])
    assert [each.greedy[1] for each in done.episodes] == [s.response_len for s in wanted for _ in range(2)]
    assert len(set(rewards)) > 1 and done.exp.num_seqs == 8 and done.metrics["rollout/samples"] == 8
    torch.testing.assert_close(done.exp.baseline_rewards, torch.tensor(rewards).repeat_interleave(2))
    assert done.metrics["reward/greedy_mean"] == pytest.approx(sum(rewards) / 4)
    assert done.metrics["reward/greedy_unscored"] == 0
    own = torch.tensor([each.reward for each in done.episodes])
    torch.testing.assert_close(torch.tensor(per_sample(done.exp)), own - done.exp.baseline_rewards)
    assert done.metrics["reward/mean"] == pytest.approx(own.mean().item()), "metrics of samples are of samples"
    assert done.metrics["rollout/tokens"] == done.exp.loss_mask.sum()


def test_samples_are_what_they_are_without_a_baseline(home, tmp_path):
    left, right = (rollout(trainer(home, tmp_path / name, advantage_estimator=name)) for name in ("remax", "reinforce"))
    assert torch.equal(left.exp.token_ids, right.exp.token_ids)
    assert right.exp.baseline_rewards is None and "greedy_reward" not in log_row(right.episodes[0])
    assert "reward/greedy_mean" not in right.metrics and torch.equal(left.exp.rewards, right.exp.rewards)


def test_an_unscored_greedy_response_leaves_its_group_without_advantage(home, tmp_path):
    seen, lost = [], []

    def score(item):
        """The third response to a prompt is the greedy one: it comes after the samples."""
        seen.append(item.prompt)
        if item.prompt == runs.PROMPTS[1] and seen.count(item.prompt) == 3:
            lost.append(item)
            return Outcome(None, "lost")
        return runs.letters(item)

    done = rollout(trainer(home, tmp_path, score))
    assert len(lost) == 1 and done.metrics["reward/greedy_unscored"] == 1
    assert done.metrics["reward/unscored"] == 0, "it is no sample"
    advantages = torch.tensor(per_sample(done.exp))
    assert not advantages[2:4].any() and advantages[[0, 1, 4, 5, 6, 7]].any()


def test_one_sample_per_prompt_is_enough(home, tmp_path):
    done = runs.run(home, tmp_path, advantage_estimator="remax", n_samples_per_prompt=1, train_batch_size=4)
    assert done.metrics["policy/grad_norm"] > 0 and "time/greedy_s" in done.metrics


def test_ranks_make_no_difference(home, tmp_path):
    """The rows that two ranks send are, put together, those of one."""
    made = trainer(home, tmp_path)
    groups = [(i, made.loader.dataset[i]) for i in range(4)]
    whole, wait = made.maker.generate(groups, 0)
    wait()
    rows = []
    for rank in range(2):
        made.maker.strategy = SimpleNamespace(mesh=Mesh(range(2), rank), barrier=lambda: None)
        own, wait = made.maker.generate(groups, 0)
        wait()
        rows += own
    rows.sort(key=lambda row: (row.group_id, row.index))
    assert [*map(log_row, rows)] == [*map(log_row, whole)] and all(row.greedy[0] is not None for row in rows)


def test_a_resumed_run_goes_on_as_the_straight_one(home, tmp_path):
    options = {"advantage_estimator": "remax", "disable_ckpt": False, "async_save": False, "max_steps": 3,
               "reward_running_norm": True, "reward_running_norm_minus_mean": True}  # yapf: disable
    straight = runs.run(home, tmp_path / "a", **options)
    runs.run(home, tmp_path / "b", **options | {"max_steps": 2})
    resumed = runs.run(home, tmp_path / "b", **options, load_checkpoint=True)
    assert straight.weights.keys() == resumed.weights.keys()
    assert all(torch.equal(value, resumed.weights[name]) for name, value in straight.weights.items())
    assert straight.metrics["reward/greedy_mean"] == resumed.metrics["reward/greedy_mean"]


def shaped(rewards, baselines, lengths, greedy_lengths, **options):
    """Advantages of single samples after shaping."""
    exp = batch(rewards, lengths, list(range(len(rewards))))
    exp.baseline_rewards, exp.baseline_lengths = torch.tensor(baselines), torch.tensor(greedy_lengths).float()
    calc = get_advantage_calculator(AlgorithmConfig(advantage_estimator="remax"), RewardConfig(**options), 100)
    calc(exp)
    return per_sample(exp), calc


def test_the_baseline_is_shaped_as_the_rewards_are():
    penalty = {"overlong_buffer": True, "overlong_buffer_len": 20}
    assert shaped([1.0], [1.0], [90], [80], **penalty)[0] == [-0.5], "each by its own length"
    assert shaped([1.0], [1.0], [90], [90], **penalty)[0] == [0.0]
    assert shaped([5.0], [3.0], [2], [2], reward_clip=1.0)[0] == [0.0], "both are cut"
    assert shaped([5.0], [0.5], [2], [2], reward_clip=1.0)[0] == [0.5]
    rewards, baselines = [0.0, 2.0, 7.0], [1.0, 1.0, 1.0]
    scale = torch.tensor(rewards).std().item()
    for centre in (False, True):
        got, calc = shaped(rewards, baselines, [2] * 3, [2] * 3, reward_running_norm=True,
                           reward_running_norm_minus_mean=centre)
        assert got == pytest.approx([(r - 1) / scale for r in rewards])
        assert calc.moments.count == 3, "the running statistics see samples only"
    assert shaped([1.0, 0.5], [float("nan"), 0.0], [2, 2], [2, 2], reward_clip=0.4)[0] == pytest.approx([0.0, 0.4])


def test_a_group_carried_over_from_a_run_without_a_baseline_has_none():
    exp = batch([1.0, 0.0], groups=[0, 1])
    prompt = Prompt("u", [5], "")
    episodes = [Episode(prompt, 0, 0, score=Score(1.0)), Episode(prompt, 1, 0, score=Score(0.0), greedy=(0.5, 3))]
    metrics = fill_rewards(exp, episodes, ADVANTAGES.get("remax"))
    assert metrics == {"reward/unscored": 0, "reward/greedy_mean": 0.5, "reward/greedy_unscored": 1}
    assert exp.baseline_rewards.isnan().tolist() == [True, False] and exp.baseline_lengths.tolist() == [0, 3]


def test_no_prompts_need_no_engine(home, tmp_path):
    made = trainer(home, tmp_path)
    greedy = GreedyBaseline(made.engine, made.maker.rewards, made.tokenizer)
    made.engine.step = None
    greedy.start([], made.maker.sampling)()
