"""Samples without advantage are left out of the update, and nothing but the time it takes changes."""
import json

import pytest
import torch

from lightrft.algorithms.base import POLICY_LOSSES
from lightrft.config.schema import AlgorithmConfig
from lightrft.config.tree import extended
from lightrft.rewards.base import Outcome
from lightrft.tests.support import runs, tiny_task
from lightrft.tests.support.launch import finish
from lightrft.trainer.batch_plan import BatchPlan, MicroBatchLimits
from lightrft.types import Experience

BUILT_IN = sorted(name for name in POLICY_LOSSES if POLICY_LOSSES.get(name).fn.__module__.startswith("lightrft.algor"))


def judge(item):
    """Half of the prompts have flat groups; of the others one response in five is not scored."""
    if int(item.reference) % 2:
        return Outcome(0.5)
    value = runs.letters(item).value
    return Outcome(None, "lost") if round(value * 11) % 5 == 1 else Outcome(value)


def traced(home, folder, double=False, **options):
    """A run, the forward passes of its policy, and the gradient of every optimizer step."""
    options = {"rollout_batch_size": 6, "n_samples_per_prompt": 4, "train_batch_size": 12} | options
    trainer = runs.build(home, folder, judge, **options)
    model, sizes, grads = trainer.prepared["actor"].model, [], []
    if double:  # rounding is not what is compared; the old log-probs are kept in float32 all the same
        model.double()
        trainer.facts_due = False
    model.register_forward_pre_hook(lambda module, args: sizes.append(args[0].num_seqs) if module.training else None)
    step = trainer.strategy.optimizer_step

    def spied(prepared, max_norm=0.0):
        if prepared is trainer.prepared["actor"]:
            grads.append({name: p.grad.clone() for name, p in prepared.model.named_parameters() if p.grad is not None})
        return step(prepared, max_norm)

    trainer.strategy.optimizer_step = spied
    trainer.fit()
    return runs.Run(trainer, folder), sizes, grads


def same_gradients(one, two, limit=1e-7):
    assert len(one) == len(two) and all(a.keys() == b.keys() for a, b in zip(one, two))
    return max((a[name] - b[name]).abs().max().item() for a, b in zip(one, two) for name in a) < limit


