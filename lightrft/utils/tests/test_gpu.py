"""A GPU that torch cannot use stops a run, with the remedy; so do more ranks than GPUs, and ranks that cannot meet."""
import socket
from contextlib import nullcontext

import pytest
import torch
from torch.distributed import distributed_c10d

from lightrft.cli import train
from lightrft.config.cli import parse_config
from lightrft.config.schema import StrategyConfig
from lightrft.preflight.checks.machine import check_devices
from lightrft.strategy import distributed
from lightrft.strategy.strategy import FakeStrategy
from lightrft.tests.support import runs
from lightrft.trainer.session import settled
from lightrft.utils import gpu
from lightrft.utils.errors import UserError

VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A file system of a machine with a GPU; torch is the installed one, which sees none."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def write(version: str | None = VERSION, node: bool = True, cuda: str | None = "13.0"):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev" / "nvidiactl").touch()  # also without a GPU
        if node:
            (tmp_path / "dev" / "nvidia0").touch()
        if version is not None:
            (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
            (tmp_path / "proc/driver/nvidia/version").write_text(version, encoding="utf-8")
        return tmp_path

    return write


@pytest.mark.parametrize("state, visible, words", [
    ({}, None, "(driver 535.104.05), but the driver is too old for torch * whose CUDA 13.0 needs 580 or newer: update"),
    ({}, None, "update the driver, or install a torch for CUDA 12; "),
    ({"cuda": None}, None, "was built without CUDA: install a CUDA build of torch"),
    ({"node": False}, None, "this container has no access to it (/dev/nvidia0): start the container with docker run"),
    ({"version": None}, None, "(driver unknown), but torch for CUDA 13.0 cannot start it: nvidia-smi must list it"),
    ({"version": OPEN}, None, "(driver 580.95.05), but torch for CUDA 13.0 cannot start it: nvidia-smi must list it"),
    ({"version": OPEN
      }, "7", "CUDA_VISIBLE_DEVICES=7 names none of its GPUs: unset it, or name GPUs that nvidia-smi lists"),
])
def test_a_gpu_that_torch_cannot_use_stops_the_run(machine, monkeypatch, state, visible, words):
    root = machine(**state)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UserError) as error:
        gpu.rank_device(0, 1, root)
    position = 0
    for part in words.split("*"):
        position = str(error.value).index(part, position)
    assert str(error.value).endswith('; CUDA_VISIBLE_DEVICES="" runs on the CPU')


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_whoever_hides_the_gpus_gets_the_cpu(machine, monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert gpu.rank_device(0, 1, machine()) == torch.device("cpu")


def test_a_machine_without_a_gpu_uses_the_cpu(machine):
    assert gpu.rank_device(1, 2, machine(version=None, node=False)) == torch.device("cpu")


@pytest.mark.parametrize("strategy", [FakeStrategy, distributed.DistributedStrategy])
def test_every_strategy_and_the_doctor_refuse_it(machine, monkeypatch, strategy):
    root = machine()
    monkeypatch.setattr(gpu.unused_gpu, "__defaults__", (root, ))
    monkeypatch.setattr(gpu.rank_device, "__defaults__", (root, ))
    monkeypatch.setattr(strategy, "__abstractmethods__", frozenset())
    with pytest.raises(UserError, match="the driver is too old"):
        strategy(StrategyConfig()).setup()
    found = next(check_devices())
    assert (found.verdict, found.name) == ("fail", "cuda") and found.remedy.startswith("update the driver, or install")


@pytest.mark.parametrize("options, code", [([], 2), (["--plan_gpus", "1xH100"], 0)])
def test_a_dry_run_plans_for_it_only_if_it_is_asked_to(machine, monkeypatch, tmp_path, capsys, options, code):
    """The plan of another machine asks nothing of this one."""
    home, root = runs.write_home(tmp_path / "home"), machine()
    for function in (gpu.unused_gpu, gpu.rank_device):
        monkeypatch.setattr(function, "__defaults__", (root, ))
    words = ["--pretrain", str(home / "model"), "--prompt_data", str(home / "train.jsonl"), "--reward", "format",
             "--rollout_batch_size", "4", "--train_batch_size", "8"]  # yapf: disable
    with pytest.raises(SystemExit) as error:
        train.main([*words, "--dry_run", *options])
    said = capsys.readouterr()
    assert error.value.code == code, said
    assert ("the driver is too old" in said.err and "update the driver, or install" in said.err) == bool(code)
    assert ("rollout_batch_size" in said.out) != bool(code), "a plan for the CPU"
    with pytest.raises(UserError, match="the driver is too old") if code else nullcontext():
        settled(parse_config([*words, "--dry_run", *options]))  # as GRPO(...).plan() does


@pytest.mark.parametrize("ranks, words", [
    ((2, 4), "4 processes on this machine (LOCAL_RANK 2), but torch sees 2 GPUs"),
    ((0, 4), "4 processes on this machine (LOCAL_RANK 0), but torch sees 2 GPUs"),
    ((2, 2), "2 processes on this machine (LOCAL_RANK 2), but torch sees 2 GPUs, and each process needs its own, num"),
    ((2, 1), "1 process on this machine (LOCAL_RANK 2), but torch sees 2 GPUs"),
])
def test_more_ranks_than_gpus_are_refused_on_every_rank(monkeypatch, ranks, words):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert gpu.rank_device(1, 2) == torch.device("cuda", 1)
    with pytest.raises(UserError) as error:
        gpu.rank_device(*ranks)
    assert words in str(error.value) and "--nproc-per-node 2" in str(error.value)
    assert str(error.value).endswith("(CUDA_VISIBLE_DEVICES is 4,5)")


@pytest.mark.parametrize("capability, built, runs", [
    ((7, 0), ["sm_75", "sm_80", "sm_90", "sm_120", "compute_120"], False),
    ((8, 9), ["sm_75", "sm_86"], True), ((8, 0), ["sm_86"], False), ((9, 0), ["sm_90a"], True),
    ((12, 1), ["sm_90", "compute_120"], True), ((10, 3), ["sm_100f"], True), ((12, 1), ["sm_90", "sm_100"], False),
    ((7, 0), [], True), ((9, 4), ["gfx942"], True),
])  # yapf: disable
def test_a_gpu_that_torch_was_not_built_for_stops_the_run(capability, built, runs, monkeypatch):
    """Its first kernel would fail: no kernel image is available."""
    fakes = {"is_available": True, "device_count": 1, "get_device_capability": capability, "get_arch_list": built,
             "get_device_name": "Tesla V100", "mem_get_info": (80 << 30, 80 << 30)}  # yapf: disable
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27))
    verdict = [*check_devices()][-1]
    if runs:
        assert gpu.rank_device(0, 1) == torch.device("cuda", 0) and verdict.verdict == "ok"
        return
    with pytest.raises(UserError, match=r"has no kernels for Tesla V100 \(compute capability .*: install a torch that"):
        gpu.rank_device(0, 1)
    assert verdict.verdict == "fail" and "has no kernels for Tesla V100" in verdict.text


@pytest.fixture(name="meeting")
def meeting_fixture(monkeypatch):
    """The world of a rank of two, of which the other does not come."""
    monkeypatch.setattr(distributed_c10d, "_group_count", 0)  # the failed group takes a number
    monkeypatch.setattr(distributed, "START_S", 1)
    distributed._rendezvous.cache_clear()  # an earlier test of this process may have met another rank
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    def meet(rank, port):
        world = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in world.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(UserError) as error:
            distributed.join(1)
        return str(error.value)

    return meet


def test_ranks_that_cannot_meet_are_told_of_the_interface(meeting, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    error = meeting(1, 9)
    for words in ("the ranks cannot connect: ", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=9", "GLOO_SOCKET_IFNAME=not set",
                  "NCCL_SOCKET_IFNAME=eth7", "ip addr"):
        assert words in error, error


def test_a_port_that_another_program_has_is_named(meeting):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        error = meeting(0, port)
    assert f"MASTER_PORT={port}" in error and "--master_port" in error and "ip addr" not in error
