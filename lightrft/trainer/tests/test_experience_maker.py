"""From prompts to experience: the same by either maker, rewarded on responses only, in groups that do not shift."""
from dataclasses import fields, replace

import pytest
import torch

from lightrft.rewards.base import Outcome
from lightrft.rollout import scheduler
from lightrft.tests.support import runs, tiny
from lightrft.tests.support.boundary_tokenizers import byte_level, metaspace
from lightrft.trainer import fast_exp_maker
from lightrft.trainer.fast_exp_maker import NaiveExperienceMaker
from lightrft.trainer.samples import decode, sample_seed, stop_token_ids
from lightrft.types import Batch, Episode, Prompt, Segment


def rollout(made, step=0, maker=None):
    made.prepared["actor"].model.eval()
    made.engine.wake()
    return (maker or made.maker).make([made.loader.dataset[i] for i in range(4)], step, 0.1)


def naive(made) -> NaiveExperienceMaker:
    m = made.maker
    return NaiveExperienceMaker(m.config, m.strategy, m.engine, m.rewards, m.tokenizer, logprobs=m.logprobs,
                                calculator=m.calculator, timer=m.timer)


def times_aside(metrics):
    return {key: value for key, value in metrics.items() if "_per_s" not in key}


def test_naive_and_fast_make_the_same(home, tmp_path):
    made = runs.ready(home, tmp_path, advantage_estimator="gae", init_kl_coef=0.1, max_epochs=2, save_trajectories=True)
    fast, slow = rollout(made), rollout(made, maker=naive(made))
    for f in fields(fast.exp):
        left, right = fast.exp.__dict__[f.name], slow.exp.__dict__[f.name]
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right, f.name
    assert fast.episodes == slow.episodes and times_aside(fast.metrics) == times_aside(slow.metrics)
    assert fast.exp.values is not None and fast.exp.ref_logprobs is not None and fast.exp.old_logprobs is not None
    assert not torch.equal(rollout(made, step=1).exp.token_ids, fast.exp.token_ids), "steps must differ"


def test_fast_scores_before_all_groups_are_finished(home, tmp_path, monkeypatch):
    made, events = runs.ready(home, tmp_path), []
    begin = made.maker.rewards.begin
    made.maker.rewards.begin = lambda responses: events.append(len(responses)) or begin(responses)
    monkeypatch.setattr(fast_exp_maker, "generate", lambda *a: (scheduler.generate(*a), events.append("generated"))[0])
    rollout(made)
    assert events == [2] * 4 + ["generated"], "what is decided here waits for its group"


def test_rewards_see_the_response_only(home, tmp_path):
    seen = []
    made = runs.ready(home, tmp_path, lambda item: seen.append(item) or Outcome(0.0), save_trajectories=True)
    done = rollout(made)
    assert len(seen) == 8 and {item.prompt for item in seen} == set(runs.PROMPTS[:4])
    assert sorted(item.response for item in seen) == sorted(row.text for row in done.episodes)
    tokenizer = made.tokenizer
    for b, row in enumerate(done.episodes):
        exp = done.exp.select([b])
        text = tokenizer.decode(exp.token_ids[exp.loss_mask])
        assert text.removesuffix(tokenizer.eos_token) == row.text
        assert tokenizer.decode(exp.token_ids[~exp.loss_mask]) == row.prompt.text


def test_the_reference_and_the_source_reach_the_reward(home, tmp_path):
    made = runs.ready(home, tmp_path, lambda item: Outcome(float(item.reference) + (item.data_source == "odd")))
    assert rollout(made).exp.rewards.tolist() == [0, 0, 2, 2, 2, 2, 4, 4]


