"""The GPUs of this machine: which of them a run uses, and what it says when they differ."""
from types import SimpleNamespace

import pytest
import torch

from lightrft.preflight.checks.machine import check_devices, check_threads
from lightrft.preflight.cost import GIB
from lightrft.preflight.hardware import Device, Machine, unlike_gpus

H100 = SimpleNamespace(major=9, total_memory=80 * GIB, name="H100")
T4 = SimpleNamespace(major=7, total_memory=16 * GIB, name="T4")


@pytest.fixture
def gpus(monkeypatch):
    """Gives the machine these GPUs, and returns the indices of those whose properties were asked for."""

    def give(*found):
        asked = []
        fakes = {
            "is_available": lambda: True, "device_count": lambda: len(found), "get_device_properties":
            lambda index: asked.append(index) or found[index], "mem_get_info": lambda index: 2 *
            (found[index].total_memory, ), "get_device_capability": lambda index: (found[index].major, 0),
            "get_device_name": lambda index: found[index].name
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27))
        return asked

    return give


@pytest.mark.parametrize("local_rank", [0, 1])
def test_gpus_of_two_generations_settle_alike(local_rank, gpus):
    gpus(H100, T4)
    machine = Machine.here(2, local_rank)
    assert (machine.gpu, machine.bf16, machine.device.total) == ("T4", False, (H100, T4)[local_rank].total_memory)


def test_a_gpu_that_no_rank_uses_decides_nothing(gpus):
    gpus(H100, H100, T4)
    assert Machine.here(4, 1, local_ranks=2) == Machine(4, Device("cuda:1", 80 * GIB, 80 * GIB), "H100", local_ranks=2)
    assert Machine.here(2).bf16 and not Machine.here(4, 1, local_ranks=3).bf16
    verdicts = {ranks: [found.verdict for found in check_devices(True, ranks)] for ranks in (1, 2, 3, None)}
    assert verdicts == {1: ["ok"] * 4, 2: ["ok"] * 4, 3: [*["ok"] * 3, "fail", "warn"], None: verdicts[3]}
    assert [found.text.endswith("; the run does not use it")
            for found in check_devices(True, 2)] == [False] * 3 + [True]
    assert "(H100 on rank 0, T4 on rank 2): every step waits for the slowest" in [*check_devices(True)][-1].text


def test_unlike_gpus_are_a_warning():
    assert [*unlike_gpus(["H100", "H100"])] == [*unlike_gpus(["", ""])] == []
    assert [*unlike_gpus(["H100", "A100", "A100", ""])] == [
        "the GPUs of the run differ (H100 on rank 0, A100 on rank 1, a CPU on rank 3): every step waits for the slowest"
    ]


def test_this_machine(gpus):
    """A rank asks what the GPUs are, and for the memory of its own; that opens no CUDA context."""
    asked = gpus(*[H100] * 8)
    assert Machine.here(16, 3) == Machine(16, Device("cuda:3", 80 * GIB, 80 * GIB), "H100") and asked == [*range(8)]
    gpus(*[T4] * 8)
    assert not Machine.here(16).bf16


@pytest.mark.parametrize("ranks,given,verdict,text", [
    (1, None, "ok", "1 rank x 16 threads on 16 cores"),
    (4, None, "ok", "4 ranks x 4 threads on 16 cores; plain torchrun gives each rank 1 thread"),
    (16, None, "ok", "16 ranks x 1 thread on 16 cores"),
    (4, "1", "warn", "4 ranks x 1 thread on 16 cores, the others idle (OMP_NUM_THREADS=1, which torchrun sets"),
    (16, "1", "ok", "16 ranks x 1 thread on 16 cores (OMP_NUM_THREADS=1)"),
    (4, "8", "warn", "4 ranks x 8 threads on 16 cores, more than the machine has"),
])
def test_threads_of_each_rank(ranks, given, verdict, text, monkeypatch):
    monkeypatch.setattr("lightrft.utils.launcher.count_cores", lambda: 16)
    monkeypatch.setattr("torch.get_num_threads", lambda: int(given))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    (found, ) = check_threads(ranks)
    assert (found.name, found.verdict) == ("threads", verdict) and found.text.startswith(text), found
    assert verdict == "ok" or f"OMP_NUM_THREADS={16 // ranks}, or start with lightrft train --nproc" in found.remedy


def test_the_name_of_a_gpu_may_be_in_lower_case():
    assert Machine.planned("8xh100") == Machine.planned("8xH100")
