"""Arguments that start vLLM, and records on their way between the ranks of an engine; vLLM is not needed."""
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig, Qwen2_5_VLConfig

from lightrft.config.schema import RolloutConfig
from lightrft.models.actor_modality import FAMILIES, MediaModality
from lightrft.rollout.sglang.engine import build_sglang_engine
from lightrft.rollout.tp_group import _decode, _encode
from lightrft.rollout.vllm import launch
from lightrft.rollout.vllm.engine import build_vllm_engine
from lightrft.rollout.vllm.weights import unused_prefixes
from lightrft.rollout.vllm.launch import engine_arguments, process_state_kept, start_engine
from lightrft.rollout.weight_sync.sync import checked
from lightrft.strategy.strategy import SingleProcessStrategy
from lightrft.utils.env import World, total_memory
from lightrft.utils.errors import UserError

LIMIT_S = 77  # of a collective
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def gpu_memory(monkeypatch):
    """Set the memory of a GPU that is not there, in GiB."""

    def of(gib):
        monkeypatch.setattr(launch, "total_memory", lambda device: gib << 30
                            if device == CUDA else total_memory(device))

    of(24)
    return of


def arguments(device=CUDA, bf16=False, world=World(), config=PretrainedConfig(name_or_path="folder"), **rollout):
    return engine_arguments(RolloutConfig(**rollout), config, device, bf16, world, LIMIT_S)


def test_options_reach_vllm():
    plain = arguments()
    assert plain["distributed_timeout_seconds"] == plain["cpu_distributed_timeout_seconds"] == LIMIT_S
    assert plain["model"] == "folder" and plain["max_model_len"] == 2048 and plain["dtype"] == "float32"
    assert plain["kv_cache_memory_bytes"] is None and plain["quantization"] is None and not plain["enforce_eager"]
    changes = [
        ({"engine_tp_size": 2}, "tensor_parallel_size", 2),
        ({"engine_mem_util": 0.8}, "gpu_memory_utilization", 0.8),
        ({"engine_sleep": False}, "enable_sleep_mode", False),
        ({"engine_quantization": "fp8"}, "quantization", "fp8"),
        ({"engine_args": ["max_logprobs=8"]}, "max_logprobs", 8),
        ({"engine_args": ["enforce_eager=true"]}, "enforce_eager", True),
        ({"prompt_max_len": 24}, "max_model_len", 1048),
        ({"engine_args": ["max_num_batched_tokens=9000"]}, "max_num_batched_tokens", 9000),
        ({"bf16": True}, "dtype", "bfloat16"),
        ({"world": World(1, 1, 2, 2)}, "distributed_executor_backend", "external_launcher"),
    ]  # yapf: disable
    for options, name, value in changes:
        changed = arguments(**options)
        assert changed[name] == value != plain.get(name), name
        assert {**plain, name: value} == changed, f"{name} changes other arguments too"
    cached = {"kv_cache_memory_bytes": 3 << 20, "gpu_memory_utilization": 0.01}
    assert arguments(engine_kv_mib=3) == plain | cached, "half of the device need not be free"


@pytest.mark.parametrize(
    "rollout, gib, sequences, graphs",
    [
        ({"rollout_batch_size": 128, "n_samples_per_prompt": 16}, 80, 1024, 1024),  # 2,048 samples wait in part
        ({"rollout_batch_size": 128, "n_samples_per_prompt": 16}, 24, 256, 512),
        ({"rollout_batch_size": 75, "n_samples_per_prompt": 8
          }, 80, 600, 608),  # a multiple of 16: the sizes vLLM captures
        ({"rollout_batch_size": 75, "n_samples_per_prompt": 8, "oversample": 1.5}, 80, 900, 912),
        ({"rollout_batch_size": 4, "n_samples_per_prompt": 8}, 80, 256, 512),  # evaluations may be larger
        ({"engine_max_seqs": 7}, 80, 7, 16),
        ({"engine_max_seqs": 10_000}, 24, 10_000, 10_000),
        ({"engine_args": ["max_num_batched_tokens=100"]}, 80, 100, 208),
    ])
