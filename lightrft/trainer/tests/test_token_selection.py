"""Short real runs of every policy loss, and choices over a whole mini-batch that do not depend on how it is cut."""
import math

import pytest
import torch
from safetensors.torch import load_file

from lightrft.algorithms import POLICY_LOSSES
from lightrft.algorithms.tests.test_policy_losses import NAMES
from lightrft.tests.support import runs

no_picture = runs.no_picture
SEVERAL = {"max_steps": 2, "train_batch_size": 4, "max_epochs": 2}
CHOICES = {"clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_low": 0.1}, "kl_cov": {"kl_cov_ratio": 0.2}}


@pytest.fixture(scope="module")
def trained(home, tmp_path_factory):
    """The run of a loss with several mini-batches and two epochs, made once."""
    made = {}

    def once(name, **options):
        key = (name, *sorted(options.items()))
        if key not in made:
            options = SEVERAL | CHOICES.get(name, {}) | options
            made[key] = runs.run(home, tmp_path_factory.mktemp("run"), policy_loss=name, **options)
        return made[key]

    return once


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_trains(name, trained):
    done, plain = trained(name), trained("ppo")
    for line in done.lines:
        assert line["policy/optimizer_steps"] == 4 and line["policy/first_ratio_gap"] == 0
        assert all(math.isfinite(line[f"policy/{key}"]) for key in ("loss", "ratio", "grad_norm", "kl_old"))
        assert {"policy/clip_frac_low", "policy/clip_frac_high"} <= set(line)
        assert ("policy/selected_frac" in line) is (POLICY_LOSSES.get(name).selects is not None)
    moved = any(not torch.equal(value, plain.weights[key]) for key, value in done.weights.items())
    assert moved is (name != "ppo")


def apart(one, many, start):
    """The distance between two trained models, relative to the way of the first from ``start``.

    Of all weights together, because Adam divides by the size of the gradient: a weight whose gradient is only a
    rounding moves as far as any other, and in another direction after another rounding.
    """

    def distance(a, b):
        return sum((a[name] - b[name]).double().square().sum().item() for name in start)**0.5

    return distance(one, many) / distance(one, start)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("cut", [{"micro_train_batch_size": 1}, {"max_tokens_per_micro_batch": 45}])
def test_the_choice_does_not_depend_on_the_micro_batches(name, cut, trained, home):
    """Also when a rollout is used once, where no old log-probs were computed before."""
    start = load_file(home / "model" / "model.safetensors")
    for batches in ({}, {"train_batch_size": 8, "max_epochs": 1}):
        one, many = trained(name, **batches), trained(name, **batches, **cut)
        assert [line["policy/selected_frac"]
                for line in one.lines] == pytest.approx([line["policy/selected_frac"] for line in many.lines])
        assert one.metrics["policy/selected_frac"] > 0
        assert apart(one.weights, many.weights, start) < 1e-3, "6e-6 was the largest rounding"


def mark(home, folder, **options):
    """A trainer whose rollout was marked for its first mini-batch; ``(trainer, rollout, mini)``."""
    trainer = runs.ready(home, folder, policy_loss="kl_cov", train_batch_size=4, kl_cov_ratio=0.2, **options)
    return trainer, trainer.maker.make(next(trainer.loader), 0, 0.0)


def test_the_choice_is_among_the_tokens_of_the_mini_batch_under_the_current_policy(home, tmp_path):
    trainer, rollout = mark(home, tmp_path, temperature=0.5)
    exp, (first, second), selection = rollout.exp, rollout.plan.epoch(0), trainer.update.selection
    shards = rollout.shards
    calls = []
    trainer.prepared["actor"].model.register_forward_pre_hook(lambda *_: calls.append(1))
    selection.mark(shards, first, 0, fresh=True)
    known = exp.selected
    assert not calls, "the policy is still that of the rollout"
    selection.mark(shards, first, 0, fresh=False)
    assert calls and torch.equal(exp.selected, known)
    owner = torch.arange(8).repeat_interleave(exp.seq_lens.long())
    kept = sum(int(exp.select([i]).loss_mask.sum()) for i in first.samples)
    assert set(owner[known].tolist()) <= set(first.samples) and known.sum() == max(int(0.2 * kept), 1)
    selection.mark(shards, second, 0, fresh=False)
    assert not (exp.selected & known).any() and exp.selected.any()
    with torch.no_grad():
        trainer.prepared["actor"].model.model.get_input_embeddings().weight.mul_(-1)
    selection.mark(shards, first, 0, fresh=False)
    assert not torch.equal(exp.selected, known), "the policy moved"


def test_a_loss_that_chooses_nothing_costs_nothing(home, tmp_path):
    trainer, rollout = mark(home, tmp_path)
    trainer.update.selection.selects = None
    trainer.update.selection.mark(rollout.shards, rollout.plan.epoch(0)[0], 0, fresh=False)
    assert rollout.exp.selected is None


def test_a_resumed_run_draws_the_same_tokens(home, tmp_path, trained):
    saving = {"disable_ckpt": False, "async_save": False, **SEVERAL, **CHOICES["clip_cov"]}
    runs.run(home, tmp_path, policy_loss="clip_cov", **saving | {"max_steps": 1})
    done = runs.run(home, tmp_path, policy_loss="clip_cov", load_checkpoint=True, **saving)
    for key, value in trained("clip_cov").weights.items():
        assert torch.equal(value, done.weights[key]), key
