"""Ranks, random state, threads and memory."""
import ctypes
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from lightrft.utils import launcher
from lightrft.utils.env import (World, peak_memory_gib, rng_state, seed_everything, set_rng_state, total_memory,
                                used_memory_gib)

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}


def draw():
    return random.random(), np.random.rand(), torch.rand(3).tolist()


def test_world_of_torchrun_and_of_one_process():
    assert World.from_env(TORCHRUN) == World(5, 1, 8, 4) and not World.from_env(TORCHRUN).is_main
    assert World.from_env({}) == World(0, 0, 1, 1) and World.from_env({}).is_main


def test_world_refuses_half_an_environment_and_contradictions():
    with pytest.raises(ValueError, match="WORLD_SIZE, LOCAL_WORLD_SIZE not set although RANK, LOCAL_RANK is"):
        World.from_env({"RANK": "0", "LOCAL_RANK": "0"})
    with pytest.raises(ValueError, match="contradictory"):
        World.from_env(TORCHRUN | {"RANK": "8"})


def test_seeds_decide_every_generator():
    seed_everything(1)
    first = draw()
    seed_everything(1)
    assert draw() == first
    seed_everything(2)
    assert all(a != b for a, b in zip(draw(), first))


def test_random_state_survives_a_file(tmp_path):
    seed_everything(3)
    random.gauss(0, 1)
    torch.save(rng_state(), tmp_path / "rng.pt")
    expected = draw(), random.gauss(0, 1)
    draw()
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert (draw(), random.gauss(0, 1)) == expected


@pytest.mark.parametrize("environment,threads", [("", "max(cores // 2, 1)"), ("1", "1")])
def test_threads_are_shared_unless_the_environment_decides(environment, threads):
    code = ("import os, torch\nfrom lightrft.utils.launcher import share_cores\ncores = len(os.sched_getaffinity(0))\n"
            f"given = share_cores(2, os.environ)\nassert int(os.environ['OMP_NUM_THREADS']) == {threads}\n"
            f"assert torch.get_num_threads() == (given or 1) == {threads}, torch.get_num_threads()")
    env = {"PATH": "", "OMP_NUM_THREADS": environment} if environment else {"PATH": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=60)


def test_threads_on_a_busy_machine_get_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(launcher, "count_cores", lambda: 8)
    for load, warned in ((8.0, False), (11.0, True)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        for ranks in (2, 8):
            launcher.warn_of_load(launcher.share_cores(ranks, {}))
            said = capsys.readouterr().err
            assert ("load 11 on 8 cores" in said) == (warned and ranks == 2), "one thread waits for no other"


KEPT = """
import resource, torch
from lightrft.utils.env import freed_memory_is_kept, used_memory_gib
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        blocks = [torch.ones(4 << 20) for _ in range(8)]  # 128 MiB, freed together: 32768 pages
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
before = faults(), used_memory_gib(torch.device("cpu"))
with freed_memory_is_kept(torch.device("cpu")):
    faults()
    inside = faults(), used_memory_gib(torch.device("cpu"))
after = used_memory_gib(torch.device("cpu"))
assert inside[0] < before[0] / 10, (before, inside)
assert inside[1] > after + 0.1, (inside, after)
with freed_memory_is_kept(torch.device("meta")):
    assert faults() > 10 * inside[0]
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_memory_is_not_cleared_again_by_the_kernel():
    subprocess.run([sys.executable, "-c", KEPT], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=60)


PEAK = """
import torch
from lightrft.utils.env import peak_memory_gib, total_memory, used_memory_gib
cpu = torch.device("cpu")
before = peak_memory_gib(cpu)
block = torch.ones(128 << 20)  # 0.5 GiB, touched
assert 0.5 < peak_memory_gib(cpu) < 0.6 + before and 0.05 < before < 1, (before, peak_memory_gib(cpu))
assert 0.5 < used_memory_gib(cpu) <= peak_memory_gib(cpu) + 0.01, used_memory_gib(cpu)
del block
assert used_memory_gib(cpu) < peak_memory_gib(cpu) - 0.4, used_memory_gib(cpu)
block = torch.ones(4)
assert block.nbytes < total_memory(cpu) < (1 << 45), total_memory(cpu)
"""


def test_memory_is_that_of_this_process():
    larger = bytearray(1 << 30)  # a process that starts another one hands its ru_maxrss on
    subprocess.run([sys.executable, "-c", PEAK], check=True, timeout=60)
    assert len(larger) == 1 << 30


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_the_device():
    cuda = torch.device("cuda", 0)
    block = torch.ones(64 << 20, device="cuda")
    assert 0.2 < used_memory_gib(cuda) < total_memory(cuda) / 2**30
    assert 0.2 < peak_memory_gib(cuda) < total_memory(cuda) / 2**30, block.shape
