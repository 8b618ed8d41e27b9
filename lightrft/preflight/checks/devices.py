"""Checks of the devices (GPUs, CUDA, NCCL and bfloat16, or the CPU) and of communication between processes."""
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightrft.preflight.checks.finding import Finding, first_line

GIB = 2**30
BUSY = 0.9  # a GPU with less than this share of its memory free has another user
GROUP_TIMEOUT_S = 60


@dataclass(frozen=True)
class Device:
    """A device that ranks compute on; ``free`` and ``total`` are the bytes of memory of one rank."""
    name: str
    free: int
    total: int


def devices(ranks: int) -> list[Device]:
    """List the GPUs of this machine; without a GPU, its CPU, whose memory ``ranks`` processes share."""
    import torch

    from lightrft.utils.env import total_memory
    if torch.cuda.is_available():
        found = [(f"cuda:{i}", *torch.cuda.mem_get_info(i)) for i in range(torch.cuda.device_count())]
        return [Device(name, free, total) for name, free, total in found]
    total = total_memory(torch.device("cpu"))
    return [Device("cpu", min(_available(), total) // ranks, total // ranks)]


def _available() -> int:
    """Bytes of host memory that a new process can use."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_devices(bf16: bool = False) -> Iterator[Finding]:
    """Report CUDA, NCCL and one line per GPU, or one line for the CPU.

    Args:
        bf16: the run computes in bfloat16.
    """
    import torch
    if not torch.cuda.is_available():
        yield from _unused_gpu(torch.version.cuda)
        yield _cpu(devices(1)[0])
        return
    yield Finding(
        "ok", "cuda", f"{torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, "
        f"{torch.cuda.device_count()} GPUs")
    for index, device in enumerate(devices(1)):
        yield _gpu(index, device, bf16)


def _gpu(index: int, device: Device, bf16: bool) -> Finding:
    import torch
    major, minor = torch.cuda.get_device_capability(index)
    native = major >= 8  # Ampere; older ones emulate it
    text = (f"{torch.cuda.get_device_name(index)}, {device.free / GIB:.1f} of {device.total / GIB:.1f} GiB free, "
            f"compute capability {major}.{minor}, bfloat16 {'yes' if native else 'emulated'}")
    if device.free < BUSY * device.total:
        return Finding("warn", device.name, text, "another process holds memory: nvidia-smi shows which")
    if bf16 and not native:
        return Finding("warn", device.name, text, "drop --bf16, which is slow here")
    return Finding("ok", device.name, text)


def _unused_gpu(cuda: str | None) -> Iterator[Finding]:
    """Report an NVIDIA GPU that this torch cannot use."""
    if Path("/proc/driver/nvidia/version").exists():
        text = "torch is a CPU build" if cuda is None else f"torch for CUDA {cuda} cannot start it (driver, visibility)"
        remedy = ("install a CUDA build of torch" if cuda is None else
                  "check nvidia-smi and CUDA_VISIBLE_DEVICES; an old driver needs a torch for an older CUDA")
        yield Finding("warn", "cuda", f"this machine has an NVIDIA GPU, but {text}", remedy)


def _cpu(device: Device) -> Finding:
    import torch
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = f"{torch.get_num_threads()} threads (OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')})"
    return Finding(
        "ok", "cpu", f"no GPU: training runs on {cores} cores, {threads}, {device.free / GIB:.1f} of "
        f"{device.total / GIB:.1f} GiB free, bfloat16 {'in hardware' if _cpu_bf16() else 'without hardware support'}")


def _cpu_bf16() -> bool:
    try:
        known = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:  # not Linux
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(known)


def check_groups() -> Iterator[Finding]:
    """Sum a tensor over the ranks (one without torchrun): gloo for the CPU, NCCL where there is a GPU."""
    import torch

    from lightrft.strategy.distributed import count_ranks, join, leave
    backends = {"gloo": "cpu"} | ({"nccl": "cuda"} if torch.cuda.is_available() else {})
    backend, joined = "gloo", False
    try:
        joined = join(GROUP_TIMEOUT_S)
        for backend, kind in backends.items():
            ranks = count_ranks(kind)
            yield Finding("ok", backend, f"a group of {ranks} process{'es' if ranks > 1 else ''} works")
    except RuntimeError as error:
        yield Finding("fail", backend, f"no process group: {first_line(error)}",
                      f"{backend.upper()}_SOCKET_IFNAME must name a network interface of this machine, or be unset")
    finally:
        if joined:
            leave()
