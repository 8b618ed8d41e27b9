"""The writer of HF folders, beside that of torch: why exports are not written by torch's."""
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from lightrft.cli import merge_lora
from lightrft.cli.convert import convert
from lightrft.config.rm_schema import RewardModelConfig
from lightrft.config.schema import ModelConfig
from lightrft.models.loader import load_actor, load_reward_model
from lightrft.strategy.export import SafetensorsWriter, write_model
from lightrft.strategy.mtp import dropped_weights, is_mtp
from lightrft.tests.support import tiny
from lightrft.trainer.model_card import _untrained
from lightrft.utils.file_mode import save_tensors


def write_by_torch(folder, state):
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=writer, no_dist=True)


def weights():
    torch.manual_seed(0)
    return {"a.weight": torch.randn(8, 4), "b.weight": torch.randn(3, 5).bfloat16(), "b.bias": torch.randn(3)}


@pytest.mark.parametrize("file_bytes", [1 << 20, 100])
def test_torch_writes_the_same_bits(tmp_path, file_bytes):
    state = weights()
    ours = SafetensorsWriter(tmp_path / "ours", file_bytes)
    ours.folder.mkdir()
    for name, tensor in state.items():
        ours.add(name, tensor)
    ours.close()
    write_by_torch(tmp_path / "torch", state)
    read = {path: {name: tensor for file in sorted((tmp_path / path).glob("*.safetensors"))
                   for name, tensor in load_file(file).items()} for path in ("ours", "torch")}  # yapf: disable
    assert read["ours"].keys() == read["torch"].keys() == state.keys()
    assert all(torch.equal(read[path][name], tensor) and read[path][name].dtype == tensor.dtype
               for path in read for name, tensor in state.items())  # yapf: disable
    if file_bytes == 100:
        index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 1 and index["weight_map"].keys() == state.keys()


def test_torch_refuses_tied_weights_and_keeps_a_second_copy(tmp_path):
    state = weights()
    with pytest.raises(dcp.api.CheckpointException, match="share memory"):
        write_by_torch(tmp_path / "tied", state | {"tied.weight": state["a.weight"]})
    write_by_torch(tmp_path / "plain", state)
    sizes = [sum(path.stat().st_size for path in tmp_path.glob(f"plain/{where}*.safetensors"))
             for where in ("", "sharded/")]  # yapf: disable
    assert min(sizes) > sum(tensor.numel() * tensor.element_size() for tensor in state.values())


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory):
    """A folder with weights that transformers drops on load."""
    folder = tiny.save_model(tmp_path_factory.mktemp("base"), "qwen3_5")
    file = folder / "model.safetensors"
    added = {"mtp.fc.weight": torch.randn(4, 3).bfloat16(), "mtp.layers.0.mlp.up_proj.weight": torch.randn(2, 2)}
    save_tensors(load_file(file) | added | {"model.visual.merger.weight": torch.ones(2)}, file, {"format": "pt"})
    return folder, added


def test_weights_of_multi_token_prediction_survive_an_export(with_mtp, tmp_path):
    """As they were; an export of the export has them too, a reward model has none. The card tells of them."""
    folder, added = with_mtp
    for number, source in enumerate((folder, tmp_path / "0")):
        actor, out = load_actor(ModelConfig(pretrain=str(source))), tmp_path / str(number)
        write_model(actor, actor.export_params(actor.named_parameters()), out, torch.bfloat16)
        written = load_file(out / "model.safetensors")
        assert len(written) == len(load_file(folder / "model.safetensors")) - 1 and not any("visual" in x
                                                                                            for x in written)
        assert all(torch.equal(written[name], tensor.bfloat16()) for name, tensor in added.items())
        row, = _untrained(out)
        assert row[1].startswith("2 tensors, such as `mtp.fc.weight`, copied from the base model")
    scorer = load_reward_model(RewardModelConfig(pretrain=str(folder)))
    assert not [*dropped_weights(scorer.hf_model)] and [*dropped_weights(actor.hf_model)]
    actor.hf_model.config._name_or_path = str(tmp_path / "gone")
    assert not [*dropped_weights(actor.hf_model)]


def test_names_of_multi_token_prediction():
    names = ["mtp.fc.weight", "model.mtp_layers.0.x", "model.layers.61.x", "language_model.model.mtp.0.x"]
    others = ["model.layers.60.x", "model.layers.1.mlp.mtpx.weight", "lm_head.weight"]
    assert [is_mtp(name, 61) for name in names + others] == [True] * 4 + [False] * 3


def test_a_merged_adapter_keeps_them(with_mtp, tmp_path):
    folder, added = with_mtp
    actor = load_actor(ModelConfig(pretrain=str(folder), lora_rank=2, target_modules=["in_proj_qkv", "up_proj"]))
    actor.model.save_pretrained(tmp_path / "adapter")
    merge_lora.main(
        ["--model_path",
         str(folder), "--lora_path",
         str(tmp_path / "adapter"), "--output_path",
         str(tmp_path / "out")])
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], tensor.float()) for name, tensor in added.items())


def test_a_converted_checkpoint_has_them(with_mtp, tmp_path):
    """One that another program wrote of the weights that transformers loads."""
    folder, added = with_mtp
    dcp.save(tiny.model("qwen3_5", seed=1).state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "out", str(folder))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name].float(), tensor.float()) for name, tensor in added.items())
    row, = _untrained(tmp_path / "out")
    assert row[1].startswith("2 tensors, such as `mtp.fc.weight`, copied from the base model")
