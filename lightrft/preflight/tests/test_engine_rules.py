"""The rules of the engines' options; vLLM itself is not needed."""
from contextlib import nullcontext

import pytest

from lightrft.config.cli import parse_config
from lightrft.config.engines import EngineCaps, ENGINES
from lightrft.config.options import ConfigError
from lightrft.config.schema import Config
from lightrft.config.tree import options
from lightrft.preflight import engine_rules
from lightrft.preflight.engine_rules import engine_problems, missing_engine, native_arguments
from lightrft.preflight.validate import validate
from lightrft.trainer.session import settled

BASE = {"pretrain": "org/model", "prompt_data": ["org/data"]}
NATIVE = {"engine_tp_size": 2, "engine_count": 2, "engine_mem_util": 0.8, "engine_sleep": False,
          "engine_quantization": "fp8", "engine_args": ["max_logprobs=8"]}  # yapf: disable


def problems(monkeypatch, installed=True, cuda=True, engine="vllm", **values):
    monkeypatch.setattr(engine_rules, "find_spec", lambda name: installed or None)
    config = parse_config([], defaults=BASE | {"engine_type": engine} | values).config
    return [*engine_problems(config, 1, cuda), *missing_engine(config)]


def test_every_option_of_an_engine_is_known_to_the_rules(monkeypatch):
    read = {name for name, option in options(Config).items() if option.read_by == ("vllm", "sglang")}
    assert set(NATIVE) == read == {name for name in options(Config) if name.startswith("engine_")} - {
        "engine_type", "engine_kv_mib", "engine_max_seqs"}  # yapf: disable
    assert problems(monkeypatch, **NATIVE) == problems(monkeypatch, engine="sglang", **NATIVE) == []


@pytest.mark.parametrize("name", NATIVE)
def test_the_hf_engine_does_not_read_it(name, monkeypatch):
    found, = problems(monkeypatch, engine="hf", **{name: NATIVE[name]})
    assert f"--{name} " in found and "no effect with --engine_type hf" in found and "--engine_type vllm" in found


@pytest.mark.parametrize("values, words", [
    ({"installed": False}, ["not installed", "pip install -e '.[vllm]'", "requirements-vllm.txt"]),
    ({"engine_kv_mib": 64, "engine_mem_util": 0.8}, ["--engine_mem_util 0.8", "--engine_kv_mib 64"]),
    ({"temperature": 0.001}, ["--temperature 0.001", "nearest valid value: 0.01"]),
    ({"eval_temperature": 0.001, "eval_data": ["org/data"]}, ["--eval_temperature 0.001"]),
    ({"engine_args": ["seed"]}, ["--engine_args seed", "name=value"]),
    ({"engine_args": ["dtype=half"]}, ["--engine_args dtype=half", "set --bf16"]),
    ({"engine_args": ["load_format=auto"]}, ["--engine_args load_format=auto", "drop it"]),
    ({"engine_args": ["max_logprobs= "]}, ["--engine_args max_logprobs= ", "name=value"]),
    ({"engine_args": ["max_logprobs=["]}, ["--engine_args max_logprobs=[:", "not YAML", "comma"]),
    ({"engine_args": ["max_logprobs=2024-99-99"]}, ["--engine_args max_logprobs=2024-99-99:", "month must be"]),
    ({"engine_args": ["max_logprobs=4", "block_size=16", "max_logprobs=8"]}, ["max_logprobs: is given 2 times"]),
    *[({"engine_args": [f"{name}=2"]}, [f"--engine_args {name}=2", "drop it"]) for name in (
        "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size", "max_lora_rank",
        "speculative_config", "spec_tokens", "logits_processors", "hf_overrides")],
    ({"engine_args": ["enable_lora=true"]}, ["--engine_args enable_lora=true", "set --lora_sync"]),
    ({"top_p": 0.9, "min_p": 0.05}, ["--min_p 0.05: vLLM applies it before --top_p 0.9", "drop one"]),
    ({"engine_quantization": "fp8", "cuda": False}, ["--engine_quantization fp8", "CUDA"]),
    ({"engine_sleep": False, "cuda": False}, ["--no_engine_sleep", "CUDA"]),
    ({"engine": "hf", "lora_rank": 2, "lora_sync": "adapter"}, ["--lora_sync adapter", "hf takes only merged weights"]),
    ({"lora_rank": 2, "lora_sync": "adapter", "engine_quantization": "fp8"}, ["--lora_sync adapter", "drop one"]),
    ({"engine": "sglang", "installed": False}, ["not installed", "pip install -e '.[sglang]'"]),
    ({"engine": "sglang", "temperature": 1e-7}, ["SGLang does not sample", "nearest valid value: 1e-06"]),
    ({"engine": "sglang", "engine_args": ["tp_size=2"]}, ["--engine_args tp_size=2", "set --engine_tp_size"]),
    ({"engine": "sglang", "engine_args": ["max_running_requests=2"]}, ["max_running_requests=2", "--engine_max_seqs"]),
    ({"engine_args": ["max_num_seqs=2"]}, ["--engine_args max_num_seqs=2", "set --engine_max_seqs"]),
    *[({"engine": "sglang", "engine_args": [f"{name}=2"]}, [f"--engine_args {name}=2", "drop it"]) for name in (
        "dp_size", "pp_size", "attn_cp_size", "moe_dp_size", "enable_lora", "lora_paths", "speculative_algorithm",
        "speculative_num_steps")],
    *[({"engine": engine, "sync_bucket_mib": 64}, [f"--sync_bucket_mib 64: has no effect with --engine_type {engine}",
                                                   "add --strategy fsdp"]) for engine in ("hf", "vllm")],
    ({"engine": "sglang", "engine_quantization": "fp8", "cuda": False}, ["SGLang has its kernels for CUDA"]),
])  # yapf: disable
def test_one_problem_each(values, words, monkeypatch):
    found, = problems(monkeypatch, **values)
    assert all(word in found for word in words), found


