"""Strategies on a process group: joining and leaving the one that torchrun describes, its collectives."""
import atexit
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightrft.config.schema import StrategyConfig
from lightrft.strategy import collectives
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.mesh import Axes, group_of, Mesh
from lightrft.utils.env import World
from lightrft.utils.errors import UserError, first_line
from lightrft.utils.gpu import rank_device
from lightrft.utils.launcher import share_cores, warn_of_load

# Gloo's threads free the tensors of the last collectives after the caller has continued, and need the interpreter for
# it. One that asks for it while the interpreter ends aborts the process (PyThread_exit_thread below a destructor), and
# torchrun calls the finished run a failure. Nothing reports when they are done; they take microseconds once scheduled.
DRAIN_S = 0.2
START_S = 600  # ranks of several machines start within it
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
NETWORK = (f"Every machine must reach MASTER_ADDR, and {' and '.join(INTERFACES)} must name the network interface that "
           "the machines share (ip addr lists them)")
PORT = "Another program has this port: give another one, as --master_port of torchrun or deepspeed"
USES = Counter[str]()  # of torchrun's store, in this process
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of the decoder and of towers: the outermost modules that Hugging Face recomputes one by one under
    gradient checkpointing. ``_no_split_modules`` names less (attention alone) or more (whole towers) in some families.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer  # slow to import; the doctor needs none

    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def local_world_size() -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def missing_in_environment() -> list[str]:
    """Names that torchrun sets, and that are not set."""
    return [name for name in TORCHRUN if name not in os.environ]


def join(timeout_s: int) -> bool:
    """Create the default group: gloo for CPU tensors, NCCL for CUDA ones. Without torchrun it has one rank and no port.

    ``timeout_s`` limits its collectives, and those of every group that is made later without a limit of its own (parts
    of a mesh, DeepSpeed's groups): torch gives these 30 minutes, and with NCCL alone 10.

    Returns:
        True if this call created the group, False if it existed already.
    """
    timeout = timedelta(seconds=timeout_s)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(dist.distributed_c10d, name, timeout)
    if dist.is_initialized():
        return False
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    missing = missing_in_environment()
    if not missing:
        with network_hint():
            store, rank, size = _store_of("group")
            store.set_timeout(timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    elif "RANK" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"the environment lacks {', '.join(missing)}; start the script with torchrun")
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return True


def gather_early(text: str) -> list[str]:
    """Return the ``text`` of every rank, before there is a process group; no rank needs a device for it.

    The first rank returns when all have read: it may hold the store, and end.
    """
    if World.from_env().world_size == 1 or missing_in_environment():
        return [text]
    with network_hint():
        store, rank, size = _store_of("early")
        store.set(f"text/{rank}", text)
        texts = [store.get(f"text/{other}").decode() for other in range(size)]
        store.set(f"read/{rank}", "")
        if rank == 0:
            store.wait([f"read/{other}" for other in range(size)])
    return texts


@lru_cache(maxsize=1)
def _rendezvous() -> tuple[dist.Store, int, int]:
    """The store of torchrun, this rank, and their number; kept, because the first rank may serve it."""
    return next(dist.rendezvous("env://", timeout=timedelta(seconds=START_S)))


def _store_of(use: str) -> tuple[dist.Store, int, int]:
    """:func:`_rendezvous` with room for one ``use``: a later run in this process must not read what an earlier one has
    left, such as the addresses of its ranks. Every rank calls it equally often."""
    base, rank, size = _rendezvous()
    USES[use] += 1
    return dist.PrefixStore(f"lightrft/{use}/{USES[use]}", base), rank, size


