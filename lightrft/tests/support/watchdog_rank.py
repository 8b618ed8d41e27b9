"""A rank of the watchdog test: ``torchrun ... watchdog_rank.py MODE``. Rank 1 misbehaves, rank 0 waits for it."""
import ctypes
import os
import sys
import time

import torch
import torch.distributed as dist

from lightrft.utils.env import World
from lightrft.utils.logging import get_logger
from lightrft.utils.watchdog import (Watchdog, connect_store, install_signal_handlers, stop_exit_code, stop_requested)


def misbehave(mode: str) -> None:
    time.sleep(1.5)  # long enough for a beat in this phase
    if mode == "exit":
        os._exit(1)
    if mode == "async":
        ctypes.string_at(0)  # a segmentation fault
    if mode == "raise":
        raise ValueError("the reward of sample 17 is broken")
    if mode == "hang":
        time.sleep(100)


def main() -> None:
    mode, world = sys.argv[1], World.from_env()
    torch.set_num_threads(1)
    install_signal_handlers()
    dist.init_process_group("gloo")
    phases = ["warming up"]
    with Watchdog(world.rank, world.world_size, lambda: phases[-1], 3.0 if mode == "hang" else 60.0,
                  connect_store(world)):
        dist.barrier()
        for step in range(3):
            phases.append(f"step {step}")
            time.sleep(0.1)
        phases.append("waiting" if world.rank == 0 else "fault")
        if mode == "stop":
            get_logger().warning(f"READY {world.rank}")
            while not stop_requested():
                time.sleep(0.05)
        elif world.rank == 1:
            misbehave(mode)
        elif mode == "async":
            dist.all_reduce(torch.zeros(1), async_op=True).wait()
        dist.barrier()
    dist.destroy_process_group()
    get_logger().warning(f"rank {world.rank} is done")
    sys.exit(stop_exit_code())


if __name__ == "__main__":
    main()
