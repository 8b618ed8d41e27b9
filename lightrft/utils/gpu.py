"""Device of this process, the speed of GPUs, and NVIDIA GPUs of this machine that torch cannot use: never a silent run
on the CPU."""
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from lightrft.utils.errors import UserError

ROOT = Path("/")
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}  # major release of CUDA -> major release of the Linux driver
PEAK_TFLOPS = {
    # NVIDIA's data sheets of each GPU; those with sparsity are halved. H100 PCIe and NVL run at lower clocks than SXM.
    "H100": 989, "H100PCIE": 756, "H100NVL": 835, "H800": 989, "H800PCIE": 756, "H200": 989, "H200NVL": 835,
    "GH200": 989, "H20": 148, "H203E": 148, "B200": 2250, "GB200": 2500, "B300": 2250, "GB300": 2500, "A100": 312,
    "A100PCIE": 312, "A800": 312, "A800PCIE": 312, "A30": 165, "A40": 150, "A10": 125, "A10G": 70, "L4": 121,
    "L40": 181, "L40S": 362,
    # the architecture white papers of Ampere GA102, Ada and Blackwell: with float32 accumulation
    "RTX3090": 71, "RTX4090": 165, "RTX5090": 209.5, "RTXA6000": 155, "RTX6000ADAGENERATION": 364,
    "MI300X": 1307, "MI325X": 1307,  # AMD's data sheets
}  # yapf: disable
"""Dense bfloat16 operations per second, in units of 1e12, by the name of a GPU without maker, memory and socket."""
_NO_PART = re.compile(r"NVIDIA|AMD|INSTINCT|GEFORCE|SXM\d?|\d+GI?B?|HBM\w+|AC|OAM")  # of a name: other words of it
ON_CPU = 'CUDA_VISIBLE_DEVICES="" runs on the CPU'


@dataclass(frozen=True)
class UnusedGpu:
    """Why torch does not see the GPU of this machine, and what to do."""
    text: str
    remedy: str


def wants_cpu() -> bool:
    """Return True if the user hides every GPU: CUDA_VISIBLE_DEVICES is set, and empty or -1."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


def unused_gpu(root: Path = ROOT) -> UnusedGpu | None:
    """Find an NVIDIA GPU that torch cannot use although the user does not ask for the CPU.

    Args:
        root: of the file system whose ``proc/driver/nvidia`` and ``dev`` are read.
    """
    version, nodes = root / "proc/driver/nvidia/version", list((root / "dev").glob("nvidia[0-9]*"))
    if torch.cuda.is_available() or wants_cpu() or not (version.exists() or nodes):
        return None
    driver = _driver(version)
    text, remedy = _reason(torch.version.cuda, driver, bool(nodes), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return UnusedGpu(f"this machine has an NVIDIA GPU (driver {driver or 'unknown'}), but {text}",
                     f"{remedy}; {ON_CPU}")


def _driver(version: Path) -> str | None:
    """Read the release of the driver, such as 535.104.05."""
    try:
        found = re.search(r"NVRM version:.*?\s(\d+\.[\d.]+)\s", version.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[1] if found else None


def _reason(cuda: str | None, driver: str | None, nodes: bool, visible: str | None) -> tuple[str, str]:
    if cuda is None:
        return f"torch {torch.__version__} was built without CUDA", "install a CUDA build of torch (docs/install.md)"
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES={visible} names none of its GPUs", "unset it, or name GPUs that nvidia-smi lists"
    if not nodes:
        return "this container has no access to it (/dev/nvidia0)", "start the container with docker run --gpus all"
    needed = OLDEST_DRIVER.get(int(cuda.split(".")[0]))
    if driver and needed and int(driver.split(".")[0]) < needed:
        return (f"the driver is too old for torch {torch.__version__}, whose CUDA {cuda} needs {needed} or newer",
                f"update the driver, or install a torch for CUDA {_newest_cuda(driver)}")
    return (f"torch for CUDA {cuda} cannot start it",
            "nvidia-smi must list it (after an update of the driver, restart the machine)")


def _newest_cuda(driver: str) -> int | str:
    fitting = [cuda for cuda, needed in OLDEST_DRIVER.items() if int(driver.split(".")[0]) >= needed]
    return max(fitting, default="10 or older")


def unsupported_gpu(index: int) -> UnusedGpu | None:
    """Find that the installed torch has no kernels for GPU ``index``: a build for CUDA 13 has none before Turing."""
    built, capability = torch.cuda.get_arch_list(), torch.cuda.get_device_capability(index)
    if not built or any(_runs_on(capability, target) for target in built):
        return None
    name = f"{torch.cuda.get_device_name(index)} (compute capability {capability[0]}.{capability[1]})"
    return UnusedGpu(f"torch {torch.__version__} has no kernels for {name}, only for {', '.join(built)}",
                     f"install a torch that was built for an older CUDA (docs/install.md); {ON_CPU}")


def _runs_on(capability: tuple[int, int], target: str) -> bool:
    """Return True if code for ``target`` (sm_90: for GPUs of generation 9; compute_120: also for later ones) runs on a
    GPU of ``capability``. Names of other makers are left to torch."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", target)
    if found is None:
        return True
    code = int(found[2]), int(found[3])
    return code <= capability and (found[1] == "compute" or code[0] == capability[0])


def rank_device(local_rank: int, local_world_size: int, root: Path = ROOT) -> torch.device:
    """Return the device of a rank: its own GPU, or the CPU on a machine without one (or with all of them hidden).

    Raises:
        UserError: torch cannot use the GPU of this rank, or there are more ranks than GPUs.
    """
    if unused := unused_gpu(root):
        raise UserError(f"{unused.text}: {unused.remedy}")
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if max(local_rank + 1, local_world_size) > count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise UserError(
            f"{local_world_size} process{'es' if local_world_size > 1 else ''} on this machine (LOCAL_RANK "
            f"{local_rank}), but torch sees {count} GPU{'s' if count > 1 else ''}, and each process needs its own, "
            f"number LOCAL_RANK: give torchrun --nproc-per-node {count}, or make more visible (CUDA_VISIBLE_DEVICES is "
            f"{visible})")
    if unused := unsupported_gpu(local_rank):
        raise UserError(f"{unused.text}: {unused.remedy}")
    return torch.device("cuda", local_rank)


def peak_flops(device: str) -> float | None:
    """Return the dense bfloat16 operations per second of a GPU by its whole name; None when it is not in the table, as
    for a part of a GPU (MIG, vGPU)."""
    words = re.split(r"[\s-]+", device.upper())
    found = PEAK_TFLOPS.get("".join(word for word in words if not _NO_PART.fullmatch(word)))
    return found and found * 1e12


def gpu_name() -> str:
    """Return the name of the first GPU of this machine, or an empty string."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
