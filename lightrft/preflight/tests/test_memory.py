"""What lies on a device in each phase of a step, against numbers computed by hand."""
from dataclasses import replace

import pytest

from lightrft.config.rm_schema import RMConfig
from lightrft.config.schema import Config
from lightrft.config.sft_schema import SFTConfig
from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.config.tree import build
from lightrft.models.activations import ModelShape
from lightrft.models.loader import load_actor
from lightrft.preflight.cost import GIB, known_model
from lightrft.preflight.hardware import Device
from lightrft.preflight.memory import memory, memory_lines, peak
from lightrft.strategy.memory import ModelSize, STEP_BYTES
from lightrft.tests.support import tiny

SIZE = ModelSize(total=1000, largest_layer=100, outside=200)
GPU, HOST = Device("cuda:0", 10_000, 10_000), Device("cpu", 10_000, 10_000)
CRITIC = {"advantage_estimator": "gae"}
VLLM = {"engine_type": "vllm", "engine_tp_size": 2}


def held(world_size=2, room=GPU, **values):
    """Bytes in generation, log-probs, backward, optimizer and weight sync, without what counts in MiB."""
    found = memory(build(Config, values), world_size, SIZE, room)
    return {name.partition(",")[0]: bytes for name, bytes in found.items() if "chunk" not in name}


def test_one_process_with_the_hf_engine():
    assert held(1) == {"weights": (4000, ) * 5, "gradients": (0, 0, 4000, 4000, 0),
                       "optimizer state": (8000, ) * 5}  # yapf: disable
    assert held(1, bf16=True)["weights gathered or cast"] == (2000, ) * 5, "one copy, which stays"
    assert "optimizer state" not in held(1, lora_rank=4) and "gradients" not in held(1, lora_rank=4)
    assert held(1, engine_kv_mib=3)["key-value cache"] == (3 << 20, 0, 0, 0, 0)


def test_what_is_not_trained_takes_two_bytes_in_bfloat16():
    """Without a copy beside it; FSDP2 keeps it in float32, and ZeRO-3 the base of adapters."""
    half, zero, copy = {"bf16": True}, {"bf16": True, "strategy": "deepspeed"}, "weights gathered or cast"
    for ranks, options, base, reference, copies in ((1, half, 2000, 2000, False), (2, half, 2000, 2000, True),
                                                    (2, zero, 2000, 2000, False), (2, zero | {"zero_stage": 3}, 2000,
                                                                                   1000, True)):
        found = held(ranks, lora_rank=4, **options)
        assert found["weights"] == (base, ) * 5 and (copy in found) is copies
        assert held(ranks, init_kl_coef=0.1, **options)["reference"] == (reference, ) * 5


def test_what_freeze_prefix_names_has_no_gradient_and_no_adam_state():
    """A run that trains a projector alone fits where the training of all would not."""
    frozen = replace(SIZE, trained=0.25)
    found = memory(build(Config, {"bf16": True}), 1, frozen, GPU)
    assert found["weights"] == (4 * 250 + 2 * 750, ) * 5 and found["weights gathered or cast"] == (2 * 250, ) * 5
    assert found["optimizer state, float32"] == (8 * 250, ) * 5
    assert found["gradients, float32"] == (0, 0, 4 * 250, 4 * 250, 0)
    sharded = memory(build(Config, {"bf16": True}), 2, frozen, GPU)
    assert sharded["weights"] == (2000, ) * 5 and sharded["optimizer state, float32"] == (4 * 250, ) * 5
    assert sharded["gradients not yet sharded"] == (0, 0, 4 * 250, 0, 0), "250 are few enough"


def test_lora_and_freeze_prefix_are_the_policys():
    """The critic beside it is trained as a whole."""
    found = held(1, lora_rank=4, bf16=True, **CRITIC)
    assert found["weights"] == (2000 + 4000, ) * 5 and found["weights gathered or cast"] == (2000, ) * 5
    assert found["optimizer state"] == (8000, ) * 5 and found["gradients"] == (0, 0, 4000, 4000, 0)
    part = memory(build(Config, CRITIC), 1, replace(SIZE, trained=0.25), GPU)
    assert part["optimizer state, float32"] == (8 * 1250, ) * 5 and part["gradients, float32"] == (0, 0, 4000, 4000, 0)


