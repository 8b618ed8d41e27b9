"""Corrections, bypass and the entropy mask in real runs, with an engine whose bfloat16 numbers differ."""
import pytest
import torch

from lightrft.algorithms import CORRECTIONS
from lightrft.tests.support import runs
from lightrft.tests.support.invariants import build, gradients, largest_gap, make_rollout

no_picture = runs.no_picture
TWO = {"micro_train_batch_size": 4}  # micro-batches of the whole rollout


@pytest.fixture(scope="module")
def plain(home, tmp_path_factory):
    return runs.run(home, tmp_path_factory.mktemp("plain"), bf16=True, max_epochs=2)


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "none"])
def test_each_correction_trains(name, home, tmp_path, plain):
    bounds = {} if name == "bypass" else {"correction_low": 0.99999}
    done = runs.run(home, tmp_path, bf16=True, max_epochs=2, rollout_correction=name, **bounds)
    metrics, before = done.metrics, plain.metrics
    assert metrics["policy/grad_norm"] != before["policy/grad_norm"]
    assert (metrics["policy/correction_bound_frac"] > 0) == bool(bounds)
    assert (metrics["policy/correction_weight"] != 1) == bool(bounds)
    assert before["policy/correction_weight"] == 1 and before["policy/correction_bound_frac"] == 0
    mismatch = {key: value for key, value in before.items() if "mismatch" in key}
    assert len(mismatch) == 13 and mismatch == pytest.approx({key: metrics[key] for key in mismatch}, rel=1e-6)


def test_the_veto_drops_whole_responses(home, tmp_path):
    """A threshold between the smallest weights of the responses drops half of them."""
    options = {"bf16": True, "max_epochs": 2, "self_test": False}
    exp = make_rollout(build(home, tmp_path / "a", **options)).exp
    weights = torch.where(exp.loss_mask, (exp.old_logprobs - exp.rollout_logprobs).exp(), 1.0)
    least = torch.stack([part.min() for part in weights.split(exp.seq_lens.tolist())])
    veto = least.sort().values[3:5].mean().item()
    tokens = torch.stack([part.sum() for part in exp.loss_mask.split(exp.seq_lens.tolist())])
    trainer = build(home, tmp_path / "b", rollout_correction="tis", correction_veto=veto, **options)
    metrics = trainer.update.run(make_rollout(trainer), 0, 0.0)
    share = (tokens[least < veto].sum() / tokens.sum()).item()
    assert metrics["policy/correction_veto_frac"] == pytest.approx(share) and 0 < share < 1


def forwards(trainer, rollout):
    """Passes of the actor to complete a rollout and to update on it."""
    counted = []
    handle = trainer.prepared["actor"].model.register_forward_pre_hook(lambda *_: counted.append(1))
    rollout.exp.old_logprobs = None
    trainer.maker.logprobs.fill(rollout.shards, rollout.plan, trainer.timer)
    passes, metrics = len(counted), trainer.update.run(rollout, 0, 0.0)
    handle.remove()
    return passes, metrics


def test_bypass_saves_the_pass_and_its_first_ratio_is_the_mismatch(home, tmp_path):
    options = {"max_epochs": 2, "bf16": True, "self_test": False, **TWO}
    found = {}
    for name in ("none", "bypass"):
        trainer = build(home, tmp_path / name, rollout_correction=name, **options)
        rollout = make_rollout(trainer)
        old = rollout.exp.old_logprobs.clone()
        found[name] = (old, rollout.exp, *forwards(trainer, rollout))
    old, exp, passes, before = found["none"]
    taken, _, saved, metrics = found["bypass"]
    assert (passes, saved) == (2, 0)
    assert torch.equal(taken, exp.rollout_logprobs) and not torch.equal(taken, old)
    gap = ((old - exp.rollout_logprobs).exp() - 1).abs()[exp.loss_mask].max().item()
    assert metrics["policy/first_ratio_gap"] == pytest.approx(gap, rel=1e-4) and gap > 1e-4
    assert before["policy/first_ratio_gap"] == 0
    mismatch = {key: value for key, value in before.items() if "mismatch" in key}
    assert mismatch == pytest.approx({key: metrics[key] for key in mismatch}, rel=1e-6), "of the first step, off policy"


def test_bypass_with_several_steps_measures_the_first(home, tmp_path):
    """Later mini-batches meet a policy that has moved; their distance is no mismatch."""
    options = {"train_batch_size": 4, "actor_learning_rate": 0.01}
    done = runs.run(home, tmp_path, rollout_correction="bypass", **options).metrics
    assert 0 < done["rollout/mismatch/abs_logp_max"] < 1e-4 and done["policy/ratio_max"] > 1.001


def test_the_kl_to_the_reference_is_the_trainers_under_bypass(home, tmp_path):
    done = runs.run(home, tmp_path, rollout_correction="bypass", bf16=True, init_kl_coef=0.1, use_kl_loss=True)
    assert done.metrics["policy/first_kl_ref"] == 0 and done.metrics["policy/first_ratio_gap"] > 0


SHARE = {"high_entropy_token_ratio": 0.3}


@pytest.mark.parametrize("options", [{}, {"init_kl_coef": 0.1, "use_kl_loss": True, "entropy_coef": 0.01}])
def test_only_tokens_of_high_entropy_get_a_policy_gradient(options, home, tmp_path):
    """The threshold is the whole rollout's; the other terms and the denominators keep every token."""
    trainer = build(home, tmp_path, advantage_estimator="reinforce", self_test=False, temperature=0.7, **SHARE,
                    **options)
    rollout = make_rollout(trainer)
    exp = rollout.exp
    model = trainer.prepared["actor"].model
    logprobs, entropies = model(exp, temperature=0.7, entropy=True)
    kept = int(0.3 * int(exp.loss_mask.sum()))
    threshold = entropies[exp.loss_mask].sort(descending=True).values[kept - 1]
    high = exp.loss_mask & (entropies >= threshold)
    assert torch.equal(exp.high_entropy_mask, high) and int(high.sum()) == kept
    torch.testing.assert_close(exp.entropies[exp.loss_mask], entropies[exp.loss_mask])
    token = torch.where(high, -(logprobs - logprobs.detach()).exp() * exp.advantages, 0)
    if options:
        gap = exp.ref_logprobs - logprobs
        token = token + 0.1 * (gap.exp() - 1 - gap) - 0.01 * entropies
    loss = torch.where(exp.loss_mask, token, 0).sum() / exp.loss_mask.sum()
    names, parameters = zip(*model.named_parameters())
    expected = {f"actor/{name}": grad for name, grad in zip(names, torch.autograd.grad(loss, parameters))}
    assert largest_gap(gradients(trainer, rollout)[1], expected) < 1e-5


def test_the_share_does_not_depend_on_the_cut(home, tmp_path):
    found = []
    for rows in (8, 3, 1):
        trainer = build(home, tmp_path / str(rows), micro_train_batch_size=rows, self_test=False, max_epochs=2, **SHARE)
        rollout = make_rollout(trainer)
        found.append((rollout.exp.high_entropy_mask, *gradients(trainer, rollout)))
    for high_entropy_mask, metrics, grads in found[1:]:
        assert torch.equal(high_entropy_mask, found[0][0])
        assert largest_gap(grads, found[0][2]) < 1e-5
        assert metrics == pytest.approx(found[0][1], rel=1e-3, abs=1e-5)
    trainer = build(home, tmp_path / "all", self_test=False, max_epochs=2)
    assert largest_gap(gradients(trainer, make_rollout(trainer))[1], found[0][2]) > 1e-2