@contextmanager
def network_hint() -> Iterator[None]:
    """Add the remedy to an error of ranks that cannot connect to each other.

    Raises:
        UserError: the group cannot be created.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        names = ", ".join(f"{name}={os.environ.get(name, 'not set')}"
                          for name in ("MASTER_ADDR", "MASTER_PORT", *INTERFACES))
        raise UserError(f"the ranks cannot connect: {first_line(error)} ({names}). "
                        f"{PORT if 'EADDRINUSE' in str(error) else NETWORK}") from error


def leave(destroy: Callable[[], None] = dist.destroy_process_group) -> None:
    """Destroy every group. Its threads have time to release their tensors before the interpreter ends."""
    destroy()
    atexit.unregister(_drain)
    atexit.register(_drain, time.monotonic() + DRAIN_S)


def _drain(until: float) -> None:
    time.sleep(max(0.0, until - time.monotonic()))


def count_ranks(device_type: str) -> int:
    """Count the ranks of the default group by a sum on "cpu" (gloo) or on this rank's GPU, "cuda" (NCCL).

    Raises:
        RuntimeError: the backend does not work here; the message is the backend's.
    """
    index = int(os.environ.get("LOCAL_RANK", "0")) if device_type == "cuda" else 0
    one = torch.ones(1, device=torch.device(device_type, index))
    dist.all_reduce(one)
    return int(one)


class DistributedStrategy(StrategyBase):
    """A strategy on the process group of torchrun, or on a group of a single rank.

    ``ranks``: those of the group that it runs on; None: all. Each of them sets the strategy up, and no other rank does.
    ``axes``: what else than samples they divide.
    """

    def __init__(self, cfg: StrategyConfig | None = None, bf16: bool = False, ranks: Sequence[int] | None = None,
                 axes: Axes = Axes()) -> None:
        super().__init__(cfg, bf16)
        self.axes = axes
        self.ranks = None if ranks is None else sorted(ranks)  # as torch orders those of a group
        self.group: dist.ProcessGroup | None = None  # of ``ranks``
        self._owns_group = False

    # -- life ---------------------------------------------------------------------------------------------------------
    def setup(self) -> None:
        """Join the group; one CUDA device per rank where there is CUDA."""
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = rank_device(self.local_rank, local_world_size())
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            warn_of_load(share_cores(local_world_size(), dict(os.environ)))
        self._owns_group = join(self.cfg.collective_limit_s)
        self._join_ranks(dist.get_rank())
        self.distributed = True

    def _join_ranks(self, rank: int) -> None:
        """Find the place of the ``rank`` of the default group among the ranks of this strategy."""
        ranks = range(dist.get_world_size()) if self.ranks is None else self.ranks
        if rank not in ranks:
            raise UserError(f"rank {rank} does not run this strategy, which is on the ranks {list(ranks)}")
        self.rank, self.world_size = ranks.index(rank), len(ranks)
        self.group = None if self.ranks is None else group_of(ranks)
        self._gathers, self._exchanges = (collectives.ObjectExchange(self.group) for _ in range(2))  # sizes differ

    @property
    def mesh(self) -> Mesh:
        """Override :attr:`StrategyBase.mesh`: the ranks may be some of the process group."""
        return Mesh(self.ranks or range(self.world_size), self.rank, self.device.type, self.group, self.axes)

    def teardown(self) -> None:
        """Leave the group, if :meth:`setup` joined it."""
        if self._owns_group and dist.is_initialized():
            leave(self._destroy_groups)
        self._owns_group = self.distributed = False

    def _destroy_groups(self) -> None:
        """Destroy every group of this process."""
        dist.destroy_process_group()

    # -- collectives --------------------------------------------------------------------------------------------------
    def all_reduce(self, value: Tensor, op: str = "sum") -> Tensor:
        """Reduce in a type that gloo and NCCL both know."""
        return collectives.all_reduce(value, op, self.group)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather in one exchange, as a rule."""
        return self._gathers.gather(value)

    def exchange(self, outgoing: list[Any]) -> list[Any]:
        """Exchange in one all-to-all, as a rule."""
        return self._exchanges.exchange(outgoing)

    def barrier(self) -> None:
        """Wait for all ranks and for the work queued on this device."""
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
