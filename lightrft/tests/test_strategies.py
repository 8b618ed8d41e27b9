"""Every strategy trains the same: policy, critic and reference, adapters, and a run that changes the strategy."""
import json

import pytest
import torch
from safetensors.torch import load_file

from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.models.loader import load_actor
from lightrft.tests.support import runs, strategy_ranks, tiny
from lightrft.tests.support.launch import torchrun
from lightrft.tests.support.packages import needs_deepspeed
from lightrft.tests.support.runs import no_picture
from lightrft.tests.support.shared_prompts import experience

no_picture = no_picture  # the module draws no curve
pytestmark = needs_deepspeed


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = runs.write_home(tmp_path_factory.mktemp("home"))
    tiny.save_model(folder / "experts", "mixtral", num_hidden_layers=1, initializer_range=0.5)
    for family in ("qwen3_5_moe", "bamba"):
        tiny.save_model(folder / family, family, initializer_range=0.1)
    return folder


@pytest.fixture(scope="module")
def ranks(home, tmp_path_factory):
    folder = tmp_path_factory.mktemp("strategies")
    torchrun(strategy_ranks.__name__, home, folder)
    return folder


@pytest.fixture(scope="module")
def lines(ranks):
    return json.loads((ranks / "lines.json").read_text(encoding="utf-8"))


def numbers(line):
    """The metrics that do not depend on time or memory."""
    aside = ("time/", "perf/", "rollout/tokens_per_s", "rollout/mismatch", "rollout/canary")
    return {key: value for key, value in line.items() if not key.startswith(aside)}


@pytest.mark.dist
@pytest.mark.parametrize("name", ["zero2", "zero3"])
@pytest.mark.parametrize("kind", list(strategy_ranks.KINDS))
def test_zero_learns_what_fsdp_learns(kind, name, lines):
    """Of models whose layers have state, the ranks of one compute one sequence at a time, and of another all eight."""
    ours, theirs = lines[f"{kind} {name}"], lines[f"{kind} fsdp"]
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs):
        assert numbers(one) == pytest.approx(numbers(other), rel=1e-5, abs=1e-5)
        assert one["rollout/mismatch/abs_logp_mean"] < 1e-5, "the engine did not get the new weights"


@pytest.mark.dist
def test_a_run_goes_on_with_another_strategy(lines):
    straight, resumed = lines[f"{strategy_ranks.RESUMED} fsdp"], lines["resumed"]
    assert [line["step"] for line in resumed] == [1, 2]
    assert numbers(resumed[-1]) == pytest.approx(numbers(straight[-1]), rel=1e-5, abs=1e-5)


@pytest.mark.dist
def test_the_balance_of_experts_over_two_ranks_is_that_of_one_process(home, lines, tmp_path):
    alone = runs.run(home, tmp_path, max_steps=2, report=False, **strategy_ranks.options_of("models", home)).lines
    for one, other in zip(alone, lines["models fsdp"]):
        for key in ("policy/aux_loss", "policy/loss", "policy/grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=1e-4), key


@pytest.fixture(scope="module")
def alone(home, tmp_path_factory):
    """A run of the hybrid models in this process, one sequence at a time: its folder and what it left."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, runs.run(home, folder, max_steps=2, micro_train_batch_size=1,
                            **strategy_ranks.options_of("states", home))


@pytest.mark.dist
def test_layers_with_state_on_two_ranks_are_those_of_one_process(ranks, lines, alone):
    """Which trains one sequence at a time. Exports have the weights, and load with the log-probs of the policy."""
    folder, done = alone
    for one, other in zip(done.lines, lines["states fsdp"], strict=True):
        for key in ("policy/loss", "policy/grad_norm", "critic/loss", "critic/grad_norm", "reward/mean"):
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), key
    for name in strategy_ranks.STRATEGIES:
        assert share_apart(ranks / "states" / name, folder) < 1e-3
    policy, exp = done.trainer.prepared["actor"].model.eval(), experience()
    with torch.no_grad():
        loaded = load_actor(PolicyModelConfig(pretrain=str(folder / "hf")), train=False)(exp)[0]
        torch.testing.assert_close(loaded, policy(exp)[0], atol=1e-6, rtol=0)


def share_apart(one, two):
    """The share of weights of two exports that differ: Adam enlarges the rounding of few gradients, nearly 0."""
    ours, theirs = (load_file(folder / "hf" / "model.safetensors") for folder in (one, two))
    assert ours.keys() == theirs.keys()
    gaps = torch.cat([(ours[key] - weight).abs().flatten() for key, weight in theirs.items()])
    return (gaps > 2e-5).float().mean()


def test_layers_with_state_learn_the_same_of_any_micro_batches(home, alone, tmp_path):
    """Eight of one sequence, and one of all eight."""
    folder, done = alone
    whole = runs.run(home, tmp_path, max_steps=2, micro_train_batch_size=8, **strategy_ranks.options_of("states", home))
    for one, other in zip(done.lines, whole.lines, strict=True):
        for key in ("policy/loss", "policy/grad_norm", "critic/loss", "critic/grad_norm", "policy/aux_loss"):
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-6), key
    assert share_apart(tmp_path, folder) < 1e-3


def test_layers_with_state_resume_bit_by_bit(home, alone, tmp_path):
    """Policy, critic, optimizers and random numbers of a run that ends after one step and goes on."""
    folder, done = alone
    models = strategy_ranks.options_of("states", home) | {"micro_train_batch_size": 1} | strategy_ranks.SAVING
    runs.run(home, tmp_path, max_steps=1, **models)
    resumed = runs.run(home, tmp_path, max_steps=2, load_checkpoint=True, **models)
    assert numbers(resumed.lines[-1]) == numbers(done.lines[-1])
    ours, theirs = (load_file(path / "hf" / "model.safetensors") for path in (tmp_path, folder))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
