"""Models whose weights are left in their files: which can be, and that they become the models that are read whole."""
from pathlib import Path

import pytest
import torch
from torch import nn

from lightrft.config.schema import ModelConfig, StrategyConfig
from lightrft.models import loader
from lightrft.models.loader import load_actor, load_critic
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import model_folders, naive_model, tiny, tiny_vision
from lightrft.utils.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("models")
    model_folders.write(home)
    for family in tiny.FAMILIES:
        tiny.save_model(home / family, family)
    return home


def deferred_names(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if param.is_meta}


def assert_same_models(found: nn.Module, expected: nn.Module) -> None:
    """Names, values, ties, buffers, what is trained, and the configs of exports."""
    strategy = get_strategy(StrategyConfig(strategy="single"))
    strategy.setup()
    trained = {name for name, param in found.named_parameters() if param.requires_grad}
    assert trained == {name for name, param in expected.named_parameters() if param.requires_grad}
    found = strategy.prepare(found).model
    for which in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(model, which)(remove_duplicate=False)) for model in (found, expected))
        assert list(ours) == list(theirs)
        for name, tensor in theirs.items():
            assert torch.equal(ours[name], tensor) and ours[name].dtype == tensor.dtype, name
        assert len(set(map(id, ours.values()))) == len(set(map(id, theirs.values()))), "tied otherwise"
    assert found.config.to_dict() == expected.config.to_dict() and found.training == expected.training
    ours, theirs = (model.hf_model.generation_config for model in (found, expected))
    assert (ours and ours.to_dict()) == (theirs and theirs.to_dict())


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_every_family_comes_out_the_same(folder: Path, family: str) -> None:
    for options in ({}, {"lora_rank": 4}, {"freeze_prefix": ["model.embed_tokens"]}):
        cfg = ModelConfig(pretrain=str(folder / family), **options)
        torch.manual_seed(1)
        found = load_actor(cfg, deferred=True)
        assert deferred_names(found) == {name for name, _ in found.named_parameters() if "lora_" not in name}
        after = torch.rand(1)
        torch.manual_seed(1)
        expected = load_actor(cfg)
        assert torch.equal(torch.rand(1), after), "loading draws other random numbers"
        assert_same_models(found, expected)
    exp = naive_model.experience()
    assert torch.equal(found(exp)[0], expected(exp)[0])


@pytest.mark.parametrize("family, slices", [("qwen2_vl", True), ("llava", True), ("smolvlm", True),
                                            ("qwen3_vl_moe", False)])
def test_models_with_towers_come_out_the_same(family: str, slices: bool, tmp_path: Path) -> None:
    """Policies, and critics without a head in the files; names in files are not always those in memory."""
    pytest.importorskip("torchvision")
    cfg = ModelConfig(pretrain=str(tiny_vision.save_model(tmp_path, family, tied=False)))
    for load in (load_actor, load_critic):
        found = load(cfg, deferred=True)
        read = {name for name, _ in found.named_parameters()} - deferred_names(found)
        assert (read <= {"model.score.weight"}) is slices
        assert_same_models(found, load(cfg))


def test_a_critic_keeps_the_head_that_it_was_given(folder: Path) -> None:
    fresh = ModelConfig(pretrain=str(folder / "one_file"))
    saved = ModelConfig(pretrain=str(folder / "critic"), value_head_prefix="head")
    found = load_critic(fresh, deferred=True)
    assert {name for name, _ in found.named_parameters()} - deferred_names(found) == {"model.score.weight"}
    assert_same_models(found, load_critic(fresh))
    found = load_critic(saved, deferred=True)
    assert "model.score.weight" in deferred_names(found)
    assert_same_models(found, load_critic(saved))


@pytest.mark.parametrize("name, slices", [("one_file", True), ("parts_bf16", True), ("experts", False),
                                          ("pickled", False), ("tied_twice", False), ("untied", False)])
def test_what_is_stored_otherwise_is_read_whole(folder: Path, name: str, slices: bool) -> None:
    """Experts that are merged while they are read, pickles, and a head that is tied if its values say so."""
    cfg = ModelConfig(pretrain=str(folder / name))
    torch.manual_seed(1)
    found = load_actor(cfg, deferred=True)
    after = torch.rand(1)
    assert bool(deferred_names(found)) is slices
    torch.manual_seed(1)
    expected = load_actor(cfg)
    assert torch.equal(torch.rand(1), after), "loading draws other random numbers"
    assert_same_models(found, expected)


def test_missing_tensors_are_found_before_any_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "read_config", lambda path, real=loader.read_config: _with_three_layers(real(path)))
    with pytest.raises(UserError, match="lacks 12 tensors of Qwen2ForCausalLM, first 'model.layers.2"):
        load_actor(ModelConfig(pretrain=str(folder / "one_file")), deferred=True)


def _with_three_layers(config):
    config.num_hidden_layers = 3
    config.layer_types = ["full_attention"] * 3
    return config


def test_other_dtypes_are_converted_by_the_copy(folder: Path) -> None:
    cfg = ModelConfig(pretrain=str(folder / "parts_bf16"))
    found = load_actor(cfg, train=False, dtype=torch.float16, deferred=True)
    assert deferred_names(found)
    assert_same_models(found, load_actor(cfg, train=False, dtype=torch.float16))
