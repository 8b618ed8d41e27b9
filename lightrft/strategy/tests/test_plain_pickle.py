"""Nothing of a checkpoint runs, wherever a pickle is in it; honest ones load."""
import datetime
import pickle
from collections import OrderedDict
from decimal import Decimal
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightrft.cli.convert import convert
from lightrft.config.schema import StrategyConfig
from lightrft.strategy.checkpoint import CheckpointManager, read_global
from lightrft.strategy.checkpoint_folders import complete
from lightrft.strategy.foreign_checkpoints import open_checkpoint
from lightrft.strategy.plain_pickle import load_plain, load_state, loads_are_plain, PlainUnpickler
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support.packages import needs_deepspeed
from lightrft.tests.support.payload import Payload
from lightrft.utils.errors import UserError

TENSORS = {"a.weight": torch.arange(4.0), "b.weight": torch.ones(2, 2, dtype=torch.bfloat16)}


class Loss:
    """An object that another program keeps beside its tensors."""

    def __init__(self, scale):
        self.scale, self.parts = scale, [self]


@pytest.fixture(name="ran")
def fixture_ran(tmp_path):
    """The file that a payload would write; it does not exist after the test."""
    yield tmp_path / "ran"
    assert not (tmp_path / "ran").exists()


def test_the_payload_runs_where_nobody_is_careful(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("protocol", [2, 4])
def test_tensors_are_read_beside_objects_that_are_not(tmp_path, ran, protocol):
    """Classes, functions, sets and lists of them: nothing is imported, nothing is called."""
    beside = {
        "scaler": Loss(2), "bad": Payload(ran), "list": [Payload(ran)],
        Payload(ran): OrderedDict(a=1), "set": {1}
    }
    torch.save({"module": TENSORS, "args": beside, "shape": torch.Size([2])}, tmp_path / "f.pt",
               pickle_protocol=protocol)
    found = load_plain(tmp_path / "f.pt")
    assert found["module"].keys() == TENSORS.keys() and found["shape"] == torch.Size([2])
    assert all(found["module"][name].equal(value) for name, value in TENSORS.items())
    with loads_are_plain():
        assert torch.load(tmp_path / "f.pt", weights_only=False)["module"]["a.weight"].equal(TENSORS["a.weight"])
    assert torch.load is not load_plain


def test_functions_by_dotted_names_are_not_found(ran):
    for data in (b"cposix\nsystem\n(S'touch %s'\ntR." % str(ran).encode(),
                 b"\x80\x04\x8c\x05torch\x8c\x0chub.os.mkdir\x93\x8c\x04%s\x85R." % str(ran).encode()[-4:],
                 b"cbuiltins\neval\n(S'open(\"%s\", \"w\")'\ntR." % str(ran).encode()):
        PlainUnpickler(BytesIO(data)).load()


def test_a_program_is_no_checkpoint(tmp_path):
    torch.jit.script(torch.nn.Linear(1, 1)).save(tmp_path / "f.pt")
    with pytest.raises(UserError, match="a program of TorchScript"):
        load_plain(tmp_path / "f.pt")


def test_the_state_of_a_run_may_hold_values_of_rows(tmp_path, ran):
    row = {"when": datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC), "price": Decimal("1.5"), "id": np.int64(3),
           "names": np.array(["a", None], dtype=object), "vector": np.ones(3, dtype=np.float32)}  # yapf: disable
    torch.save({"open": [row], "step": 3}, tmp_path / "f.pt")
    found = load_state(tmp_path / "f.pt")["open"][0]
    assert all(np.array_equal(found[name], value) for name, value in row.items())
    torch.save({"open": [Payload(ran)]}, tmp_path / "f.pt")
    with pytest.raises(UserError, match="f.pt holds .* beside tensors and plain values, and is not read"):
        load_state(tmp_path / "f.pt")


def poisoned(folder: Path, ran: Path, name: str) -> None:
    """Replace a file of a checkpoint by a payload, and complete the checkpoint again, as its author could."""
    if name.endswith(".pt"):
        torch.save({"options": Payload(ran)}, folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps(Payload(ran)))
    (folder / "COMPLETE.json").unlink()
    complete(folder.rename(folder.with_name("copy")), folder, {"step": 1, "world_size": 1, "metrics": {}})


@pytest.mark.parametrize("name", ["global.pt", "rank_00000.pt", "tensors/.metadata"])
def test_no_file_of_a_checkpoint_of_ours_runs(name, tmp_path, ran):
    """Neither when a run resumes from it, nor in export and convert."""
    strategy = get_strategy(StrategyConfig(strategy="single"))
    actor = strategy.prepare(lambda: torch.nn.Linear(2, 2))
    manager = CheckpointManager(strategy, tmp_path / "checkpoints", asynchronous=False)
    manager.save(1, {"actor": actor}, {"step": 1}, {"rng": torch.get_rng_state()}, {})
    path = manager.latest()
    assert manager.load(path, {"actor": actor})[0] == {"step": 1}
    poisoned(path, ran, name)
    with pytest.raises(UserError):
        manager.load(manager.latest(), {"actor": actor})
    if name == "global.pt":
        with pytest.raises(UserError):
            convert(tmp_path / "checkpoints", tmp_path / "out")
        with pytest.raises(UserError):
            read_global(path)


def test_no_file_of_another_program_runs(tmp_path, ran):
    """A DCP folder, and the states of DeepSpeed's models."""
    dcp.save(TENSORS, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert open_checkpoint(tmp_path / "dcp").read(["a.weight"])["a.weight"].equal(TENSORS["a.weight"])
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Payload(ran)))
    with pytest.raises(UserError, match="dcp/.metadata holds no metadata"):
        open_checkpoint(tmp_path / "dcp")
    states = tmp_path / "ds" / "step" / "mp_rank_00_model_states.pt"
    states.parent.mkdir(parents=True)
    torch.save({"module": TENSORS | {"bad": Payload(ran)}, "args": Payload(ran)}, states)
    assert open_checkpoint(states.parent).names == [*TENSORS]


@needs_deepspeed
def test_no_state_of_an_optimizer_of_deepspeed_runs(tmp_path, ran):
    torch.save({"module": TENSORS}, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": Payload(ran)}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(UserError, match="cannot be read"):
        open_checkpoint(tmp_path)


def test_tensors_of_a_dcp_folder_cannot_turn_into_pickles(tmp_path, ran):
    """Its metadata could say that a tensor is an object, which torch would unpickle."""
    dcp.save({"a": Payload(ran), "b": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    opened = open_checkpoint(tmp_path)
    assert opened.names == ["b"] and opened.read(["b"])["b"].equal(torch.ones(2))