SAME = [{}, {"train_batch_size": 2, "micro_train_batch_size": 2}, {"max_epochs": 2},
        {"loss_agg_mode": "seq-mean-token-mean", "rollout_correction": "tis"},
        {"advantage_estimator": "rloo", "gamma": 0.9},
        {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-sum-norm"}]  # yapf: disable


@pytest.mark.parametrize("options", SAME)
def test_the_gradient_is_the_same_and_less_is_forwarded(options, home, tmp_path):
    options = options | {"actor_learning_rate": 0.0}  # the gradients of all steps compare
    less, few, found = traced(home, tmp_path / "a", True, **options)
    whole, all_of_them, expected = traced(home, tmp_path / "b", True, **options, drop_zero_advantage=False)
    assert same_gradients(found, expected) and any(grad.abs().max() > 1e-3 for grad in expected[-1].values())
    dropped, epochs = less.metrics["rollout/dropped_samples"], options.get("max_epochs", 1)
    assert 12 <= dropped < 24 and whole.metrics["rollout/dropped_samples"] == 0
    assert sum(all_of_them) == 24 * epochs
    empty = sum(not grad for grad in (any(g.any() for g in step.values()) for step in expected))  # an empty pass each
    assert sum(few) == (24 - dropped) * epochs + empty
    for key in ("policy/loss", "policy/grad_norm", "policy/optimizer_steps", "policy/empty_steps"):
        assert less.metrics[key] == pytest.approx(whole.metrics[key], abs=1e-6)
    assert less.metrics["policy/trained_tokens"] < whole.metrics["policy/trained_tokens"]
    assert less.metrics["policy/entropy"] != whole.metrics["policy/entropy"], "it is that of the trained samples"
    assert less.metrics["policy/first_ratio_gap"] <= 1e-5


@pytest.mark.parametrize("options",
                         [{"entropy_coef": 0.1}, {"init_kl_coef": 0.1, "use_kl_loss": True}, {"policy_loss": "cpgd"},
                          {"policy_loss": "kl_cov"}, {"policy_loss": "clip_cov"}, {"entropy_target": 1.0}])
def test_nothing_is_dropped_where_something_needs_it(options, home, tmp_path):
    done, sizes, _ = traced(home, tmp_path, **options)
    assert done.metrics["rollout/dropped_samples"] == 0 and sum(sizes) >= 24


def test_the_critic_learns_from_all_samples(home, tmp_path):
    trainer = runs.ready(home, tmp_path, advantage_estimator="gae")
    rollout, seen = trainer.source.make(0), {"actor": 0, "critic": 0}
    rollout.exp.advantages[:rollout.exp.cu_seqlens[3]] = 0
    rollout.shards.count()

    def count(name):
        return lambda module, args: seen.update({name: seen[name] + args[0].num_seqs})

    trainer.update.self_test.due.clear()
    for name, prepared in trainer.prepared.items():
        prepared.model.register_forward_pre_hook(count(name))
    live = sum(bool(rollout.exp.select([i]).advantages.any()) for i in range(8))
    assert trainer.update.run(rollout, 0, 0.0)["rollout/dropped_samples"] == 8 - live >= 3
    assert seen == {"actor": live, "critic": 8} and live > 1


@pytest.mark.parametrize("name", BUILT_IN)
def test_losses_that_say_they_skip_have_no_gradient_without_advantage(name):
    """And the others have one, or choose tokens over a whole mini-batch. Far off policy: every branch is met."""
    generator = torch.Generator().manual_seed(0)
    new, old = (torch.randn(400, generator=generator) * 0.7 - 1 for _ in range(2))
    new.requires_grad_()
    exp = Experience(token_ids=torch.zeros(400).long(), cu_seqlens=torch.arange(0, 401, 8).int(), old_logprobs=old,
                     loss_mask=torch.rand(400, generator=generator) < 0.8, advantages=torch.zeros(400),
                     rollout_logprobs=old, selected=torch.rand(400, generator=generator) < 0.2)
    entry = POLICY_LOSSES.get(name)
    loss, _ = entry.fn(new, exp, extended(AlgorithmConfig)(policy_loss=name, dual_clip=3.0))
    loss[exp.loss_mask].sum().backward()
    assert entry.skips_zero == (not new.grad.any() and entry.selects is None)


def test_a_batch_without_any_advantage_is_a_step_like_another(home, tmp_path):
    """Momentum goes on as without dropping, the facts wait, and what was not measured is not told."""
    flat = runs.Judge(runs.config_of(home, tmp_path).reward, lambda item: Outcome(1.0))
    runs_of = [runs.run(home, tmp_path / str(drop), flat, drop_zero_advantage=drop, max_steps=2, l2=0.1)
               for drop in (True, False)]  # yapf: disable
    for name, value in runs_of[0].weights.items():
        assert torch.equal(value, runs_of[1].weights[name]), name
    line = runs_of[0].metrics
    assert line["rollout/dropped_samples"] == 8 and line["policy/optimizer_steps"] == 1 and line["policy/loss"] == 0
    assert "policy/entropy" not in line and "policy/entropy" in runs_of[1].metrics
    assert runs_of[0].trainer.facts_due and not runs_of[1].trainer.facts_due


def test_every_rank_has_as_many_passes():
    lens = torch.tensor([9, 3, 7, 5, 8, 2, 6, 4])
    buffers = [BatchPlan(lens, 4, MicroBatchLimits(1, 100), rank, 3, "s") for rank in range(3)]
    for live in (torch.zeros(8).bool(), torch.arange(8) < 5, torch.arange(8) == 3, torch.ones(8).bool()):
        for minis in zip(*(buffer.epoch(0) for buffer in buffers)):
            passes = [mini.of(live)[rank] for rank, mini in enumerate(minis)]
            assert len({len(part) for part in passes}) == 1 and len(passes[0]) >= 1
            assert sorted(i for part in passes for micro in part for i in micro) == sorted(
                i for i in minis[0].samples if live[i])  # yapf: disable


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_drop_what_one_does(tmp_path):
    home, found = tiny_task.write_home(tmp_path / "home"), {}
    (home / "reward.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
                                    "    return len(set(solution_str)) / 12 if int(ground_truth) % 8 == 0 else 0.0\n")
    paths = {"pretrain": home / "model", "prompt_data": home / "train.jsonl", "reward": home / "reward.py"}
    more = {"max_steps": 3, "eval_steps": 0, "eval_at_start": False, "disable_ckpt": True, "best_metric": "none",
            "train_batch_size": 4, "save_trajectories": False}  # yapf: disable
    for ranks in (1, 2):
        finish(tmp_path / str(ranks), tiny_task.OPTIONS | paths | more | {"save_path": tmp_path / str(ranks)}, ranks)
        lines = (tmp_path / str(ranks) / "metrics.jsonl").read_text().splitlines()
        found[ranks] = [{
            key: value for key, value in json.loads(line).items()
            if not key.startswith(("time/", "perf/")) and "per_s" not in key
        } for line in lines]
    assert all(line["rollout/dropped_samples"] >= 16 for line in found[1])
    for one, two in zip(found[1], found[2], strict=True):
        assert two == pytest.approx(one, abs=1e-4, rel=1e-3)


def mismatch(line):
    return {key: value for key, value in line.items() if key.startswith("rollout/mismatch/")}


@pytest.mark.parametrize("options", [{"train_batch_size": 24}, {}, {"train_batch_size": 24, "max_epochs": 2},
                                     {"train_batch_size": 24, "init_kl_coef": 0.1}], ids=str)
def test_the_mismatch_covers_every_sample_that_any_pass_has_seen(options, home, tmp_path):
    options = options | {"micro_train_batch_size": 24}
    less, whole = (traced(home, tmp_path / str(drop), **options, drop_zero_advantage=drop)[0].metrics
                   for drop in (True, False))  # yapf: disable
    found, expected = mismatch(less), mismatch(whole)
    assert less["rollout/dropped_samples"] >= 12 and found.keys() == expected.keys() and len(found) == 13
    if options == {"train_batch_size": 24, "micro_train_batch_size": 24}:
        assert 0 < found["rollout/mismatch/tokens"] < expected["rollout/mismatch/tokens"]
    else:
        assert found == pytest.approx(expected, rel=1e-3) and found["rollout/mismatch/tokens"] > 0


@pytest.mark.parametrize("options,known", [
    ({}, False), ({"max_epochs": 2}, True), ({"rollout_correction": "bypass", "max_epochs": 2}, False),
    ({"dynamic_sampling": True, "max_gen_rounds": 1}, False)], ids=str)  # yapf: disable
def test_a_step_without_passes_says_that_nothing_was_compared(options, known, home, tmp_path):
    config = runs.config_of(home, tmp_path, **options)
    line = runs.run(home, tmp_path, runs.Judge(config.reward, lambda item: Outcome(0.5)), **options).metrics
    assert (line["rollout/mismatch/tokens"] == line["rollout/tokens"]) == known
    assert known or mismatch(line) == {"rollout/mismatch/tokens": 0}


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_frozen_actor_is_compared_where_its_old_log_probs_are_known(epochs, home, tmp_path):
    options = {"advantage_estimator": "gae", "freezing_actor_steps": 1, "max_steps": 2}
    line = runs.run(home, tmp_path, max_epochs=epochs, **options).lines[0]
    assert line["rollout/mismatch/tokens"] == (line["rollout/tokens"] if epochs > 1 else 0)
