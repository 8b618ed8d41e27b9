"""Rewards of steps: the tokens that they belong to, advantages against plain loops, and a run of the command."""
import math
from dataclasses import replace

import pytest
import torch

from lightrft.algorithms.base import ADVANTAGES
from lightrft.cli.train import main
from lightrft.config.cli import parse_config
from lightrft.config.schema import AlgorithmConfig
from lightrft.preflight.validate import validate
from lightrft.rewards.rules import format_score
from lightrft.tests.support import runs, tiny
from lightrft.tests.support.boundary_tokenizers import metaspace
from lightrft.tests.support.launch import flags
from lightrft.tests.support.scorers import save_judge
from lightrft.tests.support.threads import World
from lightrft.trainer.advantage_calculator import token_rewards
from lightrft.trainer.samples import reward_input
from lightrft.trainer.scores import on_tokens, step_rewards
from lightrft.types import Batch, Episode, Experience, Prompt, Segment
from lightrft.utils.play import Play

# prompts of two tokens; the reward of each response token that ends a step; two groups of two
STEPS = [[None, 0.9, None, 0.2], [0.4], [None, None, 0.7], [0.7, 0.7]]
GROUPS = [0, 0, 1, 1]


@pytest.fixture(name="exp")
def exp_fixture():
    """A batch whose samples also have 0.5 for the whole response; the last one of them is unscored."""
    rows, none = [[1, 2, *range(len(steps))] for steps in STEPS], math.nan
    rewards = [sum(filter(None, steps)) + 0.5 for steps in STEPS]
    exp = Experience.pack(rows, [[False] * 2 + [True] * len(steps) for steps in STEPS], group_ids=torch.tensor(GROUPS),
                          rewards=torch.tensor(rewards), scored=torch.tensor([True, True, True, False]))
    exp.step_rewards = torch.tensor([none if r is None else r for s in STEPS for r in (None, None, *s)])
    exp.values = torch.linspace(-1, 1, exp.num_tokens)
    exp.token_rewards = token_rewards(exp, None, 0.0)
    return exp


def alone(exp, values):
    """Lists of the numbers of the response tokens of each sample."""
    return [part[2:].tolist() for part in values.split(exp.lens)]


@pytest.mark.parametrize("name", ["gae", "reinforce"])
def test_returns_are_those_of_a_loop_over_step_rewards(name, exp):
    cfg = AlgorithmConfig(advantage_estimator=name, gamma=0.9, lambd=0.8)
    found = alone(exp, ADVANTAGES.get(name).fn(exp, cfg))
    for steps, values, own in zip(STEPS[:3], alone(exp, exp.values), found):
        rewards = [reward or 0.0 for reward in steps]
        rewards[-1] += 0.5
        expected, carried, following = [], 0.0, 0.0
        for reward, value in zip(reversed(rewards), reversed(values)):
            decay = 0.9 * (0.8 if name == "gae" else 1.0)
            carried = reward + decay * carried + (0.9 * following - value if name == "gae" else 0.0)
            expected, following = [carried, *expected], value
        assert own == pytest.approx(expected, abs=1e-6)
    assert found[3] == [0.0, 0.0], "an unscored sample"


def with_answers(exp):
    """The same samples, with three tokens of an environment behind each step but the last, and values there too."""
    kept, rows, masks = [], [], []
    for row, mask, ends in zip(exp.token_ids.split(exp.lens), exp.loss_mask.split(exp.lens),
                               (~exp.step_rewards.isnan()).split(exp.lens)):
        sizes = [4 if end and i + 1 < len(row) else 1 for i, end in enumerate(ends.tolist())]
        rows.append([token for token, size in zip(row.tolist(), sizes) for token in (token, *[9] * (size - 1))])
        drawn = [own for size in sizes for own in (True, *[False] * (size - 1))]
        kept += drawn
        masks.append(
            [bool(own and each) for own, each in zip(drawn, torch.repeat_interleave(mask, torch.tensor(sizes)))])
    kept = torch.tensor(kept)
    more = Experience.pack(rows, masks, group_ids=exp.group_ids, rewards=exp.rewards, scored=exp.scored)
    more.values = torch.full((len(kept), ), 99.0).masked_scatter(kept, exp.values)
    more.step_rewards = torch.full((len(kept), ), math.nan).masked_scatter(kept, exp.step_rewards)
    more.token_rewards = token_rewards(more, None, 0.0)
    return more, kept


@pytest.mark.parametrize("name", ["gae", "reinforce", "reinforce++", "group_norm"])
def test_tokens_of_an_environment_are_no_time_steps(name, exp):
    """Advantages of drawn tokens are those without the gaps; the others have none."""
    cfg, (more, kept) = AlgorithmConfig(advantage_estimator=name, gamma=0.9, lambd=0.8), with_answers(exp)
    expected, found = (ADVANTAGES.get(name).fn(each, cfg) for each in (exp, more))
    assert more.num_tokens == exp.num_tokens + 6 and expected.abs().sum() > 1
    assert found[kept].tolist() == pytest.approx(expected.tolist(), abs=1e-6) and not found[~kept].any()
    assert torch.equal(more.token_rewards[kept], exp.token_rewards) and not more.token_rewards[~kept].any()


