"""Joining and leaving the process group that torchrun describes, and a test of it."""
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from lightrft.utils.errors import UserError

# Gloo's threads free the tensors of the last collectives after the caller has continued, and need the interpreter for
# it. One that asks for it while the interpreter ends aborts the process (PyThread_exit_thread below a destructor), and
# torchrun calls the finished run a failure. Nothing reports when they are done; they take microseconds once scheduled.
DRAIN_S = 0.2
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def local_world_size() -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def join(timeout_s: int) -> bool:
    """Create the default group: gloo for CPU tensors, NCCL for CUDA ones. Without torchrun it has one rank and no port.

    Returns:
        True if this call created the group, False if it existed already.
    """
    if dist.is_initialized():
        return False
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=timeout_s)
    missing = [name for name in TORCHRUN if name not in os.environ]
    if not missing:
        dist.init_process_group(backend, timeout=timeout)
    elif "RANK" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"the environment lacks {', '.join(missing)}; start the script with torchrun")
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return True


def leave() -> None:
    """Destroy every group, and give its threads the time to release their tensors."""
    dist.destroy_process_group()
    time.sleep(DRAIN_S)


def count_ranks(device_type: str) -> int:
    """Count the ranks of the default group by a sum on "cpu" (gloo) or on this rank's GPU, "cuda" (NCCL).

    Raises:
        RuntimeError: the backend does not work here; the message is the backend's.
    """
    index = int(os.environ.get("LOCAL_RANK", "0")) if device_type == "cuda" else 0
    one = torch.ones(1, device=torch.device(device_type, index))
    dist.all_reduce(one)
    return int(one)