def test_as_many_sequences_run_at_once_as_the_batch_has(gpu_memory, rollout, gib, sequences, graphs):
    gpu_memory(gib)
    found = arguments(**rollout)
    assert (found["max_num_seqs"], found["max_cudagraph_capture_size"]) == (sequences, graphs)
    assert found["max_num_batched_tokens"] >= sequences, "vLLM refuses less"


def test_ranks_share_the_batch_and_those_of_one_engine_do_not(gpu_memory):
    gpu_memory(80)
    batch = {"rollout_batch_size": 128, "n_samples_per_prompt": 16}
    assert arguments(**batch, world=World(0, 0, 4, 4))["max_num_seqs"] == 512
    assert arguments(**batch, engine_tp_size=2, world=World(0, 0, 4, 4))["max_num_seqs"] == 1024
    assert arguments(CPU, **batch)["max_num_seqs"] == 256
    assert arguments(engine_args=["max_cudagraph_capture_size=8"])["max_cudagraph_capture_size"] == 8


def test_what_is_more_than_text_has_a_processor():
    assert arguments()["skip_tokenizer_init"] and not arguments(config=Qwen2_5_VLConfig())["skip_tokenizer_init"]


def test_a_pass_holds_the_longest_sequence():
    assert arguments()["max_num_batched_tokens"] == 8192
    assert arguments(generate_max_len=20_000)["max_num_batched_tokens"] == 21_024


def test_without_cuda_the_cache_is_bounded_and_nothing_sleeps():
    small = 1 << 20
    share = small / total_memory(CPU)
    assert arguments(CPU)["kv_cache_memory_bytes"] <= 4 << 30
    assert abs(arguments(CPU, engine_mem_util=share)["kv_cache_memory_bytes"] - small) <= 1
    two = arguments(CPU, world=World(0, 0, 2, 2), engine_mem_util=share)
    assert abs(two["kv_cache_memory_bytes"] - small // 2) <= 1
    assert arguments(CPU, engine_kv_mib=5)["kv_cache_memory_bytes"] == 5 << 20
    assert not arguments(CPU)["enable_sleep_mode"] and arguments(CPU)["enforce_eager"]


def test_the_state_of_the_process_is_put_back():
    state, set_threads, threads = torch.get_rng_state(), torch.set_num_threads, torch.get_num_threads()
    with pytest.raises(RuntimeError, match="x"), process_state_kept():
        torch.rand(3)
        torch.set_num_threads(threads + 1)
        torch.set_num_threads = None
        torch.set_float32_matmul_precision("high")
        os.environ.update(LOCAL_WORLD_SIZE="7", VLLM_OF_ITS_OWN="1")
        raise RuntimeError("x")
    assert torch.equal(torch.get_rng_state(), state) and torch.set_num_threads is set_threads
    assert torch.get_num_threads() == threads and torch.get_float32_matmul_precision() == "highest"
    assert "LOCAL_WORLD_SIZE" not in os.environ and os.environ.pop("VLLM_OF_ITS_OWN") == "1"


@pytest.mark.parametrize("records", [[], [[[1], [2]]], [[[1, 2, 3], [(1 << 63) - 1, 5]], [[7], []],
                                                        [[8, 9], [1, 2], [], [3, 4]], []]])  # yapf: disable
def test_records_survive_the_way_to_the_other_ranks(records):
    assert _decode(_encode(records).tolist()) == records


def test_a_stream_of_weights_is_complete_and_fits():
    shapes = {"a": torch.Size([2]), "b": torch.Size([3, 4])}
    a, b = ("a", torch.zeros(2)), ("b", torch.zeros(3, 4))
    assert [name for name, _ in checked([b, a], shapes)] == ["b", "a"]
    for stream, message in (([a], "1 weights did not arrive, the first is 'b'"), ([a, a, b], "'a' came twice"),
                            ([a, b, ("c", b[1])], "'c' is not one of the model"), ([
                                ("a", torch.zeros(3)), b
                            ], r"'a' has shape \[3\], the model's has \[2\]")):
        with pytest.raises(ValueError, match=message):
            list(checked(stream, shapes))


def test_a_missing_package_is_reported_in_one_line(monkeypatch):
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"cannot import vllm .* run: pip install -e '.\[vllm\]'"):
        start_engine({}, CPU)