def test_grpo_standardises_all_steps_of_a_group(exp):
    """DeepSeekMath, section 4.1.3: the mean and deviation of 0.9, 0.2, 0.4; a step alone in its group gives nothing."""
    exp.rewards -= 0.5
    exp.token_rewards = token_rewards(exp, None, 0.0) - 0.01 * exp.loss_mask
    found = alone(exp, ADVANTAGES.get("group_norm").fn(exp, AlgorithmConfig(std_eps=1e-6)))
    r = torch.tensor([0.9, 0.2, 0.4])
    a, b, c = ((r - r.mean()) / (r.std() + 1e-6)).tolist()
    assert found[0] == pytest.approx([a + b - 0.04, a + b - 0.03, b - 0.02, b - 0.01], abs=1e-5)
    assert found[1] == pytest.approx([c - 0.01], abs=1e-5)
    assert found[2] == pytest.approx([-0.03, -0.02, -0.01], abs=1e-6) and found[3] == [0.0, 0.0]


def test_the_token_of_a_step_is_the_one_that_writes_its_end():
    tokenizer = tiny.tokenizer()
    ids = tokenizer.encode("né\nok")  # é is two tokens
    sample = Episode(Prompt("0", [5, 6], ""), 0, 0, [Segment(ids, [])], "stop")
    assert on_tokens(sample, [(1, 1.0), (2, 0.5), (5, 0.25)], tokenizer) == [(2, 1.0), (4, 0.5), (7, 0.25)]
    tokenizer = metaspace()
    prompt, ids = tokenizer.encode("Q:"), tokenizer.convert_tokens_to_ids(["\u2581", "a", "b"])
    sample = Episode(Prompt("0", prompt, "Q:"), 0, 0, [Segment(ids, [])], "stop")
    assert on_tokens(sample, [(2, 0.5), (3, 1.0)], tokenizer) == [(4, 0.5), (5, 1.0)], "the blank is one of two"


def test_the_steps_of_a_fork_are_on_the_tokens_of_all_branches():
    tokenizer, play = tiny.tokenizer(), Play([{"role": "assistant", "content": text} for text in ("né", "ok")])
    sample = Episode(Prompt("0", [5, 6], ""), 0, 0, [Segment(tokenizer.encode("né"), [0.0] * 3)], play=play)
    sample.fork(replace(sample.prompt, token_ids=[7, 8, 9]))
    sample.add([Segment(ids := tokenizer.encode("ok"), [0.0] * len(ids))], "stop")
    assert on_tokens(sample, [(2, 0.5), (5, 0.25)], tokenizer) == [(4, 0.5), (7 + len(ids), 0.25)]
    both = [sample, replace(sample, steps=[(4, 0.5), (7 + len(ids), 0.25)])]
    batch = replace(Batch.of(both), sample_ids=torch.arange(2))
    found, = World(1).run(lambda strategy: step_rewards(batch, [0, 1], both, strategy))
    ends = (~found.isnan()).nonzero()[:, 0]
    assert (ends - batch.lens[0]).tolist() == [4, 7 + len(ids)] and batch.loss_mask[ends].all()


def test_rewards_read_a_prefill_in_the_answer():
    """The prompt ends before it; a step that ends in it has its reward at the first token drawn."""
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "<think>a"}]
    prompt, tokenizer = Prompt("0", [5, 6], "1+1? <think>a", chat), tiny.tokenizer()
    item = reward_input(prompt, "b</think>\\boxed{2}")
    assert (item.prompt, item.response, item.messages) == ("1+1? ", "<think>ab</think>\\boxed{2}", chat[:1])
    assert format_score(item).value == 1
    sample = Episode(prompt, 0, 0, [Segment(tokenizer.encode("b\nok"), [])], "stop")
    assert on_tokens(sample, [(3, 1.0), (9, 0.5), (12, 0.25)], tokenizer) == [(2, 1.0), (2, 0.5), (5, 0.25)]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = runs.write_home(tmp_path_factory.mktemp("home"))
    save_judge(folder / "judge", reward_tokens=["+", "-"])
    return folder


def test_the_command_trains_on_step_rewards(home, tmp_path):
    options = {**runs.BASE, "pretrain": home / "model", "prompt_data": home / "train.jsonl", "save_path": tmp_path,
               "reward_pretrain": home / "judge", "step_reward": "per_step", "max_steps": 2, "save_trajectories": True,
               "advantage_estimator": "reinforce++", "generate_max_len": 24, "step_separator": "1"}  # yapf: disable
    off = {f"no_{name}": True for name, value in options.items() if value is False}
    main(flags({name: value for name, value in options.items() if name != "stop"} | off))
    lines = runs.read_lines(tmp_path / "metrics.jsonl")
    assert all(line["policy/grad_norm"] > 0 and line["reward/rm/steps/mean"] > 0 for line in lines)
    rows = [row for step in (1, 2) for row in runs.read_lines(tmp_path / "rollouts" / f"step_{step}.jsonl")]
    assert any("steps" in row for row in rows)
    for row in rows:  # one without a step has the reward 0
        assert row["reward"] == pytest.approx(sum(reward for _, reward in row.get("steps", ())), abs=1e-6)


@pytest.mark.parametrize("options,words", [
    ({"advantage_estimator": "rloo"}, "--step_reward per_step: rloo is defined for one reward per response"),
    ({"reward_clip": 1.0}, "--reward_clip 1: changes the reward of a response, not those of its steps"),
    ({"reward": ["exact"]}, "--reward exact: group_norm standardises the rewards of steps within a group"),
])
def test_what_is_not_defined_is_refused(options, words, home, tmp_path):
    given = {"reward_pretrain": [str(home / "judge")], "step_reward": "per_step"}
    values = {"pretrain": str(home / "model"), "prompt_data": [str(home / "train.jsonl")], "save_path": str(tmp_path)}
    with pytest.raises(ValueError, match=words):
        validate(parse_config([], defaults=runs.BASE | values | given | options).config, 1)
