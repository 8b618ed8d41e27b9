"""Choice of the strategy, its group and mesh, what is decayed, wrapped and exported."""
import os
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForMultimodalLM, Qwen2ForCausalLM

from lightrft.config.schema import StrategyConfig
from lightrft import strategy as package
from lightrft.strategy import strategy
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.deepspeed.deepspeed_strategy import DeepspeedStrategy
from lightrft.strategy.distributed import join, leave, local_world_size, transformer_blocks
from lightrft.strategy.export import SafetensorsWriter
from lightrft.strategy.fsdp import FSDPV2Strategy
from lightrft.strategy.mesh import Axes, Mesh
from lightrft.strategy.optimizer import LocalOptimizer, OptimSpec
from lightrft.strategy.strategy import FakeStrategy, get_strategy
from lightrft.tests.support.packages import needs_deepspeed
from lightrft.tests.support.tiny_lm import SPEC, TinyLM
from lightrft.utils.launcher import share_cores


@pytest.mark.parametrize("name, world_size, expected",
                         [("auto", None, FakeStrategy), ("auto", "1", FakeStrategy), ("auto", "2", FSDPV2Strategy),
                          ("fsdp", None, FSDPV2Strategy), ("single", None, FakeStrategy),
                          pytest.param("deepspeed", "2", DeepspeedStrategy, marks=needs_deepspeed)])
