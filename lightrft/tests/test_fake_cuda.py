"""Every recipe and option group on the fake CUDA device: the numbers of the CPU, the syncs of the docs."""
import json
import math
from pathlib import Path

import pytest
import torch

from lightrft.config.presets import RECIPES
from lightrft.config.schema import StrategyConfig
from lightrft.models import attention
from lightrft.ops.segment import segment_sum
from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.hf.engine import HFEngine
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import runs, tiny
from lightrft.tests.support.episodes import Group, generate
from lightrft.tests.support.fake_cuda import CudaTensor, DeviceMismatch, fake_cuda, GRAPH, KERNEL, SYNC
from lightrft.tests.support.fake_cuda.ledger import EMPTIED, marginal
from lightrft.trainer import ppo_update
from lightrft.trainer.checks.gradient_invariance import set_aside
from lightrft.trainer.offline.tests import test_sft_trainer as sft

no_picture = runs.no_picture
BF16 = 2e-2
STEPS = {"max_steps": 2, "train_batch_size": 4, "micro_train_batch_size": 2}
NOT_NUMBERS = ("time/", "perf/", "rollout/tokens_per_s")
GROUPS = {
    "lora": {"lora_rank": 4, "init_kl_coef": 0.1, "target_modules": ["q_proj", "v_proj"]},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "oversample": {"oversample": 2.0},
    "fsdp, overlapped passes": {"strategy": "fsdp", "overlap_passes": True, "init_kl_coef": 0.1},
    "optimizer offload": {"adam_offload": True},
    "fsdp": {"strategy": "fsdp", "init_kl_coef": 0.1, "use_kl_loss": True, "kl_estimator": "k3"},
    "fsdp, optimizer offload": {"strategy": "fsdp", "adam_offload": True},
    "fsdp, 8 bits": {"strategy": "fsdp", "optim": "adamw_8bit", "adam_offload": True},
}
OFFLOAD = {"strategy": "fsdp", "offload_during_rollout": True, "recipe": "ppo"}


@pytest.fixture(name="home", scope="module")
def home_fixture(tmp_path_factory):
    """A model and its data; one run has put tables on the device that stay there."""
    home = runs.write_home(tmp_path_factory.mktemp("home"))
    tiny.save_model(home / "other", num_hidden_layers=1, seed=1)
    with fake_cuda():
        runs.run(home, home / "warm", max_steps=1)
    return home


def numbers(line):
    return {key: value for key, value in line.items() if not key.startswith(NOT_NUMBERS)}


def assert_same(lines, expected, rounding=1e-5):
    """The same keys, and the same values to ``rounding``, in every step."""
    assert len(lines) == len(expected)
    for line, right in zip(map(numbers, lines), map(numbers, expected)):
        assert line.keys() == right.keys()
        different = {
            key: (line[key], value) for key, value in right.items()
            if line[key] != value and not math.isclose(line[key], value, rel_tol=10 * rounding, abs_tol=rounding)
        }
        assert not different


def compare(home, folder, options, only_cuda=(), rounding=1e-5):
    """One run on each device; ``only_cuda``: options that the CPU refuses. Returns the ledger of the fake device."""
    known = {key: value for key, value in options.items() if key not in only_cuda}
    expected = runs.run(home, folder / "cpu", **STEPS | known)
    expected.trainer.strategy.teardown()
    with fake_cuda() as ledger:
        found = runs.run(home, folder / "cuda", **STEPS | options)
        weight = next(found.trainer.prepared["actor"].model.parameters())
        assert weight.device.type == "cuda"
        found.trainer.strategy.teardown()
    assert_same(found.lines, expected.lines, rounding)
    return ledger


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_gives_the_numbers_of_the_cpu(recipe, home, tmp_path):
    compare(home, tmp_path, {"recipe": recipe})


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_group_gives_the_numbers_of_the_cpu(group, home, tmp_path):
    compare(home, tmp_path, GROUPS[group])


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_half_precision_takes_the_kernels_of_cuda(strategy, home, tmp_path, monkeypatch):
    """One optimizer step; attention rounds elsewhere than on the CPU. Fused layers of the engine round elsewhere too,
    and then draw another token: both devices run without them."""
    calls, attend = [], attention._attend_varlen
    monkeypatch.setattr("lightrft.rollout.hf.engine.find_fused", lambda *args: None)
    monkeypatch.setattr(attention, "_attend_varlen", lambda *args: calls.append(1) or attend(*args))
    options = {"strategy": strategy, "bf16": True, "max_steps": 1, "train_batch_size": 8}
    compare(home, tmp_path, options, rounding=BF16)
    assert calls


def test_models_that_leave_the_device_during_generation_give_the_numbers_of_the_cpu(home, tmp_path):
    """And a teacher that is there for its passes only. The engine is small: what it holds stays, and torch's memory."""
    options = OFFLOAD | {"teacher_model": str(home / "other"), "teacher_offload": True}
    ledger = compare(home, tmp_path, options, only_cuda=["offload_during_rollout"])
    emptied = ledger.sites(EMPTIED)
    assert emptied["strategy/base.py:StrategyBase.offload"] >= 6, "three models, twice"
    assert emptied["rollout/hf/engine.py:HFEngine._give_back"] == 1, "when the run ends"


class Pads(torch.nn.Linear):
    """Reads its weight on the host as soon as it has moved, as FSDP2 does to pad uneven shards."""

    def _apply(self, fn, recurse=True):
        moved = super()._apply(fn, recurse)
        self.read = self.weight.detach() * 1
        return moved