def test_sharded_over_two_ranks():
    found = memory(build(Config, {}), 2, SIZE, GPU)
    assert found["weights"] == (2000, ) * 5
    assert "gradients not yet sharded" not in found, "4000 bytes are more than an eighth"
    assert found["gradients sent to other ranks"] == (0, 0, 2 * 4 * 200, 0, 0)
    assert found["weights gathered or cast"] == (0, 4 * 400, 4 * 400, 0, 0)
    assert found["bucket of full weights"] == (0, 0, 0, 0, 4000)
    small, one = build(Config, {"sync_bucket_mib": 0}), ModelSize(1000, 100, 200, largest=150)
    assert memory(small, 2, one,
                  GPU)["bucket of full weights"] == (0, 0, 0, 0, 600), "a larger tensor is gathered alone"
    assert found["copy in the rollout engine"] == (4000, 0, 0, 0, 4000), "asleep the copy of hf is freed"
    assert held(room=HOST)["copy in the rollout engine"] == (4000, 0, 0, 0, 4000)
    assert held(4, fsdp_shard_size=2)["weights"] == (2000, ) * 5 == held(4, **CRITIC)["weights"]
    assert held(init_kl_coef=0.1)["reference"] == (2000, ) * 5 and "reference" not in held(init_kl_coef=.1, lora_rank=4)
    assert not {"weights", "optimizer state", "reference"} & set(held(fsdp_cpu_offload=True, init_kl_coef=0.1))


def test_full_gradients_wait_for_the_last_micro_batch_where_there_is_room():
    key = "gradients not yet sharded"
    for grad_sync, total, kept in (("auto", 32_000, 4000), ("auto", 31_999, 0), ("last", 10_000, 4000), ("every",
                                                                                                         32_000, 0)):
        config, room = build(Config, {"grad_sync": grad_sync}), Device("cuda:0", total, total)
        found = memory(config, 2, SIZE, room)
        assert found.get(key, (0, 0, 0, 0, 0)) == (0, 0, kept, 0, 0)
        assert found["gradients sent to other ranks"] == (0, 0, 4 * 200 * (1 if kept else 2), 0, 0)
        config.algorithm.advantage_estimator = "gae"
        assert memory(config, 2, SIZE, room).get(key) == found.get(key), "one model steps after the other"


@pytest.mark.parametrize("stage,weights,gradients,moments", [(0, 4000, 4000, 8000), (1, 4000, 4000, 2000),
                                                             (2, 4000, 1000, 2000), (3, 1000, 1000, 2000)])
def test_what_a_stage_of_zero_divides(stage, weights, gradients, moments):
    zero = {"strategy": "deepspeed", "zero_stage": stage, "init_kl_coef": 0.1}
    found = held(4, **zero)
    assert found["weights"] == found["reference"] == (weights, ) * 5 and found["optimizer state"] == (moments, ) * 5
    assert found["gradients"] == (0, 0, gradients, gradients, 0)
    assert found.get("gradients sent to other ranks") == ((0, 0, 4000, 0, 0) if stage else None)
    assert ("copy in the rollout engine" in found) is ("bucket of full weights" in found) is (stage == 3)
    copies = {0: None, 1: None, 2: None, 3: (0, 4 * 1000, 4 * 1000, 0, 0)}
    assert found.get("weights gathered or cast") == copies[stage]
    assert held(4, adam_offload=True, **zero).get("optimizer state") == (None if stage else (0, 0, 0, moments, 0))


def test_zpg_divides_the_weights_once_more_within_its_group():
    zero = {"strategy": "deepspeed", "zero_stage": 3, "init_kl_coef": 0.1}
    once, twice = held(4, **zero), held(4, zpg=2, **zero)
    for key in ("weights", "reference"):
        assert (once[key], twice[key]) == ((1000, ) * 5, (1000 + 4000 / 2, ) * 5), key
    assert held(4, zpg=2, **zero | CRITIC)["weights"] == (2 * 3000, ) * 5
    assert held(4, zpg=2, **zero | {"zero_stage": 2})["weights"] == (4000, ) * 5


def test_zero_gathers_in_float32_and_casts():
    zero = {"strategy": "deepspeed", "zero_stage": 3, "bf16": True, "gradient_checkpointing": True}
    key, large = "weights gathered or cast", ModelSize(10**10, 10**8, 10**9)
    assert held(**zero)[key] == held(**zero | CRITIC)[key] == (0, 6 * 400, 6 * 400, 0, 0), "one model at a time"
    zero["gradient_checkpointing"] = False
    assert memory(build(Config, zero), 2, large, GPU)[key][2] == 4 * 1.2e9 + 2 * 10**10, "autograd keeps what is cast"
    assert memory(build(Config, zero | {"bf16": False}), 2, large, GPU)[key][2] == 4 * 1.2e9