def test_choice(name, world_size, expected, monkeypatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    strategy = get_strategy(StrategyConfig(strategy=name), bf16=True)
    assert type(strategy) is expected and strategy.bf16


def test_public_names() -> None:
    homes = {
        "get_strategy": get_strategy, "StrategyBase": StrategyBase, "StrategyConfig": StrategyConfig, "FakeStrategy":
        FakeStrategy, "FSDPV2Strategy": FSDPV2Strategy, "DeepspeedStrategy": DeepspeedStrategy
    }
    assert {name: getattr(package, name) for name in homes} == homes and set(homes) < set(package.__all__)
    missing = "MegatronStrategy"
    assert not hasattr(package, missing)


def test_choice_errors(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="single with 4 ranks.*use --strategy fsdp"):
        get_strategy(StrategyConfig(strategy="single"))
    with pytest.raises(ValueError, match="unknown strategy 'zero'"):
        get_strategy(StrategyConfig(strategy="zero"))
    with pytest.raises(ValueError, match="lacks RANK.*torchrun"):
        get_strategy(StrategyConfig(strategy="fsdp")).setup()


def test_deepspeed_must_be_there(monkeypatch) -> None:
    monkeypatch.setattr(strategy, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"deepspeed is not installed; run: pip install -e '\.\[deepspeed\]'"):
        get_strategy(StrategyConfig(strategy="deepspeed"))


def test_shard_size_must_divide() -> None:
    with pytest.raises(ValueError, match="shard size 3 does not divide the 8 ranks; the nearest that does is 2"):
        Mesh(range(8), 0).dense(3)
    with pytest.raises(ValueError, match="sp [*] tp = 6 does not divide the 8 ranks; the nearest that does is 4"):
        Mesh(range(8), 0, axes=Axes(sp=2, tp=3))
    with pytest.raises(ValueError, match="ep = 0 does not divide the 8 ranks; the nearest that does is 1"):
        Mesh(range(8), 0, axes=Axes(ep=0))
    with pytest.raises(ValueError, match="ep = 8 does not divide the 4 ranks of one copy; .* is 4"):
        Mesh(range(8), 0, axes=Axes(ep=8)).experts(4)


def test_mesh_shapes() -> None:
    """Eight ranks on a fake group: neighbours share one copy."""
    code = ("import torch.distributed as d; from torch.testing._internal.distributed.fake_pg import FakeStore\n"
            "d.init_process_group('fake', store=FakeStore(), rank=5, world_size=8)\n"
            "from lightrft.strategy.mesh import Mesh\n"
            "m = Mesh(range(8), 5).dense(4); assert m.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]], m\n"
            "assert m.mesh_dim_names == ('replicate', 'shard')\n"
            "assert Mesh(range(8), 5).dense().mesh.tolist() == list(range(8))\n"
            "from lightrft.strategy.mesh import Axes\n"
            "m = Mesh(range(8), 5, axes=Axes(sp=2, ep=4)); d, e = m.dense(2), m.experts(2)\n"
            "assert (m.data.index, m.data.size, m.data.replica, m.first_of(5)) == (2, 4, 1, 4), m.data\n"
            "assert (m.engines.index, m.engines.size) == (5, 8), m.engines\n"
            "assert d.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], d\n"
            "assert d.mesh_dim_names == ('replicate', 'shard', 'sp')\n"
            "assert e.mesh.tolist() == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]], e\n"
            "assert e.mesh_dim_names == ('replicate', 'efsdp', 'ep')\n"
            "assert Mesh(range(8), 5).experts().mesh_dim_names == ('efsdp', )\n")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_groups_that_libraries_make_have_the_limit_of_the_run(monkeypatch) -> None:
    """torch's own, 30 minutes and 10 with NCCL, would end the wait of a rank for another's long generation."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(dist.distributed_c10d, name, timedelta(minutes=10))
    assert join(7210)
    try:
        made = dist.new_group(backend="gloo")._get_backend(torch.device("cpu")).options._timeout
        assert made == dist.distributed_c10d._get_default_timeout("nccl") == timedelta(seconds=7210)
    finally:
        leave()


def test_threads_share_the_cores(monkeypatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 * (os.cpu_count() or 1)))
    try:
        for ours, expected in (("3", 2), (None, 1)):  # set: left alone; not set: at least one
            monkeypatch.setenv("OMP_NUM_THREADS", "3") if ours else monkeypatch.delenv("OMP_NUM_THREADS")
            torch.set_num_threads(2)
            share_cores(local_world_size(), dict(os.environ))
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_init_context_is_float32_on_cpu_and_restores() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with FakeStrategy(StrategyConfig()).init_model_context(meta_init=True):  # as LightRFT's scripts call it
            assert torch.empty(1).dtype == torch.float32 and torch.empty(1).device.type == "cpu"
        assert torch.empty(1).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_is_decayed() -> None:
    model = TinyLM()
    model.model.model.embed_tokens.weight.requires_grad_(False)
    optimizer = LocalOptimizer(model.named_parameters(), SPEC)
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim == 2 for p in decayed["params"]) and all(p.ndim == 1 for p in others["params"])
    assert "model.model.embed_tokens.weight" not in optimizer.owners and len(optimizer.owners) == 25
    with pytest.raises(ValueError, match="no trainable parameter"):
        LocalOptimizer(TinyLM().requires_grad_(False).named_parameters(), OptimSpec(1e-3))


@pytest.mark.parametrize("family, blocks", [
    ("qwen2_5_omni_thinker", {"Qwen2_5OmniAudioEncoderLayer": 32, "Qwen2_5OmniVisionBlock": 32,
                              "Qwen2_5OmniDecoderLayer": 28}),
    ("smolvlm", {"SmolVLMEncoderLayer": 12, "LlamaDecoderLayer": 32}),
    ("mistral3", {"PixtralAttentionLayer": 24, "MistralDecoderLayer": 40}),
])  # yapf: disable
def test_blocks_of_towers_and_decoders(family: str, blocks: dict[str, int]) -> None:
    """Hugging Face names whole towers of the first one, and of the second one the attention alone."""
    config = AutoConfig.for_model(family, pad_token_id=0)
    with torch.device("meta"):
        found = transformer_blocks(AutoModelForMultimodalLM.from_config(config))
    assert Counter(type(block).__name__ for block in found) == blocks
    assert transformer_blocks(torch.nn.Linear(2, 2)) == []


def test_safetensors_in_several_files(tmp_path: Path) -> None:
    model = TinyLM().model
    for file_bytes, count in ((20_000, None), (1 << 30, 1)):
        writer = SafetensorsWriter(tmp_path, file_bytes)
        for name, tensor in model.named_parameters():
            writer.add(name, tensor.detach())
        writer.close()
        files = sorted(tmp_path.glob("*.safetensors"))
        assert len(files) == count if count else len(files) > 3
        assert (tmp_path / "model.safetensors.index.json").exists() is (count is None)
        assert sum(len(safe_open(file, "pt").keys()) for file in files) == 26
        model.config.save_pretrained(tmp_path)
        loaded = Qwen2ForCausalLM.from_pretrained(tmp_path)
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters()))
    assert not list(tmp_path.glob("*.tmp"))


def test_export_needs_an_hf_model(tmp_path: Path) -> None:
    strategy = FakeStrategy(StrategyConfig())
    with pytest.raises(ValueError, match="Linear wraps no Hugging Face model"):
        strategy.save_model(strategy.prepare(torch.nn.Linear(2, 2)), tmp_path)
