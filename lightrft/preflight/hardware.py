"""Machines that a run is planned for: the one it starts on, or one named by ``--plan_gpus``."""
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightrft.config.options import ConfigError
from lightrft.preflight.cost import GIB

# GiB that CUDA has for a process, as its out-of-memory errors name them
GPUS = {
    "B200": 178.3, "H200": 139.8, "H100": 79.1, "A100": 79.1, "L40S": 44.4, "A10": 22.0, "L4": 22.0, "RTX4090": 23.6
}
AMPERE = 8  # compute capability of the first GPUs with bfloat16


@dataclass(frozen=True)
class Device:
    """A device that ranks compute on; ``free`` and ``total`` are the bytes of memory of one rank."""
    name: str
    free: int
    total: int

    @property
    def cuda(self) -> bool:
        """Return True for a GPU."""
        return self.name != "cpu"

    @property
    def here(self) -> bool:
        """Return True for a GPU of this machine, not one of ``--plan_gpus``."""
        return self.name.startswith("cuda:")


UNKNOWN = Device("cpu", 0, 0)


@dataclass(frozen=True)
class Machine:
    """Ranks of a run, the device of one of them, the name of its GPU (empty: a CPU), whether all GPUs that the run uses
    on the machine have bfloat16 in hardware, which flash attention needs, and the ranks on each machine (0: all)."""
    ranks: int
    device: Device
    gpu: str = ""
    bf16: bool = True
    local_ranks: int = 0

    @classmethod
    def here(cls, ranks: int, local_rank: int = 0, local_ranks: int | None = None) -> "Machine":
        """Describe this machine, of whose GPUs ``local_ranks`` (default: all ``ranks``) use the first. No CUDA context
        is opened, so a GPU counts as free."""
        import torch
        if not torch.cuda.is_available():
            return cls(ranks, devices(ranks)[0], local_ranks=local_ranks or 0)
        used = range(min(local_ranks or ranks, torch.cuda.device_count()))
        gpus = [torch.cuda.get_device_properties(index) for index in used]
        found, oldest = gpus[min(local_rank, len(gpus) - 1)], min(gpus, key=lambda gpu: gpu.major)
        device = Device(f"cuda:{local_rank}", found.total_memory, found.total_memory)
        native = oldest.major >= AMPERE
        return cls(ranks, device, found.name if native else oldest.name, native, local_ranks or 0)

    @classmethod
    def planned(cls, text: str) -> "Machine":
        """Read ``8xH100``, ``1x24`` (GPUs of 24 GiB), ``2x8xH100`` (nodes of 8 GPUs each).

        Raises:
            ConfigError: it is none of these.
        """
        found = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)x(?:(\d+(?:\.\d+)?)|(\w+))", text)
        known = {name.lower(): name for name in GPUS}
        if not found or found[4] and found[4].lower() not in known:
            raise ConfigError(f"--plan_gpus {text}: expected GPUS x NAME or GPUS x GIB, e.g. 8xH100, 1x24, or "
                              f"2x8xH100 for two machines; names: {', '.join(GPUS)}")
        nodes, count, gib, typed = found.groups()
        name = known[typed.lower()] if typed else None
        memory = int((GPUS[name] if name else float(gib)) * GIB)
        gpu = name or f"a GPU of {gib} GiB"
        return cls(int(nodes or 1) * int(count), Device(gpu, memory, memory), gpu, local_ranks=int(count))


def unlike_gpus(names: Sequence[str]) -> Iterator[str]:
    """Yield a warning if the GPUs of ranks 0, 1, ... have different names (empty: a CPU)."""
    first = {name: names.index(name) for name in names}
    if len(first) > 1:
        listed = ", ".join(f"{name or 'a CPU'} on rank {rank}" for name, rank in first.items())
        yield f"the GPUs of the run differ ({listed}): every step waits for the slowest"


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
