"""Choices that must not change the result: cuts, packs and ranks of a batch, and passes that are skipped."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrft.tests.support import runs, tiny
from lightrft.tests.support.invariants import (SPREAD, build, gradients, largest_gap, make_rollout, measure, updated)
from lightrft.tests.support.launch import torchrun

LOSSES = {
    "token-mean": {},
    "seq-mean-token-mean": {"loss_agg_mode": "seq-mean-token-mean"},
    "seq-mean-token-sum": {"loss_agg_mode": "seq-mean-token-sum"},
    "seq-mean-token-sum-norm": {"loss_agg_mode": "seq-mean-token-sum-norm"},
    "kl loss": {"init_kl_coef": 0.1, "use_kl_loss": True},
    "entropy": {"entropy_coef": 0.05},
    "dual clip": {"dual_clip": 1.1, "eps_clip_high": 0.4},
    "critic with ptx": {"advantage_estimator": "gae", "pretrain_data": ["train.jsonl"], "ptx_batch_size": 5},
}  # yapf: disable
CUTS = {"1x8": (8, 10**6), "8x1": (1, 10**6), "pairs": (3, 10**6), "token budget": (0, 40)}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = runs.write_home(tmp_path_factory.mktemp("home"))
    tiny.save_model(folder / "other", num_hidden_layers=1, initializer_range=0.3, seed=1)
    return folder


def off_policy(trainer):
    """The first rollout, one sample of which keeps nothing; then the weights move."""
    rollout = make_rollout(trainer)
    dead = rollout.exp.cu_seqlens[2:4].tolist()
    rollout.exp.loss_mask[slice(*dead)] = False
    with torch.no_grad():
        for prepared in trainer.prepared.values():
            for name, parameter in prepared.model.named_parameters():
                parameter.mul_(1.1 if "mlp" in name else 1.0)
    return rollout


@pytest.mark.parametrize("name", list(LOSSES))
def test_the_cut_into_micro_batches_changes_nothing(name, home, tmp_path):
    found, passes = {}, {}
    for cut, (rows, tokens) in CUTS.items():
        trainer = build(home, tmp_path, max_epochs=2, micro_train_batch_size=rows, max_tokens_per_micro_batch=tokens,
                        **LOSSES[name])
        rollout = off_policy(trainer)
        passes[cut] = len(rollout.plan.epoch(0)[0].micro_batches)
        found[cut] = (*gradients(trainer, rollout), updated(trainer))
    assert (passes["1x8"], passes["8x1"], passes["pairs"]) == (1, 8, 4) and 2 < passes["token budget"] < 8
    whole = found.pop("1x8")
    for cut, (metrics, grads, weights) in found.items():
        assert metrics == pytest.approx(whole[0], rel=1e-3, abs=1e-5), cut
        assert largest_gap(grads, whole[1]) < 1e-5, cut
        assert largest_gap(weights, whole[2]) < 1e-4, cut
    assert whole[0]["policy/ratio_max"] > 1.05, "on policy, a wrong old policy would not be seen"


def test_packed_is_alone(home, tmp_path):
    """Log-probs, entropy and values of a packed row are those of each sequence alone."""
    trainer = build(home, tmp_path, advantage_estimator="gae")
    exp, actor, critic = make_rollout(trainer).exp, *(trainer.prepared[name].model for name in ("actor", "critic"))
    torch.nn.init.normal_(critic.hf_model.score.weight)
    with torch.no_grad():
        for model in (lambda e: actor(e)[0], lambda e: actor(e, entropy=True)[1], critic):
            packed = model(exp)
            alone = torch.cat([model(exp.select([i])) for i in range(exp.num_seqs)])
            assert packed.abs().max() > 0.1 and torch.allclose(packed, alone, atol=1e-5)


def test_the_step_is_that_of_a_plain_loop(home, tmp_path):
    """GRPO, written again: full logits of a stock Hugging Face model, one sequence at a time."""
    trainer = build(home, tmp_path, temperature=0.8)
    rollout, model = make_rollout(trainer), AutoModelForCausalLM.from_pretrained(home / "model")
    losses = []
    for i in range(8):
        one, pair = rollout.exp.select([i]), rollout.exp.rewards[i // 2 * 2:i // 2 * 2 + 2]
        logits = model(input_ids=one.token_ids[None]).logits[0, :-1] / 0.8
        logprobs = logits.log_softmax(-1).gather(-1, one.token_ids[1:, None])[:, 0][one.loss_mask[1:]]
        assert torch.allclose(logprobs, rollout.exp.select([i]).rollout_logprobs[one.loss_mask], atol=1e-4)
        losses.append(-logprobs * (rollout.exp.rewards[i] - pair.mean()) / (pair.std() + 1e-6))
    torch.cat(losses).mean().backward()
    expected = {f"actor/model.{name}": parameter.grad for name, parameter in model.named_parameters()}
    metrics, grads = gradients(trainer, rollout)
    assert largest_gap(grads, expected) < 1e-5
    norm = torch.nn.utils.get_total_norm(list(expected.values())).item()
    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)


def of_ranks(home, folder, ranks, *words):
    """The facts of some FSDP2 ranks."""
    folder.mkdir()
    torchrun("lightrft.tests.support.invariants", home, folder, *words, ranks=ranks)
    return torch.load(folder / "facts.pt", weights_only=False)


@pytest.fixture(scope="module")
def worlds(home, tmp_path_factory):
    """The facts of one process and of two FSDP2 ranks."""
    folder = tmp_path_factory.mktemp("worlds")
    return measure(home, folder / "one"), of_ranks(home, folder / "two", 2, "run")


@pytest.fixture(scope="module")
def four(home, tmp_path_factory):
    """The facts of four FSDP2 ranks, without whole runs."""
    return of_ranks(home, tmp_path_factory.mktemp("worlds") / "four", 4)


def check_rollout(one, other):
    assert one.keys() == other.keys()
    for field, value in one.items():
        same = torch.equal(value, other[field]) if not value.is_floating_point() else torch.allclose(
            value, other[field], rtol=1e-5, atol=1e-5)
        assert same, f"{field} differs"


@pytest.mark.dist
@pytest.mark.parametrize("name", list(SPREAD))
def test_two_ranks_roll_out_what_one_does(worlds, name):
    check_rollout(*(world[name]["exp"] for world in worlds))
    (all_here, samples), (half, _) = (world[name]["held"] for world in worlds)
    assert all_here == samples and 0 < half < samples, "each rank holds its own sequences"


@pytest.mark.dist
@pytest.mark.parametrize("name", list(SPREAD))
def test_four_ranks_do_what_one_does(worlds, four, name):
    """With mini-batches of four or five samples, so that a rank trains one or two."""
    one, other = worlds[0][name], four[name]
    check_rollout(one["exp"], other["exp"])
    assert other["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-5)
    assert largest_gap(other["grads"], one["grads"]) < 1e-5
    assert largest_gap(other["weights"], one["weights"]) < 1e-5


@pytest.mark.dist
@pytest.mark.parametrize("name", list(SPREAD))
def test_two_ranks_learn_what_one_does(worlds, name):
    one, two = (world[name] for world in worlds)
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-5)
    assert largest_gap(two["grads"], one["grads"]) < 1e-5
    assert largest_gap(two["weights"], one["weights"]) < 1e-5
    reached = one["run"]["weights"]
    assert largest_gap(reached, one["weights"]) > 1e-3, "a run must move the weights"
    assert largest_gap(two["run"]["weights"], reached) < 1e-4


@pytest.mark.dist
@pytest.mark.parametrize("name", list(SPREAD))
def test_two_ranks_write_what_one_does(worlds, name):
    """Rollouts as jsonl (the last one comes from weights that were trained before), metrics of every step."""
    one, two = (world[name]["run"] for world in worlds)
    for ours, theirs in zip(one["rollouts"], two["rollouts"], strict=True):
        for left, right in zip(ours, theirs, strict=True):
            assert right.pop("advantage") == pytest.approx(left.pop("advantage"), abs=1e-3)
            assert right == left
    for left, right in zip(one["lines"], two["lines"], strict=True):
        keys = {key for key in left if not key.startswith(("time/", "perf/")) and "_per_s" not in key}
        assert keys == {key for key in right if not key.startswith(("time/", "perf/")) and "_per_s" not in key}
        close = {key for key in keys if "mismatch" not in key}
        assert {key: right[key] for key in close} == pytest.approx({key: left[key] for key in close}, rel=5e-3,
                                                                   abs=1e-3)
    assert one["lines"][-1]["rollout/mismatch/abs_logp_mean"] < 1e-5
    assert two["lines"][-1]["rollout/mismatch/abs_logp_mean"] < 1e-5, "the engine did not get the new weights"


@pytest.mark.dist
@pytest.mark.parametrize("world", [0, 1])
def test_leaving_out_the_old_logprob_pass_changes_not_one_bit(worlds, world):
    skipped, forced = (worlds[world]["skipping"][name] for name in ("skipped", "forced"))
    assert (skipped["ran"], forced["ran"]) == (False, True)
    assert skipped["metrics"] == forced["metrics"] and skipped["metrics"]["policy/first_ratio_gap"] == 0.0
    for part in ("grads", "weights"):
        assert all(torch.equal(value, forced[part][name]) for name, value in skipped[part].items()), part


@pytest.mark.dist
@pytest.mark.parametrize("world", [0, 1])
def test_the_facts_of_the_first_step_are_in_the_metrics(worlds, world):
    for name, options in SPREAD.items():
        first = worlds[world][name]["run"]["lines"][0]
        assert ("policy/first_kl_ref" in first) == ("init_kl_coef" in options), "measured where there is a reference"
        assert first["policy/first_ratio_gap"] == 0.0 == first.get("policy/first_kl_ref", 0.0)
        assert 0 <= first["rollout/mismatch/abs_logp_mean"] < 1e-5 and first["rollout/mismatch/abs_dp_max"] < 1e-4