def test_what_is_offloaded_is_back_when_it_is_needed():
    """Moments that rest in host memory are on the device in the optimizer step alone, a part of them at a time."""
    assert held(adam_offload=True)["optimizer state"] == (0, 0, 0, 4000, 0)
    coded = 2 * 500 * (1 + 4 / 256)  # a float32 scale per 256 codes
    assert held(optim="adamw_8bit")["optimizer state"] == (coded, coded, coded, coded + 4000, coded)
    large = ModelSize(10 * STEP_BYTES, STEP_BYTES, STEP_BYTES)
    assert memory(build(Config, {"adam_offload": True}), 1, large, GPU)["optimizer state, float32"][3] == 2 * STEP_BYTES
    away = held(offload_during_rollout=True, init_kl_coef=0.1)
    assert away["weights"] == away["reference"] == (0, *(2000, ) * 4) and away["optimizer state"] == (0, *(4000, ) * 4)
    assert held(offload_during_rollout=True, adam_offload=True)["optimizer state"] == (0, 0, 0, 4000, 0)


def test_fine_tuning_takes_what_the_update_takes():
    """It has no generation, no weight sync, no engine and no reference."""
    same = {"adam_offload": True, "strategy": "deepspeed", "zero_stage": 3, "bf16": True}
    found = memory(build(SFTConfig, same | {"max_len": 3072}), 2, SIZE, GPU)
    lengths = {"prompt_max_len": 2048, "generate_max_len": 1024}
    rows = memory(build(Config, same | lengths), 2, SIZE, GPU)
    for name in ("copy in the rollout engine", "bucket of full weights"):
        rows.pop(name)
    assert found == {name: (0, *values[1:-1], 0) for name, values in rows.items()}
    lines = memory_lines(build(SFTConfig, same), 2, SIZE, GPU)
    assert lines[1].split() == ["log-probs", "backward", "optimizer"] and len(lines[-1].split()) == 4


@pytest.mark.parametrize("room,options,copy,cache", [
    (GPU, {}, (2000, 0, 0, 0, 2000), (3000, 0, 0, 0, 3000)),
    (GPU, {"sync_proof": "fingerprint"}, (2000, 0, 0, 0, 2000), (3000, 0, 0, 0, 0)),
    (GPU, {"overlap_passes": True}, (2000, 2000, 0, 0, 2000), (3000, 3000, 0, 0, 3000)),
    (GPU, {"engine_mem_util": 0.8}, (2000, 0, 0, 0, 2000), (6000, 0, 0, 0, 6000)),
    (GPU, {"engine_sleep": False}, (2000, ) * 5, (3000, ) * 5),
    (GPU, {"engine_kv_mib": 3}, (2000, 0, 0, 0, 2000), (3 << 20, 0, 0, 0, 3 << 20)),
    (GPU, {"bf16": True}, (1000, 0, 0, 0, 1000), (4000, 0, 0, 0, 4000)),
    (GPU, {"bf16": True, "engine_quantization": "fp8"}, (600, 0, 0, 0, 600), (4400, 0, 0, 0, 4400)),
    (GPU, {"engine_tp_size": 1}, (4000, 0, 0, 0, 4000), (1000, 0, 0, 0, 1000)),
    (HOST, {}, (2000, ) * 5, (5000, ) * 5),
    (HOST, {"engine_kv_mib": 3}, (2000, ) * 5, (3 << 20, ) * 5),
    (Device("cpu", 100 * GIB, 100 * GIB), {}, (2000, ) * 5, (4 * GIB, ) * 5),
])
def test_vllm(room, options, copy, cache):
    """Its share of a GPU holds weights and cache, that of a host the cache; asleep it holds nothing, on a CPU never."""
    found = held(2, room, **VLLM | options)
    assert (found["copy in the rollout engine"], found["key-value cache"]) == (copy, cache)


def test_the_phase_that_takes_most():
    """Backward: 2000 weights, 4000 Adam, 2000 gradients, 1600 on their way, 1600 gathered, 1 MiB of logits; generation:
    the engine."""
    config = build(Config, VLLM | {"logprob_chunk_mib": 1})
    assert peak(memory(config, 2, SIZE, GPU)) == ("backward", 2000 + 4000 + 2000 + 1600 + 1600 + 2**20,
                                                  "logits of one chunk")  # yapf: disable
    config = build(Config, VLLM | {"logprob_chunk_mib": 1, "engine_mem_util": 0.9, "sync_bucket_mib": 0})
    room = Device("cuda:0", 10 << 20, 10 << 20)
    assert peak(memory(config, 2, SIZE, room))[:2] == ("generation", 2000 + 4000 + 0.9 * (10 << 20))


