"""Checks of the machine: its devices, communication between processes, shared memory and the disk."""
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lightrft.config.schema import Config
from lightrft.preflight.checks import Finding
from lightrft.preflight.cost import GIB
from lightrft.preflight.hardware import AMPERE, Device, devices, unlike_gpus
from lightrft.utils.errors import first_line

BUSY = 0.9  # a GPU with less than this share of its memory free has another user
GROUP_TIMEOUT_S = 60
SHM = Path("/dev/shm")
SHM_BYTES = GIB  # NCCL takes tens of MiB per rank, an engine with tensor parallelism more; Docker's default is 64 MiB


def check_devices(bf16: bool = False, ranks: int | None = None) -> Iterator[Finding]:
    """Report CUDA, NCCL and one line per GPU, or one line for the CPU.

    Args:
        bf16: the run computes in bfloat16.
        ranks: of the run on this machine, which use its first GPUs; None: all of them.
    """
    import torch

    from lightrft.utils.gpu import unused_gpu
    if not torch.cuda.is_available():
        if unused := unused_gpu():
            yield Finding("fail", "cuda", unused.text, unused.remedy)
        yield _cpu(devices(1)[0])
        return
    yield Finding(
        "ok", "cuda", f"{torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, "
        f"{torch.cuda.device_count()} GPUs")
    found = devices(1)
    for index, device in enumerate(found):
        yield _gpu(index, device, bf16, used=ranks is None or index < ranks)
    for unlike in unlike_gpus([torch.cuda.get_device_name(index) for index in range(len(found))][:ranks]):
        yield Finding("warn", "cuda", unlike, "CUDA_VISIBLE_DEVICES names the GPUs to use")


def _gpu(index: int, device: Device, bf16: bool, used: bool) -> Finding:
    import torch

    from lightrft.utils.gpu import unsupported_gpu
    major, minor = torch.cuda.get_device_capability(index)
    native = major >= AMPERE  # older ones emulate it
    text = (f"{torch.cuda.get_device_name(index)}, {device.free / GIB:.1f} of {device.total / GIB:.1f} GiB free, "
            f"compute capability {major}.{minor}, bfloat16 {'yes' if native else 'emulated'}")
    if not used:
        return Finding("ok", device.name, f"{text}; the run does not use it")
    if unused := unsupported_gpu(index):
        return Finding("fail", device.name, unused.text, unused.remedy)
    if bf16 and not native:
        return Finding("fail", device.name, text, "add --bf16 false: no run computes in emulated bfloat16")
    if device.free < BUSY * device.total:
        return Finding("warn", device.name, text, "another process holds memory: nvidia-smi shows which")
    return Finding("ok", device.name, text)


def _cpu(device: Device) -> Finding:
    from lightrft.utils.launcher import count_cores
    return Finding(
        "ok", "cpu", f"no GPU: training runs on {count_cores()} cores, {device.free / GIB:.1f} of "
        f"{device.total / GIB:.1f} GiB free, bfloat16 {'in hardware' if _cpu_bf16() else 'without hardware support'}")


def _cpu_bf16() -> bool:
    try:
        known = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:  # not Linux
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(known)


def check_threads(ranks: int) -> Iterator[Finding]:
    """Compare the threads that ``ranks`` processes on this machine have with its cores."""
    import torch

    from lightrft.utils.launcher import count_cores, threads_per_rank
    cores, fair, given = count_cores(), threads_per_rank(ranks), os.environ.get("OMP_NUM_THREADS")
    threads = fair if given is None else torch.get_num_threads()
    text = f"{ranks} rank{'s' if ranks > 1 else ''} x {threads} thread{'s' if threads > 1 else ''} on {cores} cores"
    if given is None:
        hint = "; plain torchrun gives each rank 1 thread, lightrft --nproc these" if ranks > 1 < fair else ""
        yield Finding("ok", "threads", text + hint)
        return
    remedy = f"set OMP_NUM_THREADS={fair}, or start with lightrft train --nproc {ranks}"
    if ranks * threads > max(cores, ranks):
        yield Finding("warn", "threads", f"{text}, more than the machine has (OMP_NUM_THREADS={given})", remedy)
    elif 2 * threads <= fair:
        which = f"OMP_NUM_THREADS={given}{', which torchrun sets by itself' if given == '1' and ranks > 1 else ''}"
        yield Finding("warn", "threads", f"{text}, the others idle ({which})", remedy)
    else:
        yield Finding("ok", "threads", f"{text} (OMP_NUM_THREADS={given})")


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


def check_shm(folder: Path = SHM) -> Iterator[Finding]:
    """Check the shared memory between the processes of a machine."""
    if not folder.is_dir():
        yield Finding("ok", str(folder), "this system has none")
        return
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.2f} GiB free"
    if free < SHM_BYTES:
        yield Finding("warn", str(folder), f"{text}, NCCL and engines may need {SHM_BYTES / GIB:g} GiB",
                      "docker run --shm-size 8g, or remount it larger")
    else:
        yield Finding("ok", str(folder), text)


def check_save_path(config: Config) -> Iterator[Finding]:
    """Check that ``--save_path`` can be written to and its disk is not full."""
    name, path = "--save_path", Path(config.checkpoint.save_path).expanduser().absolute()
    folder = existing(path)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        yield Finding("fail", name, f"{path}: {folder} cannot be written to", "give another --save_path")
        return
    free = shutil.disk_usage(folder).free
    text = f"{path}: {free / GIB:.1f} GiB free"
    yield Finding("warn", name, text, "make room") if free < GIB else Finding("ok", name, text)


def existing(path: Path) -> Path:
    """The nearest of a path and its parents that exists."""
    return next(part for part in (path, *path.parents) if os.path.exists(part))