@pytest.mark.parametrize("values", [
    {"engine_args": ["max_logprobs=4", "enforce_eager=true", "compilation_config={\"level\": 0}", "seed='1'"]},
    {"top_p": 0.9}, {"min_p": 0.05}, {"engine": "hf", "top_p": 0.9, "min_p": 0.05},
    {"engine": "sglang", "top_p": 0.9, "min_p": 0.05}, {"engine": "sglang", "sync_bucket_mib": 64},
    {"engine": "hf", "strategy": "fsdp", "sync_bucket_mib": 64}, {"strategy": "fsdp", "sync_bucket_mib": 64},
])  # yapf: disable
def test_no_problem(values, monkeypatch):
    assert problems(monkeypatch, **values) == []


def test_a_value_with_commas_comes_through_as_the_remedy_says():
    entries = parse_config(["--engine_args", "a=[1\\, 2],b={x: 1}"], defaults=BASE).config.rollout.engine_args
    assert native_arguments(entries) == {"a": [1, 2], "b": {"x": 1}}


@pytest.mark.parametrize("values, words", [
    ({"cuda": False}, "without CUDA"),
    ({"engine": "hf"}, "the trainer's own weights"),
    ({"engine": "hf", "strategy": "fsdp", "fsdp_cpu_offload": True}, "drop one"),
])  # yapf: disable
def test_what_cannot_leave_the_device(values, words, monkeypatch):
    found, = problems(monkeypatch, offload_during_rollout=True, **values)
    assert found.startswith("--offload_during_rollout true: ") and words in found


@pytest.mark.parametrize("values", [{}, {"engine": "hf", "strategy": "fsdp"}])
def test_what_can_leave_the_device(values, monkeypatch):
    assert problems(monkeypatch, offload_during_rollout=True, **values) == []


def test_groups_of_ranks_are_of_one_size():
    with pytest.raises(ConfigError, match="--engine_tp_size 2: must divide the 3 ranks; nearest valid value: 1 or 3"):
        validate(parse_config([], defaults=BASE | {"engine_type": "vllm", "engine_tp_size": 2}).config, 3)


def test_an_engine_does_not_reach_over_two_machines():
    config = parse_config([], defaults=BASE | {"engine_type": "vllm", "engine_tp_size": 4}).config
    with pytest.raises(
            ConfigError, match="--engine_tp_size 4: .* be on one machine, and each machine has 2 of the run; "
            "nearest valid value: 2, or another --nproc-per-node"):
        validate(config, 8, planned=True, local_ranks=2)
    assert not list(engine_rules.shared_engine(config.rollout, 8, 4))
    assert not list(engine_rules.shared_engine(config.rollout, 8, 8))


@pytest.mark.parametrize("count, tp, ranks, said", [
    (4, 2, 8, None), (2, 2, 8, None), (1, 1, 1, None),
    (5, 2, 8, "--engine_count 5: 5 engines of --engine_tp_size 2 need 10 ranks, and the run has 8; start more "
     "(torchrun --nproc-per-node), or nearest valid value: 4"),
])  # yapf: disable
def test_a_run_has_as_many_engines_as_it_was_written_for(count, tp, ranks, said):
    words = f"--vllm_num_engines {count} --vllm_tensor_parallel_size {tp}"
    engine = parse_config(words.split(), defaults=BASE).config.rollout
    assert list(engine_rules.shared_engine(engine, ranks, ranks)) == ([said] if said else [])


@pytest.mark.parametrize("gpus, refused", [("2x2xH100", True), ("4xH100", False), (None, True)])
def test_plans_and_runs_know_the_ranks_of_a_machine(gpus, refused, monkeypatch):
    """Of a plan by ``--plan_gpus``, of a run by torchrun."""
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for name, value in torchrun.items() if gpus is None else ():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(engine_rules, "find_spec", lambda name: name)
    options = ["--engine_type", "vllm", "--engine_tp_size", "4", *(["--dry_run", "--plan_gpus", gpus] if gpus else [])]
    parsed = parse_config(options, defaults=BASE)
    with pytest.raises(ConfigError, match="each machine has 2 of the run") if refused else nullcontext():
        settled(parsed)


def test_the_flags_of_the_original_for_sleep():
    for word, expected in (("--enable_engine_sleep", True), ("--disable_engine_sleep", False)):
        assert parse_config([word], defaults=BASE).config.rollout.engine_sleep is expected


def test_an_engine_of_another_package_needs_its_line_of_facts_alone(monkeypatch):
    monkeypatch.setitem(ENGINES, "other", EngineCaps("Other", "pip install other"))
    config = parse_config([], defaults=BASE | {"engine_args": ["eager"]}).config
    config.rollout.engine_type = "other"
    assert "--engine_args eager: expected name=value, e.g. name=value" in list(engine_problems(config, 1, True))
    missing = ("--engine_type other: the package other is not installed; run: pip install other or use the built-in "
               "engine: --engine_type hf")
    assert list(missing_engine(config)) == [missing]


def test_fire_needs_an_engine_that_heats_the_first_token(monkeypatch):
    config = parse_config(["--use_fire", "true"], defaults=BASE).config
    assert not list(engine_problems(config, 1, False))
    monkeypatch.setitem(ENGINES, "hf", EngineCaps("Other"))
    assert list(engine_problems(config, 1, False)) == [
        "--use_fire: --engine_type hf draws the first token at the temperature of the others; drop it or use "
        "--engine_type hf"]  # yapf: disable
