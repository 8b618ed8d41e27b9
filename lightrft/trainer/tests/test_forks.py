"""Episodes that fork: several sequences of a forward pass, and one response in every statistic."""
from dataclasses import replace
from itertools import combinations, pairwise
from math import exp as e
from statistics import mean, pvariance, stdev

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from lightrft.algorithms import ADVANTAGES, CORRECTIONS, POLICY_LOSSES
from lightrft.config.schema import AlgorithmConfig, RewardConfig
from lightrft.models.actor_language import ActorLanguage
from lightrft.models.loss import PolicyLoss
from lightrft.models.packed_model import Critic
from lightrft.models.shared_prompts import forward_row
from lightrft.ops.aggregate import aggregate, count, Denominators, MODES
from lightrft.rollout.scheduler import generate
from lightrft.tests.support import naive_model, runs, tiny
from lightrft.tests.support.ragged import ours
from lightrft.trainer.advantage_calculator import get_advantage_calculator
from lightrft.trainer.scores import fill_rewards
from lightrft.types import Batch, Episode, MediaSpan, Prompt, Segment
from lightrft.utils.score import Score

# of each episode, the drawn (+) and given (-) tokens behind each of its prompts; two groups of three
SHAPES = [[[3, -2, 2], [4]], [[5]], [[2], [1, -1, 3], [2]], [[4]], [[3], [3]], [[1, -2, 2]]]
REWARDS, GREEDY, GAMMA = [1.0, 0.25, 0.5, 0.0, 1.0, 0.75], [0.5, 0.125], 0.9


def tokens(seed, number):
    return torch.randint(4, 250, (number, ), generator=torch.Generator().manual_seed(seed)).tolist()


def episode(number):
    """An episode of ``SHAPES``. Both branches of number 4 have the same tokens behind other prompts."""
    group, made = number // 3, Episode(Prompt(str(number // 3), tokens(number // 3, 5), "p"), number // 3, number % 3)
    for at, branch in enumerate(SHAPES[number]):
        if at:
            made.fork(replace(made.prompt, token_ids=tokens(100 * group + at, 4)))
        for place, size in enumerate(branch):
            seed = 1000 if number == 4 else 7 * number + 3 * at + place
            made.add([Segment(tokens(seed, abs(size)), [-1.0] * abs(size), size > 0, 0 if size > 0 else -1)], "stop")
    made.score, made.greedy = Score(REWARDS[number], {"a": REWARDS[number]}, weights={"a": 1.0}), (GREEDY[group], 2)
    return made


def packed():
    return Batch.of([episode(number) for number in range(len(SHAPES))])


def apart():
    """The branches as sequences of their own."""
    return Batch.of([Episode(branch.prompt, 0, 0, branch.segments) for number in range(len(SHAPES))
                     for branch in episode(number).branches])  # yapf: disable


