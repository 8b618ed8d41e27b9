"""Every recipe and option group on the fake CUDA device: the numbers of the CPU, the syncs of the docs."""
import math

import pytest
import torch

from lightrft.config.presets import RECIPES
from lightrft.ops.segment import segment_sum
from lightrft.tests.support import runs
from lightrft.tests.support.fake_cuda import CudaTensor, DeviceMismatch, fake_cuda, SYNC
from lightrft.trainer import ppo_update

no_picture = runs.no_picture
STEPS = {"max_steps": 2, "train_batch_size": 4, "micro_train_batch_size": 2}
NOT_NUMBERS = ("time/", "perf/", "rollout/tokens_per_s")
GROUPS = {
    "lora": {"lora_rank": 4, "init_kl_coef": 0.1, "target_modules": ["q_proj", "v_proj"]},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "oversample": {"oversample": 2.0},
    "overlapped passes": {"overlap_passes": True},
    "optimizer offload": {"adam_offload": True},
    "fsdp": {"strategy": "fsdp", "init_kl_coef": 0.1, "use_kl_loss": True, "kl_estimator": "k3"},
    "fsdp, optimizer offload": {"strategy": "fsdp", "adam_offload": True},
}
OFFLOAD = {"strategy": "fsdp", "offload_during_rollout": True, "recipe": "ppo"}


@pytest.fixture(name="home", scope="module")
def home_fixture(tmp_path_factory):
    return runs.write_home(tmp_path_factory.mktemp("home"))


def numbers(line):
    return {key: value for key, value in line.items() if not key.startswith(NOT_NUMBERS)}


def assert_same(lines, expected):
    """The same keys, and the same values to rounding, in every step."""
    assert len(lines) == len(expected)
    for line, right in zip(map(numbers, lines), map(numbers, expected)):
        assert line.keys() == right.keys()
        different = {
            key: (line[key], value) for key, value in right.items()
            if line[key] != value and not math.isclose(line[key], value, rel_tol=1e-4, abs_tol=1e-5)
        }
        assert not different


def compare(home, folder, options, only_cuda=()):
    """One run on each device; ``only_cuda``: options that the CPU refuses. Returns the ledger of the fake device."""
    known = {key: value for key, value in options.items() if key not in only_cuda}
    expected = runs.run(home, folder / "cpu", **STEPS | known)
    expected.trainer.strategy.teardown()
    with fake_cuda() as ledger:
        found = runs.run(home, folder / "cuda", **STEPS | options)
        weight = next(found.trainer.prepared["actor"].model.parameters())
        assert weight.device.type == "cuda"
        found.trainer.strategy.teardown()
    assert_same(found.lines, expected.lines)
    return ledger


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_gives_the_numbers_of_the_cpu(recipe, home, tmp_path):
    compare(home, tmp_path, {"recipe": recipe})


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_group_gives_the_numbers_of_the_cpu(group, home, tmp_path):
    compare(home, tmp_path, GROUPS[group])


def test_models_that_leave_the_device_during_generation_give_the_numbers_of_the_cpu(home, tmp_path):
    compare(home, tmp_path, OFFLOAD, only_cuda=["offload_during_rollout"])


# -- the device itself ------------------------------------------------------------------------------------------------
def test_tensors_of_both_sides_do_not_meet():
    with fake_cuda(), pytest.raises(DeviceMismatch,
                                    match=r"ops/segment\.py:\d+ got .* cuda:0 \[1\], cpu \[3\], cuda:0 \[3\]"):
        segment_sum(torch.ones(3, device="cuda"), torch.tensor([0, 3]))


def test_a_copy_that_is_planted_in_the_update_is_counted(home, tmp_path, monkeypatch):
    """The update is asked for a number once more per micro-batch."""
    with fake_cuda() as ledger:
        runs.run(home, tmp_path / "before", **STEPS)
        before = ledger.total(SYNC)
        ledger.counts.clear()
        peak = ppo_update._peak
        monkeypatch.setattr(ppo_update, "_peak", lambda values, mask: peak(values.cpu(), mask.cpu()).to(values.device))
        runs.run(home, tmp_path / "after", **STEPS)
    assert ledger.total(SYNC) >= before + 3 * 8, "eight micro-batches, three copies in each"


def test_results_are_on_the_device_and_hold_the_right_data():
    with fake_cuda():
        x = torch.arange(4, device="cuda").float().requires_grad_()
        (x * x).sum().backward()
        assert isinstance(x.grad, CudaTensor) and str(x.grad.device) == "cuda:0" and x.is_cuda
        assert torch.equal(x.grad.cpu(), torch.tensor([0.0, 2.0, 4.0, 6.0]))
        with pytest.raises(TypeError, match="cpu"):
            x.detach().numpy()
    assert not torch.cuda.is_available()