@pytest.mark.parametrize("engine, family, kinds, message", [
    ("sglang", "gemma3", ("image", ), "hides the later tokens"),
    ("sglang", "internvl", ("image", ), "no own code for internvl"),
    ("sglang", "llava", ("image", ), "does not run LLaVA with a tower of type clip_vision_model"),
    ("sglang", "mistral3", ("image", ), "computes silu, and the model's gelu"),
    ("sglang", "qwen2_5_vl", ("image", ), "patches of 1176 numbers of Qwen2.5-VL, and the model has 384"),
    ("sglang", "qwen2_audio", ("audio", ), "the silence after a sound"),
    ("sglang", "qwen3_vl_moe", ("image", ), "to 3 layers of Qwen3-VL with experts, and the model to 1"),
    ("vllm", "glm4v", ("image", "video"), "one video of GLM-4.1V in a prompt, a row has 2"),
    ("vllm", "smolvlm", ("image", "video"), "pictures of SmolVLM alone, and the prompts have media of kind video:"),
    ("vllm", "gemma3", ("image", ), "on a CPU vLLM hides the later tokens"),
    ("vllm", "glm46v", ("image", ), "no own code for GLM-4.6V"),
    ("vllm", "qwen2_audio", ("audio", ), "windows of at most 30 s"),
    ("vllm", "qwen2_5_omni_thinker", ("image", "audio"), "no thinker without its talker"),
    ("vllm", "voxtral", ("audio", ), "with Mistral's own tokenizer"),
])
def test_media_that_an_engine_cannot_take_are_refused_before_it_starts(engine, family, kinds, message):
    config = AutoConfig.for_model(family)
    if family == "qwen2_audio":
        config.audio_config.max_source_positions = 1501
    if engine == "sglang" and family == "qwen2_5_vl":
        config.vision_config.patch_size = 8
    if family == "qwen3_vl_moe":
        config.vision_config.deepstack_visual_indexes = [0]
    modality = MediaModality(FAMILIES[family], config)
    modality.media = SimpleNamespace(kinds=kinds, most=dict.fromkeys(kinds, 2))
    actor = SimpleNamespace(modality=modality, lora_rank=0, hf_model=SimpleNamespace(config=config))
    build = {"vllm": build_vllm_engine, "sglang": build_sglang_engine}[engine]
    with pytest.raises(UserError, match=f"--engine_type {engine}: .*{message}.*--engine_type hf"):
        build(RolloutConfig(engine_type=engine), actor, SingleProcessStrategy(), None, False)


def test_vllm_runs_on_all_ranks_or_none():
    strategy = SimpleNamespace(device=CPU, mesh=SimpleNamespace(group=object(), ranks=[1, 3]))
    with pytest.raises(UserError, match=r"runs on the ranks \[1, 3\] alone; use --engine_type hf or sglang"):
        build_vllm_engine(RolloutConfig(engine_type="vllm"), SimpleNamespace(lora_rank=0), strategy, None, False)


@pytest.mark.parametrize("family", ["gemma3", "llava", "llava_next", "llava_onevision", "mistral3"])
def test_what_vllm_may_leave_out_is_what_nothing_is_computed_with(family, tmp_path):
    pytest.importorskip("torchvision", reason="needs torchvision: make test installs it")
    from lightrft.tests.support import media_rig, tiny_vision
    rig = media_rig.MediaRig(tiny_vision.save_model(tmp_path, family, False),
                             {"image": tiny_vision.FAMILIES[family].placeholders["image"]})
    rig.logprobs(rig.samples()).sum().backward()
    unused = {name for name, parameter in rig.hf.named_parameters() if parameter.grad is None}
    prefixes = unused_prefixes(rig.hf.config)
    assert unused == {name for name, _ in rig.hf.named_parameters() if name.startswith(prefixes)}
    assert bool(unused) == (family != "mistral3")


def test_limits_of_media_reach_vllm():
    seeing = engine_arguments(RolloutConfig(), Qwen2_5_VLConfig(name_or_path="folder"), CPU, False, World(), LIMIT_S,
                              {"image": 3})  # yapf: disable
    assert seeing["limit_mm_per_prompt"] == {"image": 3, "video": 0, "audio": 0}
    assert seeing["mm_processor_cache_gb"] == 1 and "mm_processor_cache_gb" not in arguments()
    assert "limit_mm_per_prompt" not in arguments()