def test_chunks_of_logits_fill_the_device():
    for room, mib in ((HOST, 256), (Device("cuda:0", 80 * GIB, 80 * GIB), 1280)):
        assert memory(build(Config, {}), 1, SIZE, room)["logits of one chunk"] == (0, mib << 20, mib << 20, 0, 0)


@pytest.mark.parametrize("tree, options, expected", [
    (Config, {}, 6 << 24), (Config, {"bf16": False}, 4 << 24), (Config, {"lora_rank": 4}, None), (RMConfig, {}, None),
    (Config, {"strategy": "fsdp"}, (6 << 24) - 2 * 4 * 200),  # layers are reduced later, when it is complete
])  # yapf: disable
def test_a_trained_head_has_a_gradient_beside_its_logits(tree, options, expected):
    """While all activations are still there. The largest temporary of a layer comes later: 4 MiB of it here."""
    shape = ModelShape(layers=1, hidden=64, mlp=1 << 11, queries=64, keys=64, heads=1, vocabulary=1 << 18)
    config = build(tree, {"bf16": True, "max_tokens_per_micro_batch": 1 << 10, "logprob_chunk_mib": 9} | options)
    found = memory(config, 2 if "strategy" in options else 1, SIZE, GPU, shape)
    assert found.get("gradient of the head on its way") == (expected and (0, 0, expected, 0, 0))


def test_a_reward_model_has_no_logits(tmp_path):
    path = str(tiny.save_model(tmp_path, "llama"))
    assert "logits of one chunk" not in memory(build(RMConfig, {}), 1, SIZE, GPU)
    (whole, _), (without, shape) = known_model(path), known_model(path, head=False)
    assert whole.total - without.total == shape.vocabulary * shape.hidden == without.outside - shape.hidden


@pytest.mark.parametrize("tied, words, head", [(False, ["lm_head"], False), (False, ["embed_tokens"], True),
                                               (True, ["embed_tokens"], False), (True, ["model.layers"], True)])
def test_the_share_that_freeze_prefix_leaves_is_what_is_trained(tied, words, head, tmp_path):
    path = str(tiny.save_model(tmp_path, tie_word_embeddings=tied))
    weights = list(load_actor(PolicyModelConfig(pretrain=path, freeze_prefix=words)).parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    size = known_model(path, frozen=words)[0]
    assert (size.trained * size.total, size.trains_head) == (pytest.approx(trained), head) and trained < size.total
    options = {"generate_max_len": 1024, "prompt_max_len": 1024, "micro_train_batch_size": 1}
    shape = ModelShape(layers=1, hidden=64, mlp=1 << 11, queries=64, keys=64, heads=1, vocabulary=1 << 18)
    rows = memory(build(Config, options), 1, size, GPU, shape)
    assert ("gradient of the head on its way" in rows) is head
    assert known_model(path, frozen=["nothing"]) == (None, None), "the run refuses the word"


def test_a_layer_whose_temporary_is_larger_than_the_head_counts_alone():
    shape = ModelShape(layers=1, hidden=64, mlp=1 << 20, queries=64, keys=64, heads=1, vocabulary=1 << 10)
    config = build(Config, {"bf16": True, "max_tokens_per_micro_batch": 1 << 10, "logprob_chunk_mib": 1})
    assert "gradient of the head on its way" not in memory(config, 1, SIZE, GPU, shape)


def test_the_table():
    size = ModelSize(GIB, GIB // 10, GIB // 5)
    lines = memory_lines(build(Config, VLLM), 2, size, Device("cuda:0", 20 * GIB, 20 * GIB))
    rows = {line[:-48].strip(): line[-48:].split() for line in lines[2:]}
    assert lines[1].split() == ["generation", "log-probs", "backward", "optimizer", "sync"]
    assert max(map(len, lines)) <= 80, "a terminal breaks the lines"
    assert rows["key-value cache"] == ["8.00", "0.00", "0.00", "0.00", "8.00"]
    assert rows["together"] == ["17.34", "10.53", "14.13", "10.62", "17.84"], "1.34 and, while it sleeps, graphs"
    assert memory_lines(build(Config, {}), 2, size, GPU)[-1].endswith("(--engine_kv_mib 0)")
    lines = memory_lines(build(Config, VLLM | {"offload_during_rollout": True}), 2, size, GPU)
    assert lines[-1].endswith("--sync_proof fingerprint avoids this")
    assert "unknown" in memory_lines(build(Config, {}), 2, None, GPU)[0]
