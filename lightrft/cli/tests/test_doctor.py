"""The doctor on this machine, and on models that do not fit."""
import json
import os
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch.distributed import distributed_c10d, TCPStore

from lightrft.cli.doctor import PROG, local_ranks, main, plan
from lightrft.models.activations import ModelShape
from lightrft.models.config_json import parameter_shapes
from lightrft.preflight.checks import Finding, examine, worst
from lightrft.preflight.checks.machine import check_groups, check_save_path, check_shm
from lightrft.preflight.checks.run_plan import check_disk, check_memory, memory_verdict, run_bytes
from lightrft.preflight.cost import GIB, count_parameters, model_size
from lightrft.preflight.hardware import Device
from lightrft.preflight.memory import memory
from lightrft.preflight.overhead import COMMUNICATOR, CONTEXT
from lightrft.rollout.engines import largest_hf_cache
from lightrft.strategy.memory import ModelSize
from lightrft.tests.support import tiny
from lightrft.tests.support.doctor import by_name, config, only
from lightrft.tests.support.packages import needs_installed_lightrft
from lightrft.tests.support.warm import warm_python

SHORT = {"prompt_max_len": 64, "generate_max_len": 64}
SEVEN_B = ModelSize(7_600_000_000, 230_000_000, 1_090_000_000)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("doctor") / "model")


def planned(**options: Any) -> dict[str, Finding]:
    return by_name(examine("model", partial(plan, config(**SHORT, **options), 2)))


# -- the whole of it --------------------------------------------------------------------------------------------------
@needs_installed_lightrft
def test_this_machine_and_a_tiny_model(model, capsys):
    code = main(
        ["--json", "--pretrain",
         str(model), "--prompt_max_len", "64", "--generate_max_len", "64", "--ranks", "2"])
    told = json.loads(capsys.readouterr().out)
    found = {one["name"]: (one["verdict"], one["text"]) for one in told["findings"]}
    assert code == 0 and told["verdict"] in ("ok", "warn"), told
    assert {"python", "torch", "transformers", "/dev/shm", "--save_path", "disk"} <= found.keys()
    assert found["gloo"] == ("ok", "a group of 1 process works") and found["transformers"] == ("ok", "can be imported")
    assert found["model"] == ("ok", f"{model}: {model_size(model).total:,} parameters")
    assert found["batch"][1].endswith("2 ranks")


def test_two_ranks_make_a_group_and_the_second_is_silent(monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}  # yapf: disable
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    second = subprocess.Popen([warm_python(), "-m", "lightrft.cli.doctor"], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, env=os.environ | {"RANK": "1", "LOCAL_RANK": "1"})
    try:
        assert by_name(check_groups())["gloo"].text == "a group of 2 processes works"
        assert second.communicate(timeout=60) == ("", None) and second.returncode == 0
    finally:
        second.kill()


