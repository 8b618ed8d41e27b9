"""What a plan adds on CUDA beside the tensors of a run, against numbers computed by hand."""
import pytest

from lightrft.config.schema import Config
from lightrft.config.sft_schema import SFTConfig
from lightrft.config.tree import build
from lightrft.models.activations import ModelShape
from lightrft.preflight.cost import GIB, MIB
from lightrft.preflight.hardware import Device
from lightrft.preflight.overhead import graph_bytes, overhead

SHAPE = ModelShape(layers=10, hidden=64, mlp=256, queries=64, keys=32, heads=4, vocabulary=1000)
GPU = Device("cuda:0", 24 * GIB, 24 * GIB)
CONTEXT, COMMUNICATOR = 512 * MIB, 288 * MIB
GRAPHS = 51 * 10 * 0.8 * MIB  # 51 batch sizes up to 512, 10 layers
PROMPTS = 8192 * 4 * (2 * 64 + 3 * 256)  # float32: the stream, its norm, three tensors of the MLP
STEP = 256 * 1000 * 16  # of as many sequences, 16 bytes per logit


def found(world_size=1, tree=Config, device=GPU, shape=SHAPE, **options):
    return {name.removesuffix(", estimated"): values
            for name, values in overhead(build(tree, options), world_size, device, shape).items()}  # yapf: disable


def test_a_cpu_has_none_of_it():
    assert found(8, device=Device("cpu", GIB, GIB), engine_type="vllm") == {}


def test_contexts_and_communicators():
    """SGLang runs in a process of its own; a tensor-parallel engine has two communicators."""
    assert found(tree=SFTConfig) == {"CUDA context": (0, *(CONTEXT, ) * 3, 0)}
    assert found(8, tree=SFTConfig)["NCCL buffers"] == (0, *(COMMUNICATOR, ) * 3, 0)
    for options, contexts, communicators in (({}, 1, 1), ({"fsdp_shard_size": 4}, 1, 2), ({"engine_type":
                                                                                           "vllm"}, 1, 1),
                                             ({"engine_type": "vllm", "engine_tp_size":
                                               2}, 1, 3), ({"engine_type": "sglang", "engine_tp_size": 2}, 2, 3)):
        rows = found(8, **options)
        assert rows["CUDA context"] == (contexts * CONTEXT, ) * 5, options
        assert rows["NCCL buffers"] == (communicators * COMMUNICATOR, ) * 5, options
    assert "NCCL buffers" not in found(1)


@pytest.mark.parametrize(
    "options, graphs, passes",
    [
        ({}, (0, 1, 1, 1, 0), (0, 0)),  # within its share; canaries wake the cache in the weight sync
        ({"sync_proof": "fingerprint"}, (0, 1, 1, 1, 1), (0, 0)),
        ({"engine_sleep": False}, (0, ) * 5, (0, 0)),
        ({"engine_kv_mib": 100}, (1, ) * 5, (1, 1)),
        ({"engine_type": "sglang"}, (1, ) * 5, (1, 1)),
        ({"engine_kv_mib": 100, "engine_args": ["enforce_eager=true"]}, (0, ) * 5, (1, 1)),
    ])
def test_graphs_stay_while_the_engine_sleeps(options, graphs, passes):
    rows = found(**{"engine_type": "vllm"} | options)
    assert rows.get("engine graphs", (0, ) * 5) == tuple(GRAPHS * there for there in graphs)
    first, sync = (there * (PROMPTS + STEP) for there in passes)
    assert rows.get("engine passes", (0, ) * 5) == (first, 0, 0, 0, sync)


def test_a_graph_for_every_batch_size():
    cfg = Config().rollout
    assert graph_bytes(cfg, 7, 1) == (3 + 2) * 0.8 * MIB, "1, 2, 4, 8, and 14 rounded up"
    assert graph_bytes(cfg, 1024, 2) == (3 + 32 + 48) * 2 * 0.8 * MIB


def test_the_hf_engine_runs_as_many_rows_as_its_cache_has_room_for():
    row, longest = "engine passes", 10 * 2 * 32 * 4 * 2048  # bytes of a sequence
    batch = {"rollout_batch_size": 128, "n_samples_per_prompt": 8}
    for options, rows in (({}, 1024 // 2), ({"engine_max_seqs": 9}, 9), ({"engine_kv_mib": 8 * longest // MIB}, 8)):
        assert found(2, **batch, **options)[row] == (PROMPTS + rows * 1000 * 16, 0, 0, 0, 0), options
    assert row not in found(2, shape=None, **batch), "the shape is not known"


@pytest.mark.parametrize("total", [24, 1])
def test_graphs_of_the_hf_engine_stay_with_a_small_cache(total):
    graphs, cache = 48 * 10 * 0.8 * MIB, 9 * (10 * 2 * 32 * 4 * 2048 + 1000 * 16)
    device, stays = Device("cuda:0", total * GIB, total * GIB), total == 24
    rows = found(device=device, engine_max_seqs=9, rollout_batch_size=128)
    assert rows["engine graphs"] == (graphs, *((graphs + cache) * stays, ) * 4)


def test_joined_weights_of_the_hf_engine_have_a_share_of_the_memory():
    plain, merged = (10 * 64 * (64 + 2 * 32 + 2 * 256 + extra) * 4 for extra in (0, 64 + 256))
    row = "joined weights of the engine"
    assert found()[row] == (plain, 0, 0, 0, 0) and found(lora_rank=8)[row] == (merged, 0, 0, 0, 0)
    assert row not in found(device=Device("cuda:0", 8 * plain, 8 * plain))
    assert found(lora_rank=8, device=Device("cuda:0", 8 * merged, 8 * merged))[row][0] == merged