def test_an_unscored_sample_shifts_no_group(home, tmp_path):
    """Without its reward a sample has advantage 0; every other group is what it was."""
    made = runs.ready(home, tmp_path / "a", n_samples_per_prompt=3, train_batch_size=12)
    full = rollout(made)
    victim = next(row for row in full.episodes if row.group_id == 1)
    text = made.tokenizer.decode(full.exp.select([3]).token_ids[full.exp.select([3]).loss_mask])

    def score(item):
        gone = item.response == text.removesuffix(made.tokenizer.eos_token)
        return Outcome(None, "lost") if gone and item.prompt == runs.PROMPTS[1] else runs.letters(item)

    less = rollout(runs.ready(home, tmp_path / "b", score, n_samples_per_prompt=3, train_batch_size=12))
    assert victim.index == 0 and less.episodes[3].score.error == "lost" and not less.exp.scored[3]
    assert less.metrics["reward/unscored"] == 1 == less.metrics["reward/unscored/lost"]
    assert less.exp.group_ids.tolist() == full.exp.group_ids.tolist() == [g for g in range(4) for _ in range(3)]
    assert not less.exp.select([3]).advantages.any()
    for b in (0, 1, 2, *range(6, 12)):
        assert torch.equal(less.exp.select([b]).advantages, full.exp.select([b]).advantages), b
    pair = less.exp.select([4, 5])
    last = pair.advantages[pair.cu_seqlens[1:].long() - 1]
    assert last.sum().abs() < 1e-5, "the rest of the group is compared with itself"
    shuffled = less.exp.select(list(reversed(range(12))))
    made.maker.calculator(shuffled)
    assert torch.equal(shuffled.select([11]).advantages, less.exp.select([0]).advantages)


def test_metrics_tell_what_was_rolled_out(home, tmp_path):
    done = rollout(runs.ready(home, tmp_path, generate_max_len=6))
    mask, cu = done.exp.loss_mask, done.exp.cu_seqlens.tolist()
    lengths = [int(mask[a:b].sum()) for a, b in zip(cu, cu[1:])]
    stopped = [row.finish_reason == "stop" for row in done.episodes]
    assert len(set(lengths)) > 2 and any(stopped) and not all(stopped), "the batch is too uniform to show anything"
    expected = {"prompts": 4, "samples": 8, "tokens": sum(lengths), "response_len/mean": sum(lengths) / 8,
                "response_len/max": max(lengths), "truncated_frac": 1 - sum(stopped) / 8}  # yapf: disable
    assert {key: done.metrics[f"rollout/{key}"] for key in expected} == pytest.approx(expected)
    rewards = torch.tensor([row.reward for row in done.episodes])
    for name in ("reward", "reward/judge"):
        assert done.metrics[f"{name}/mean"] == pytest.approx(rewards.mean().item())
        assert done.metrics[f"{name}/std"] == pytest.approx(rewards.std(correction=0).item())


@pytest.mark.parametrize("options,wanted", [({}, False), ({"max_epochs": 2}, True), ({"train_batch_size": 4}, True),
                                            ({"init_kl_coef": 0.1}, True),
                                            ({"init_kl_coef": 0.1, "use_kl_loss": True}, False)])
def test_old_logprobs_are_skipped_only_where_the_update_gives_them(home, tmp_path, options, wanted):
    exp = rollout(runs.ready(home, tmp_path, **options)).exp
    assert (exp.old_logprobs is not None) == wanted
    assert (exp.ref_logprobs is not None) == ("init_kl_coef" in options)
    if wanted:
        assert (exp.old_logprobs - exp.rollout_logprobs).abs().max() < 1e-5


def test_media_keys_reach_the_engine_which_takes_text_only(home, tmp_path):
    made = runs.ready(home, tmp_path)
    prompts = [replace(prompt, media=("cat.png", "dog.wav")) for _, prompt in made.loader.draw(1)]
    with pytest.raises(ValueError, match=r"prompt 0 has media \(cat.png, dog.wav\); the HF engine takes text only"):
        made.maker.make(prompts, 1)


def test_seeds_tell_run_step_group_and_sample_apart():
    paths = [(42, 0, 1, 1), (42, 1, 0, 1), (42, 1, 1, 0), (421, 0, 1, 1), (4, 20, 1, 1), ("eval", "0:1", 1)]
    seeds = [sample_seed(*path) for path in paths]
    assert len(set(seeds)) == len(paths) and all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(42, 0, 1, 1) == 6585778729138861913, "seeds must not change between machines and versions"


