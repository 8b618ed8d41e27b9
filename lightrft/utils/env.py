"""Environment of the process: ranks, random state, threads, memory."""
import ctypes
import gc
import hashlib
import os
import random
import resource
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightrft.utils.errors import UserError

_GIB = float(1 << 30)
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ALLOCATIONS = 50_000  # container objects between two garbage collections while models train
_FROZEN_BY_PYTHON = 5000  # objects at most: each full collection of Python 3.12 freezes some hundred
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
_KEPT = 1 << 30  # bytes of freed host memory
_MMAP_THRESHOLD = 32 << 20  # bytes; the largest that glibc takes, and where its own rule ends
_open_freezes = 0  # calls of frozen_objects that have not ended


@dataclass(frozen=True)
class World:
    """Rank of this process among all, as ``torchrun`` sets it; without torchrun, a single process."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "World":
        """Read RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE.

        Raises:
            ValueError: some of them are missing or contradict each other.
        """
        env = os.environ if environ is None else environ
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        missing = [name for name in names if name not in env]
        if len(missing) == len(names):
            return cls()
        if missing:
            raise UserError(
                f"{', '.join(missing)} not set although {', '.join(n for n in names if n in env)} is: start "
                f"with torchrun, or unset them all for one process")
        world = cls(*(int(env[name]) for name in names))
        if not (0 <= world.rank < world.world_size and 0 <= world.local_rank < world.local_world_size):
            raise UserError(f"contradictory ranks in the environment: {world}")
        return world

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0


def process_space() -> str:
    """Identifier of this ``/proc``: where it is equal, on one machine and in one container, a process number means the
    same process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        space = os.readlink("/proc/self/ns/pid")
    except OSError:  # unknown: a name that never occurs again
        return secrets.token_hex(4)
    return hashlib.blake2s(f"{boot} {space} {os.uname().nodename}".encode(), digest_size=4).hexdigest()


def seed_everything(seed: int) -> None:
    """Seed the global generators of python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """State of every global generator of this process; loads under ``torch.load(weights_only=True)``."""
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = numpy_state
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(), "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest), "torch":
        torch.get_rng_state(), "cuda": cuda
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the generators to a state of :func:`rng_state`; devices that are absent now are skipped."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, numbers, *rest = state["numpy"]
    np.random.set_state((kind, numbers.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    for device, value in enumerate(state["cuda"][:torch.cuda.device_count()]):
        torch.cuda.set_rng_state(value, device)


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Hide the objects that exist already (modules, models, data sets) from the garbage collector.

    By default it visits all of them several times per step, which takes milliseconds. Where some are frozen already,
    all stay frozen until an outer call ends.
    """
    global _open_freezes
    outer = _open_freezes or gc.get_freeze_count() > _FROZEN_BY_PYTHON  # to count a million objects takes 60 ms
    _open_freezes += 1
    gc.freeze()
    try:
        yield
    finally:
        _open_freezes -= 1
        if not outer:
            gc.unfreeze()


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect reference cycles rarely, and never among the objects that exist already: a step leaves no cycles with
    tensors."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(_ALLOCATIONS, *thresholds[1:])
    try:
        with frozen_objects():
            yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def freed_memory_is_kept(device: torch.device) -> Iterator[None]:
    """Keep up to :data:`_KEPT` bytes of freed host memory in the process while models train on the CPU.

    By default glibc returns the temporary tensors of every layer to the kernel, which has to clear the same pages again
    for the next layer. Other C libraries are left as they are. The kept memory is returned at the end.
    """
    libc = ctypes.CDLL(None)
    if device.type != "cpu" or not hasattr(libc, "mallopt"):
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _MMAP_THRESHOLD)
        libc.malloc_trim(0)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory so far, in GiB: allocated tensors on CUDA, resident memory of the process on CPU.

    On Linux ``ru_maxrss`` is no measure of it: a process that a larger one starts inherits the peak of that one.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024 / _GIB
    except (OSError, StopIteration):  # not Linux
        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in KiB, on macOS in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB


def used_memory_gib(device: torch.device) -> float:
    """Memory in use now, in GiB: on CUDA, of the whole device, engine and other processes included; on CPU, resident
    memory of this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / _GIB
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE / _GIB
    except OSError:  # not Linux
        return peak_memory_gib(device)


def available_memory(device: torch.device) -> float:
    """Bytes that torch can still allocate on ``device``, those included that it keeps for later; infinite on CPUs."""
    if device.type != "cuda":
        return float("inf")
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def total_memory(device: torch.device) -> int:
    """Total memory of ``device`` in bytes; on CPU that of the host, or the limit of the container if it is less."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:
            return min(host, int(limit.read()))
    except (OSError, ValueError):  # no cgroup (version 2), or no limit ("max")
        return host