def random(exp, seed):
    return torch.rand(exp.num_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn_of(exp, values):
    """The values of the drawn tokens of each episode, in the order in which they were drawn."""
    return [values[start:stop][exp.loss_mask[start:stop]].tolist() for start, stop in pairwise(exp.cu_seqlens.tolist())]


def actor():
    hf = tiny.model()
    hf.set_attn_implementation("packed")
    return ActorLanguage(hf)


def critic():
    torch.manual_seed(0)
    config = tiny.config("mistral", num_labels=1)
    return Critic(AutoModelForSequenceClassification.from_config(config, attn_implementation="packed"))


def test_a_branch_sees_no_other():
    """Log-probs, entropies and values of a batch of episodes are those of each branch alone."""
    exp, alone, model = packed(), apart(), actor()
    assert exp.num_seqs == len(SHAPES) and exp.branches.num_seqs == alone.num_seqs == 10
    assert torch.equal(exp.branches.cu_seqlens, alone.cu_seqlens) and exp.branches.prompt_lens == alone.prompt_lens
    twin = tiny.model()
    twin.set_attn_implementation("eager")
    for one, other in zip(model(exp, entropy=True), naive_model.logprobs(twin, alone)):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    torch.testing.assert_close(critic()(exp), critic()(alone), atol=1e-6, rtol=0)
    plain = replace(exp, forks=None)
    assert (model(plain)[0] - model(exp)[0]).abs().max() > 0.05, "the test can fail"
    assert plain.branches is plain


def test_prompts_that_episodes_fork_to_are_shared():
    shapes = [len(branch) for branch in SHAPES]
    assert sum(shapes) == 10 and forward_row(packed().branches).row.num_tokens == packed().num_tokens - 4 * 5 - 4


def test_a_fork_keeps_the_media_of_each_branch():
    """Those of its prompt, and those that an environment has shown behind it."""
    made = Episode(Prompt("u", [1, 2], "p", media=("image:0", )), 0, 0)
    shown = Segment([8, 8], [0.0] * 2, False, media=("image:1", ), unexpanded_ids=[8])
    made.add([Segment([5], [-1.0]), shown, Segment([6], [-1.0])])
    made.fork(replace(made.prompt, token_ids=[1, 2, 3], media=("image:0", "image:1")))
    made.add([Segment([5], [-1.0]), shown, Segment([6], [-1.0])])
    made.fork(replace(made.prompt, token_ids=[4], media=()))
    made.add([Segment([6], [-1.0])], "stop")
    exp = Batch.of([made])
    keys = ("image:0", "image:1"), ("image:0", "image:1", "image:1"), ()
    assert exp.media == [sum(keys, ())] and exp.forks == [((6, 9), (13, 14))]
    assert exp.branches.media == [*keys] and exp.branches.prompt_lens == [2, 3, 1]
    assert exp.branches.spans == [
        [MediaSpan(0, 2, ("image:0", )), MediaSpan(3, 5, ("image:1", ))],
        [MediaSpan(0, 3, ("image:0", "image:1")), MediaSpan(4, 6, ("image:1", ))],
        [MediaSpan(0, 1, ())]]  # yapf: disable
    both = Batch.cat([packed(), exp])
    assert both.select([6, 0]).forks == [exp.forks[0], packed().forks[0]]
    assert both.select([6]).branches.spans == exp.branches.spans


def test_a_run_learns_from_forks(tmp_path):
    """The engine goes on with the same episodes behind other prompts; the trainer finds its log-probs in one sequence,
    also beside the engine, and the gradient of two micro-batches is that of four."""
    home = runs.write_home(tmp_path)
    trainer = runs.ready(home, tmp_path / "run", self_test=True, micro_train_batch_size=2, overlap_passes=True,
                         max_epochs=2)
    maker, episodes = trainer.maker, [each for number, prompt in enumerate(next(trainer.loader))
                                      for each in trainer.maker.open(number, prompt, 0)]  # yapf: disable
    generate(maker.engine, episodes, maker.sampling)
    forked = episodes[::3]
    for each in forked:
        start, *rest = each.prompt.token_ids
        each.fork(replace(each.prompt, token_ids=[start, *each.response_ids[:3], *rest]))
    generate(maker.engine, forked, maker.sampling)
    samples, wait = maker.advance(episodes, 4, set())
    wait()
    assert samples == episodes and [len(each.branches) for each in episodes] == [2, 1, 1] * 2 + [2, 1]
    rollout = maker.complete(episodes, 0)
    update = trainer.update.run(rollout, 0, 0.0)
    assert rollout.metrics["rollout/samples"] == 8 == rollout.metrics["rollout/kept_samples"]
    assert rollout.metrics["rollout/tokens"] == sum(each.drawn_len for each in episodes)
    assert update["rollout/mismatch/abs_logp_max"] < 2e-5 and update["policy/first_ratio_gap"] == 0.0
    assert not trainer.update.self_test.due


def others(group, at):
    return group[:at] + group[at + 1:]


def best_of(group, at, k):
    return mean(max(0.0, group[at] - max(rest)) for rest in combinations(others(group, at), k - 1))


OUTCOMES = {
    "group_norm": lambda group, at, lens: (group[at] - mean(group)) / (stdev(group) + 1e-6),
    "dr_grpo": lambda group, at, lens: group[at] - mean(group),
    "cpgd": lambda group, at, lens: group[at] - mean(group),
    "gpg": lambda group, at, lens: group[at] - mean(group),  # both groups have spread
    "rloo": lambda group, at, lens: group[at] - mean(others(group, at)),
    "opo": lambda group, at, lens: group[at] - sum(r * n for r, n in zip(group, lens)) / sum(lens),
    "maxrl": lambda group, at, lens: group[at] / mean(group) - 1,
    "grpo_passk": lambda group, at, lens: best_of(group, at, 2),
    "reinforce": lambda group, at, lens: group[at],
    "reinforce++": lambda group, at, lens: group[at],
    "reinforce_baseline": lambda group, at, lens: group[at] - mean(group),
    "gdpo": lambda group, at, lens: (group[at] - mean(group)) / (stdev(group) + 1e-6),
}  # yapf: disable
OUTCOMES["grpo"] = OUTCOMES["group_norm"]


def white(values, centre=True):
    flat = [value for each in values for value in each]
    middle, scale = mean(flat), (pvariance(flat) + 1e-8)**0.5
    return [[(value - middle) / scale for value in each] for each in values]


def naive_gae(rewards, values):
    found, after, following = [], 0.0, 0.0
    for reward, value in reversed([*zip(rewards, values)]):
        after = reward + GAMMA * following - value + GAMMA * 0.95 * after
        found, following = [after, *found], value
    return found


def naive_advantages(name, lens, values):
    """Of the drawn tokens of every episode, one loop after another; the reward is on the last one of the last branch.
    """
    found = []
    for number, (n, known) in enumerate(zip(lens, values)):
        first = number // 3 * 3
        group, sizes = REWARDS[first:first + 3], lens[first:first + 3]
        if name == "gae":
            found.append(naive_gae([0.0] * (n - 1) + [REWARDS[number]], known))
            continue
        outcome = (REWARDS[number] - GREEDY[number // 3] if name == "remax" else
                   OUTCOMES[name](group, number % 3, sizes))  # yapf: disable
        found.append([outcome])
    if name == "gdpo":
        found = [[value[0]] for value in white(found)]
    if name != "gae":
        found = [[GAMMA**(n - 1 - t) * value[0] for t in range(n)] for n, value in zip(lens, found)]
    return white(found) if name in ("reinforce++", "reinforce_baseline") else found


@pytest.mark.parametrize("name", ours(ADVANTAGES))
def test_advantages_count_each_episode_once(name):
    exp = packed()
    exp.values = random(exp, 1).float()
    cfg = AlgorithmConfig(advantage_estimator=name, gamma=GAMMA, lambd=0.95, std_eps=1e-6, pass_k=2,
                          norm_group_std=False)  # yapf: disable
    calculator = get_advantage_calculator(cfg, RewardConfig(), 100)
    fill_rewards(exp, [episode(number) for number in range(len(SHAPES))], calculator.estimator)
    calculator(exp)
    values = drawn_of(exp, exp.values.double())
    expected = naive_advantages(name, [len(each) for each in values], values)
    for found, wanted in zip(drawn_of(exp, exp.advantages), expected, strict=True):
        assert found == pytest.approx(wanted, abs=2e-6)


def test_the_rewards_of_turns_reach_back_over_a_fork():
    """A return of a turn in a later branch is part of the returns of the branches before."""
    exp, steps = packed(), [(0, 0.5), (4, 0.25), (5, 0.125)]  # of the first episode: number of the drawn token, reward
    exp.rewards, exp.scored = torch.tensor([0.875, *[0.0] * 5]), torch.ones(6, dtype=torch.bool)
    exp.step_rewards = torch.full((exp.num_tokens, ), torch.nan)
    drawn = exp.loss_mask.nonzero()[:, 0].tolist()
    for at, reward in steps:
        exp.step_rewards[drawn[at]] = reward
    get_advantage_calculator(AlgorithmConfig(advantage_estimator="reinforce", gamma=GAMMA))(exp)
    wanted = [sum(GAMMA**(at - t) * reward for at, reward in steps if at >= t) for t in range(9)]
    assert drawn_of(exp, exp.advantages)[0] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_aggregations_count_each_episode_once(mode):
    """In one micro-batch, and in one per episode."""
    exp, loss = packed(), random(packed(), 2)
    denominators = Denominators.of(count(exp.loss_mask, exp.cu_seqlens), 7.0)
    whole = aggregate(loss, exp.loss_mask, exp.cu_seqlens, mode, denominators).item()
    kept = drawn_of(exp, loss)
    sums, n = [sum(each) for each in kept], sum(map(len, kept))
    expected = {"token-mean": sum(sums) / n, "token-sum": sum(sums), "seq-mean-token-sum": mean(sums),
                "seq-mean-token-mean": mean(map(mean, kept)),
                "seq-mean-token-sum-norm": mean(sums) / 7}  # yapf: disable
    assert whole == pytest.approx(expected[mode], rel=1e-12)
    parts = [(exp.select([number]), loss[exp.tokens_of([number])]) for number in range(exp.num_seqs)]
    cut = sum(aggregate(own, part.loss_mask, part.cu_seqlens, mode, denominators).item() for part, own in parts)
    assert cut == pytest.approx(whole, rel=1e-12)


def naive_ratio(name, new, old):
    """One per response, over the tokens of all branches."""
    gaps = [a - b for a, b in zip(new, old)]
    return e(sum(gaps) if name.startswith("seq_") else mean(gaps))


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "gmpo", "seq_tis", "seq_mis", "geo_tis", "geo_mis"])
def test_ratios_of_sequences_span_all_branches(name):
    exp, gaps = packed(), 0.2 * (random(packed(), 3) - 0.5)
    exp.old_logprobs, exp.advantages = -random(exp, 4), torch.ones(exp.num_tokens, dtype=torch.float64)
    if name in POLICY_LOSSES:
        new, before, cfg = exp.old_logprobs + gaps, exp.old_logprobs, AlgorithmConfig(eps_clip=9.0, eps_clip_high=9.0)
        found = POLICY_LOSSES.get(name).fn(new, exp, cfg)[1]["ratio"]
    else:
        new, before = exp.old_logprobs, exp.old_logprobs - gaps
        exp.rollout_logprobs, cfg = before, AlgorithmConfig(correction_low=0.0, correction_high=9.0)
        found = CORRECTIONS.get(name).fn(exp, cfg)
    for ratios, mine, theirs in zip(*(drawn_of(exp, each) for each in (found, new, before))):
        assert ratios == pytest.approx([naive_ratio(name, mine, theirs)] * len(mine), rel=1e-9)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_gradients_do_not_depend_on_the_micro_batches(mode):
    """The weights of a model learn the same from all episodes at once and from one after another."""
    loss = PolicyLoss(AlgorithmConfig(policy_loss="gspo", loss_agg_mode=mode))

    def gradient(parts):
        exp, model = packed(), actor()
        exp.advantages = torch.where(exp.loss_mask, random(exp, 5).float() - 0.5, 0)
        denominators = loss.denominators(count(exp.loss_mask, exp.cu_seqlens))
        for part in map(exp.select, parts):
            logprobs = model(part)[0]
            part.old_logprobs = torch.where(part.loss_mask, logprobs.detach() + 1e-4, 0)
            loss(logprobs, None, part, denominators, 0.0)[0].backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    whole, cut = gradient([[0, 1, 2, 3, 4, 5]]), gradient([[4], [0], [3], [2], [5], [1]])
    torch.testing.assert_close(whole, cut, atol=1e-6, rtol=0)
    assert whole.abs().max() > 1e-3