def test_samples_and_packing():
    tokenizer = tiny.tokenizer()
    prompt = Prompt("u", tokenizer.encode("ab"), "ab", media=("cat.png", ))
    eos, body = tokenizer.eos_token_id, tokenizer.encode("xyz")
    done = [(Segment([*body, eos], [-0.1, -0.2, -0.3, -0.4], version=7), "stop"),
            (Segment(body[:2], [-1.0, -2.0], version=7), "length")]  # yapf: disable
    samples = decode(tokenizer, [Episode.of(prompt, 5, j, *each) for j, each in enumerate(done)])
    assert [s.text for s in samples] == ["xyz", "xy"], "the end token is no text, and a cut response keeps its own"
    assert samples[0].token_ids[-1] == eos and samples[0].loss_mask == [False] * 2 + [True] * 4
    exp = Batch.of(samples)
    assert exp.keys == [(5, 0), (5, 1)]
    assert exp.truncated.tolist() == [False, True] and exp.media == [("cat.png", )] * 2
    assert exp.weight_versions.tolist() == [-1] * 2 + [7] * 4 + [-1] * 2 + [7] * 2
    assert exp.cu_seqlens.tolist() == [0, 6, 10] and exp.loss_mask.sum() == 6
    assert exp.rollout_logprobs.tolist() == pytest.approx([0, 0, -0.1, -0.2, -0.3, -0.4, 0, 0, -1, -2])


@pytest.mark.parametrize("tokenizer", [metaspace(), byte_level()], ids=["metaspace", "byte level"])
@pytest.mark.parametrize("context", ["Q:", "Q\u20ac", "</s>", "Q: ", ""])
def test_a_response_keeps_the_blank_that_it_begins_with(tokenizer, context):
    """Also behind a prompt that ends with bytes of a character: alone, its last token is no text."""
    prompt = Prompt("u", tokenizer.encode(context), context)
    vocab = tokenizer.get_vocab()
    blank, letter = vocab["\u2581" if "\u2581" in vocab else "\u0120"], vocab["2"]
    done = [Segment([*body, tokenizer.eos_token_id], [0.0] * (len(body) + 1))
            for body in ([blank, letter], [letter], [])]  # yapf: disable
    texts = [each.text for each in decode(tokenizer, [Episode.of(prompt, 0, 0, each, "stop") for each in done])]
    stripped = not context and tokenizer.decode([blank]) == ""  # nothing is before it
    assert texts == ["2" if stripped else " 2", "2", ""]


def test_a_response_of_two_turns_has_two_runs_in_the_mask():
    prompt = Prompt("u", [5, 6], "ab")
    episode = Episode.of(prompt, 0, 0, Segment([7, 8], [-0.1, -0.2], version=3), "stop")
    episode.give([20, 21])
    episode.add([Segment([9], [-0.3], version=3)], "length")
    exp = Batch.of([episode])
    assert exp.loss_mask.tolist() == [False, False, True, True, False, False, True]
    assert exp.weight_versions.tolist() == [-1, -1, 3, 3, -1, -1, 3] and torch.equal(exp.drawn, exp.loss_mask)
    assert exp.rollout_logprobs.tolist() == pytest.approx([0, 0, -0.1, -0.2, 0, 0, -0.3])


def test_end_tokens_of_the_generation_config_are_no_text_and_stop_strings_are():
    tokenizer = tiny.tokenizer()
    end, body = tokenizer.convert_tokens_to_ids("<|im_start|>"), tokenizer.encode("xyz")
    prompt = Prompt("u", tokenizer.encode("ab"), "ab")
    ended = Episode.of(prompt, 0, 0, Segment([*body, end], [0.0] * 4), "stop")
    cut = Episode.of(prompt, 0, 0, Segment(body, [0.0] * 3), "length")
    assert decode(tokenizer, [ended])[0].text == "xyz"
    assert decode(tokenizer, [ended], stop=(end, ))[0].text == "xyz<|im_start|>"
    assert decode(tokenizer, [cut])[0].text == "xyz"


def test_a_stop_string_must_be_one_token():
    tokenizer = tiny.tokenizer()
    assert stop_token_ids(["x", "<|im_start|>"],
                          tokenizer) == (tokenizer.encode("x")[0], tokenizer.convert_tokens_to_ids("<|im_start|>"))
    with pytest.raises(ValueError, match="--stop 'ab' is 2 tokens"):
        stop_token_ids(["ab"], tokenizer)
