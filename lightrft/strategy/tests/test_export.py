"""The writer of HF folders, beside that of torch: why exports are not written by torch's."""
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from lightrft.strategy.export import SafetensorsWriter


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