def test_a_rank_beside_the_first_tells_only_what_fails(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(distributed_c10d, "_group_count", 0)  # the failed group takes a number
    assert main([]) == 0 and not capsys.readouterr().out
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert main([]) == 1
    line, verdict = capsys.readouterr().out.splitlines()
    assert line.startswith("fail  gloo             no process group: ") and "; GLOO_SOCKET_IFNAME must name" in line
    assert verdict == "verdict: fail (0 ok, 0 warn, 1 fail)"


def test_half_of_the_environment_of_torchrun_fails(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    assert main(["--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "fail" and "lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT" in told["findings"][0]["text"]


@pytest.mark.parametrize("words, reason", [
    (["--pretrane", "x"], "unknown flag --pretrane (did you mean --pretrain?)"),
    (["--train_batch_size", "0"], "--train_batch_size 0: must be at least 1"),
    (["--plan_gpus=8x80"], "--plan_gpus 8x80: the doctor examines this machine; lightrft train --dry_run"),
    (["--dry_run"], f"--dry_run: belongs to {PROG.replace('doctor', 'train')}"),
    (["--ranks", "0"], "'0': expected an integer of at least 1"),
])
def test_options_that_cannot_be_read_end_with_2(capsys, words, reason):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2 and reason in capsys.readouterr().err


# -- the model --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["qwen2", "llama"])  # tied, untied
def test_the_config_alone_gives_the_size_of_the_weights(tmp_path, family):
    folder = tiny.save_model(tmp_path, family)
    size = model_size(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert count_parameters(parameter_shapes(str(folder))) == size and size.total > size.largest_layer + size.outside


@pytest.mark.parametrize("options, reason", [
    ({"pretrain": "/nowhere/model"}, "model path '/nowhere/model' does not exist; "),
    ({"advantage_estimator": "grpoo"}, "unknown advantage estimator 'grpoo' (did you mean grpo?)"),
])
def test_a_plan_that_cannot_be_made_is_one_failure(model, options, reason):
    found = planned(**{"pretrain": str(model)} | options)
    assert found.keys() == {"model"} and found["model"].verdict == "fail" and reason in found["model"].text


def test_lengths_beyond_the_model(model):
    found = by_name(examine("model", partial(plan, config(pretrain=str(model)), 1)))
    assert found["model"].verdict == "fail" and "more than the 512 positions" in found["model"].text
    assert "batch" in found, "the rest is still told"


def test_weights_that_are_cut_or_missing(tmp_path):
    folder = tiny.save_model(tmp_path)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "is not a whole safetensors file" in planned(pretrain=str(folder))["model"].text
    weights.unlink()
    assert planned(pretrain=str(folder))["model"].verdict == "warn"
    save_file(tensors, folder / "model-1.safetensors", {"format": "pt"})
    where = {name: f"model-{1 + number % 2}.safetensors" for number, name in enumerate(tensors)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")
    found = planned(pretrain=str(folder))["model"]
    assert found.verdict == "fail" and found.text.endswith("1 files are missing, first model-2.safetensors")


# -- memory and disk --------------------------------------------------------------------------------------------------
def verdict_for(free: float, ranks: int = 8, name: str = "cuda:0", size: ModelSize = SEVEN_B,
                **options: Any) -> Finding:
    device = Device(name, int(free), int(free))
    return by_name(check_memory(config(**options), ranks, size, [device]))[f"memory {name}"]


def needed_by(phase: int, **options: Any) -> int:
    held = memory(config(**options), 8, SEVEN_B, Device("cuda:0", 0, 0))
    return int(sum(values[phase] for values in held.values()))


def test_one_byte_decides():
    options = {"engine_kv_mib": 1024, "grad_sync": "last", "logprob_chunk_mib": 256}
    needed = needed_by(2, **options)
    beside = CONTEXT + COMMUNICATOR  # estimated, of one process on one of several GPUs
    assert verdict_for(needed + beside + 1, **options).verdict == "ok"
    for free in (needed + beside - 1, needed + 1):
        found = verdict_for(free, **options)
        assert found.verdict == "warn" and found.text.startswith("by what is estimated does not fit: it takes")
    found = verdict_for(needed - 1, **options)
    assert found.verdict == "fail" and "in the phase backward" in found.text


def test_a_cache_of_a_quarter_that_does_not_fit_is_a_warning():
    """It is there while the engine generates, and with --overlap_passes beside what the passes take."""
    for options, phase in (({}, 0), ({"init_kl_coef": 0.1, "overlap_passes": True}, 1)):
        needed = needed_by(phase, **options)
        assert verdict_for(needed * 1.45, **options).verdict == "ok"  # graphs of the engine are estimated too
        found = verdict_for(needed * 1.3, **options)
        mib = int(found.remedy.split()[1])
        assert found.verdict == "warn" and verdict_for(needed * 1.3, **options, engine_kv_mib=mib).verdict == "ok"
    assert verdict_for(needed * 1.3, init_kl_coef=0.1).verdict == "ok", "passes after generation have the room"


def test_a_cache_is_no_larger_than_all_sequences_of_a_rank():
    """A small model on a busy machine: of 64 GiB 3 are free, and a quarter would be 16."""
    small, shape = ModelSize(3 << 20, 1 << 20, 1 << 20), ModelShape(4, 128, 512, 128, 64, 4)
    busy, batch = Device("cpu", 3 * GIB, 64 * GIB), config(rollout_batch_size=64, n_samples_per_prompt=8)
    assert memory_verdict(batch, 2, small, busy, shape).verdict == "ok"
    tokens = 64 * 8 // 2 * (batch.rollout.prompt_max_len + batch.rollout.generate_max_len)
    assert largest_hf_cache(batch, 2, shape, busy.total) == tokens * 2 * 64 * 4 * 4  # keys and values, layers, float32
    assert largest_hf_cache(batch, 2, None, busy.total) == 16 * GIB
    assert memory_verdict(batch, 2, small, busy, None).verdict == "warn", "the shape is not known"


def test_vllm_takes_its_share_whatever_it_needs():
    """Beside it is 11 GiB of state, also when it generates canaries."""
    assert verdict_for(110 * GIB, engine_type="vllm").verdict == "ok"
    found = verdict_for(110 * GIB, engine_type="vllm", engine_mem_util=0.9)
    assert found.verdict == "fail"
    assert "it takes 110.12 GiB per rank in the phase weight sync, activations not counted, and 110" in found.text
    found = verdict_for(50 * GIB, engine_type="vllm")
    assert found.verdict == "fail" and found.text.startswith(
        "has no room for a key-value cache: the engine's weights take 28.31 of the 25.00 GiB of --engine_mem_util 0.5")


@pytest.mark.parametrize("free_gib, change, options", [
    (55, {"adam_offload": True}, {"engine_type": "vllm", "engine_kv_mib": 20 << 10}),
    (45, {"grad_sync": "every"}, {"grad_sync": "last"}),
    (30, {"strategy": "fsdp", "fsdp_cpu_offload": True}, {}),
    (35, {"adam_offload": True}, {"strategy": "deepspeed"}),
    (40, {"zero_stage": 3, "gradient_checkpointing": True}, {"strategy": "deepspeed", "bf16": True}),
    (39, {"lora_rank": 16}, {"name": "cpu"}),
    (60, {"engine_mem_util": 0.5}, {"engine_type": "vllm", "engine_mem_util": 0.4}),
    (30, {"engine_tp_size": 2, "adam_offload": True}, {"engine_type": "vllm"}),
])
def test_the_remedy_mends_it(free_gib, change, options):
    found = verdict_for(free_gib * GIB, **options)
    words = " ".join(f"--{name}" + ("" if value is True else f" {value}") for name, value in change.items())
    assert found.verdict == "fail" and found.remedy.startswith(f"{words} brings it to "), found
    assert verdict_for(free_gib * GIB, **options | change).verdict != "fail"


def test_adapters_are_named_beside_weights_in_host_memory():
    found = verdict_for(45 * GIB, strategy="fsdp", bf16=True, ranks=1)
    assert re.search(
        "^--fsdp_cpu_offload brings it to .* GiB, with the weights in host memory, which is slow; "
        "--lora_rank 16 brings it to [0-9.]+ GiB$", found.remedy), found
    assert verdict_for(45 * GIB, strategy="fsdp", bf16=True, lora_rank=16, ranks=1).verdict != "fail"


def test_what_no_change_mends():
    found = verdict_for(20 * GIB, engine_kv_mib=1024)
    assert found.remedy.startswith("--strategy fsdp --fsdp_cpu_offload brings it to ")
    assert found.remedy.endswith("still too much: take a smaller model, more GPUs or larger ones")
    least = {"logprob_chunk_mib": 64, "engine_kv_mib": 1024, "lora_rank": 16, "strategy": "fsdp"}
    assert verdict_for(30 * GIB, **least).remedy.startswith("--fsdp_cpu_offload brings it to ")
    assert verdict_for(30 * GIB, name="cpu", **least).remedy == "take a smaller model, more GPUs or larger ones"


def test_the_disk_that_a_run_takes_by_hand(model):
    n = SEVEN_B.total
    assert run_bytes(config(disable_ckpt=True), SEVEN_B, True) == 4 * n  # the final model
    assert run_bytes(config(save_steps=0), SEVEN_B, False) == (12 + 4) * n
    assert run_bytes(config(save_steps=0, optim="adamw_8bit"), SEVEN_B, False) == (4 + 2 * (1 + 4 / 256) + 4) * n
    assert run_bytes(config(save_steps=0), SEVEN_B, True) == (24 + 4) * n
    assert run_bytes(config(save_steps=5, max_ckpt_num=2), SEVEN_B, False) == (3 * 12 + 4) * n
    assert "--max_ckpt_num" in only(check_disk(config(save_steps=5), ModelSize(10**15, 1, 1), False)).remedy


def test_a_save_path_that_cannot_be_written_to_and_a_disk_that_is_too_small(tmp_path):
    (tmp_path / "file").touch()
    found = only(check_save_path(config(save_path=str(tmp_path / "file" / "runs"))))
    assert found.verdict == "fail" and f"{tmp_path / 'file'} cannot be written to" in found.text
    assert only(check_save_path(config(save_path=str(tmp_path / "a" / "b")))).verdict in ("ok", "warn")
    assert not (tmp_path / "a").exists(), "looking creates nothing"
    assert only(check_disk(config(save_path=str(tmp_path / "a")), ModelSize(10**15, 1, 1), False)).verdict == "fail"


def test_shared_memory(tmp_path):
    assert only(check_shm(tmp_path / "none")).text == "this system has none"
    assert only(check_shm(tmp_path)).text.split()[1] == "GiB"


def test_the_worst_verdict():
    assert worst([]) == "ok" and worst([Finding("warn", "a", ""), Finding("ok", "b", "")]) == "warn"
    assert worst([Finding("fail", "a", ""), Finding("warn", "b", "")]) == "fail"


def test_the_ranks_of_a_machine_are_counted(monkeypatch):
    assert (local_ranks(None), local_ranks(8)) == (1, 8), "without a GPU"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert local_ranks(8) == 2, "of two machines or more"