def test_weights_have_arrived_in_host_memory_when_modules_read_them():
    strategy = get_strategy(StrategyConfig(strategy="single"))
    with fake_cuda():
        strategy.setup()
        prepared = strategy.prepare(Pads(3, 2))
        before = prepared.model.weight.cpu()
        strategy.offload(prepared)
        assert not prepared.model.read.is_cuda and torch.equal(prepared.model.read, before)
        strategy.reload(prepared)
        assert prepared.model.weight.is_cuda and torch.equal(prepared.model.weight.cpu(), before)


@pytest.mark.parametrize("free, stays", [(47, False), (48, True)])
def test_gradients_of_the_self_test_stay_on_a_device_with_room_for_the_moments(free, stays, monkeypatch):
    """Six numbers in float32: their copy waits on the device, or in host memory where the device is full."""
    with fake_cuda() as ledger:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 30))
        grads = {"weight": torch.arange(6.0, device="cuda")}
        ledger.counts.clear()
        copies = set_aside(grads)
        assert copies["weight"].is_cuda == stays and ledger.total(SYNC) == (not stays)
        grads["weight"].zero_()
        assert copies["weight"].tolist() == [0, 1, 2, 3, 4, 5]


class InFiles(torch.nn.Linear):
    """A layer that reads its weight and a scale, which is no parameter, from files."""

    def __init__(self):
        super().__init__(3, 2, bias=False, device="meta")
        self.register_buffer("scale", torch.ones(1, device="meta"))

    def read(self, name, at):
        return torch.full((1, ) if name == "scale" else (2, 3), 5.0)


def test_buffers_from_files_are_on_the_device_also_when_weights_are_not():
    strategy = get_strategy(StrategyConfig(strategy="fsdp", fsdp_cpu_offload=True))
    with fake_cuda():
        strategy.setup()
        model = strategy.prepare(InFiles()).model
        assert model.scale.is_cuda and model.scale.item() == 5.0 and not model.weight.to_local().is_cuda
        strategy.teardown()


def test_supervised_fine_tuning_gives_the_numbers_of_the_cpu(home, tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"{i}+1?"}, {"role": "assistant", "content": str(i + 1)}]}
            for i in range(16)]  # yapf: disable
    (home / "model" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    configs = [sft.config_of(home / "model", tmp_path / device, max_steps=2) for device in ("cpu", "cuda")]
    sft.run(configs[0])
    with fake_cuda():
        sft.run(configs[1])
    assert_same(*(sft.metrics(tmp_path / device) for device in ("cuda", "cpu")))


# -- when the host waits -----------------------------------------------------------------------------------------------
UPDATE, PASS, STEP, DECODE = ("micro-batch of the update", "micro-batch of a log-prob pass", "optimizer step",
                              "decode step of the `hf` engine")  # yapf: disable
SYNCS = {
    UPDATE: {},
    PASS: {},
    STEP: {"strategy/base.py:StrategyBase._grad_norm": 1, "trainer/optimizer_step.py:OptimizerStep._backward": 1},
    DECODE: {"rollout/hf/continuous_batching.py:Generation._step": 1},
}
KL = {"init_kl_coef": 0.1, "use_kl_loss": True, "kl_estimator": "k3"}
CUTS = {  # one run, a run with more of something, and how many more
    UPDATE: ({"train_batch_size": 8, "micro_train_batch_size": 4}, {"micro_train_batch_size": 2}, 2),
    PASS: ({"recipe": "ppo", "train_batch_size": 8, "micro_train_batch_size": 4, **KL}, {"micro_train_batch_size": 2},
           2),
    STEP: ({"train_batch_size": 4, "micro_train_batch_size": 2}, {"train_batch_size": 2}, 2),
}  # yapf: disable


def syncs_of(home, folder, options):
    with fake_cuda() as ledger:
        runs.run(home, folder, max_steps=1, sync_proof="off", **options).trainer.strategy.teardown()
    return ledger.sites(SYNC)


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@pytest.mark.parametrize("part", CUTS)
def test_the_host_waits_in_the_update_as_often_as_the_docs_say(part, strategy, home, tmp_path):
    """Two runs that differ in nothing but the cut of their batches."""
    less, change, times = CUTS[part]
    few = syncs_of(home, tmp_path / "few", less | {"strategy": strategy})
    many = syncs_of(home, tmp_path / "many", less | change | {"strategy": strategy})
    assert marginal(few, many, times) == SYNCS[part]


def decode(tokens):
    """Syncs and launches by call site of a generation without a stop token."""
    with fake_cuda() as ledger:
        model = tiny.model()
        model.set_attn_implementation("packed")
        engine = HFEngine(model.to("cuda"), eos_token_ids=[], kv_bytes=1 << 20)
        prompts = [Group([5, 6, 7], [1, 2]), Group([8, 9], [3, 4])]
        found = generate(engine, prompts, SamplingParams(max_new_tokens=tokens))
    assert [len(each.token_ids) for part in found for each in part] == [tokens] * 4
    return ledger


def test_the_host_waits_once_per_decode_step():
    few, many = decode(8), decode(16)
    assert marginal(few.sites(SYNC), many.sites(SYNC), 8) == SYNCS[DECODE]
    assert sum(marginal(few.sites(KERNEL), many.sites(KERNEL), 8).values()) == 1, "the copy of what has ended"
    assert many.total(GRAPH) - few.total(GRAPH) == 8


def test_the_docs_list_every_sync():
    rows = []
    for part, sites in SYNCS.items():
        for first, (where, times) in zip([part] + [""] * len(sites), sorted(sites.items()) or [("", 0)]):
            rows.append(f"| {first} | {f'`{where}`' if where else ''} | {times} |".replace("|  |", "| |"))
    page = (Path(__file__).parents[2] / "docs" / "host_syncs.md").read_text(encoding="utf-8")
    table = page.split("<!-- syncs -->")[1].split("<!-- /syncs -->")[0]
    assert table.strip().splitlines()[2:] == rows


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
